"""What cannot be served is refused at load, in a sentence that says what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.errors import ModelLoadError
from contract.models import ModelConfig, ScoringPath
from tests.engine.helpers import assert_close, draw_ids, logits_of, score
from tests.tiny_models import make_tiny
from worker.engine.loader import load_model, set_up_threads
from worker.engine.scorer import ModelScorer

Folders = Callable[..., Path]
Scorers = Callable[..., ModelScorer]

LLAMA = "LlamaForSequenceClassification"
BERT = "BertForSequenceClassification"


def load(source: Path | str, **entry: Any) -> ModelScorer:
    """Load from a folder with these fields of the registry entry."""
    found = load_model("tiny", ModelConfig(source=str(source), **entry))
    assert isinstance(found, ModelScorer)
    return found


def edit_config(folder: Path, **changes: object) -> None:
    """Change fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors; ``__`` in a name stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del weights[key]
        else:
            weights[key] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


class TestWeights:
    """A head that is not in the checkpoint is never made up."""

    def test_base_model_as_classifier(self, folder_of: Folders) -> None:
        """A checkpoint without head names the weights that it lacks."""
        with pytest.raises(ModelLoadError, match=r"classifier\.bias, classifier\.weight"):
            load(folder_of("BertModel"))

    def test_causal_checkpoint_as_classifier(self, folder_of: Folders) -> None:
        """Path = classification on a language model lacks score.weight."""
        with pytest.raises(ModelLoadError, match=r"score\.weight"):
            load(folder_of("LlamaForCausalLM"), path=ScoringPath.CLASSIFICATION)

    def test_classifier_as_causal(self, folder_of: Folders) -> None:
        """Path = causal on a classifier lacks lm_head.weight."""
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
            load(folder_of(LLAMA), path=ScoringPath.CAUSAL)

    def test_wrong_number_of_labels(self, tmp_path: Path) -> None:
        """A head of another shape than the config says is refused."""
        folder = make_tiny(tmp_path / "m", BERT)
        edit_weights(folder, classifier__weight=torch.zeros(5, 32))

        with pytest.raises(ModelLoadError, match="cannot be loaded"):
            load(folder)

    def test_head_bias_of_a_bias_free_head(self, tmp_path: Path) -> None:
        """A decoder's linear head keeps the bias that its checkpoint has."""
        folder = make_tiny(tmp_path / "m", LLAMA)
        items = draw_ids(5, 9)
        plain = logits_of(score(load(folder), items=items))
        edit_weights(folder, score__bias=torch.tensor([1.0, -2.0, 3.0]))

        biased = logits_of(score(load(folder), items=items))

        assert_close(biased - plain, [[1, -2, 3], [1, -2, 3]], tolerance=1e-5)

    def test_unknown_class_with_weights_of_its_own(self, tmp_path: Path) -> None:
        """Weights that transformers would drop in silence are named instead."""
        folder = make_tiny(tmp_path / "m", LLAMA)
        edit_config(folder, architectures=["LlamaWithGate"])
        edit_weights(folder, gate__weight=torch.zeros(3, 3))

        with pytest.raises(ModelLoadError, match=r"LlamaWithGate is not known.*gate\.weight"):
            load(folder)

    def test_sharded(self, tmp_path: Path, folder_of: Folders) -> None:
        """A checkpoint in several files gives the same scores."""
        folder = make_tiny(tmp_path / "m", LLAMA)
        weights = load_file(folder / "model.safetensors")
        names = sorted(weights)
        halves = {"a": names[::2], "b": names[1::2]}
        index: dict[str, str] = {}
        for half, keys in halves.items():
            file = f"model-{half}.safetensors"
            save_file({key: weights[key] for key in keys}, folder / file, {"format": "pt"})
            index |= dict.fromkeys(keys, file)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
        items = draw_ids(5, 9)

        found = logits_of(score(load(folder), items=items))

        assert_close(found, logits_of(score(load(folder_of(LLAMA)), items=items)), tolerance=1e-5)


class TestFiles:
    """What is wrong with the files."""

    def test_no_such_folder(self, tmp_path: Path) -> None:
        """A path that is not there is not looked up on the hub."""
        with pytest.raises(ModelLoadError, match="there is no folder"):
            load(tmp_path / "absent")

    def test_file_instead_of_folder(self, folder_of: Folders) -> None:
        """A file is refused with the folder to name."""
        with pytest.raises(ModelLoadError, match="is a file"):
            load(folder_of(BERT) / "model.safetensors")

    def test_hub_id_while_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hub id that the cache does not hold says so."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

        with pytest.raises(ModelLoadError, match="nobody/nothing at revision main is neither"):
            load("nobody/nothing", revision="main")

    def test_no_config(self, tmp_path: Path) -> None:
        """A folder without config.json is not a checkpoint."""
        with pytest.raises(ModelLoadError, match=r"no config\.json"):
            load(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_corrupt_config(self, text: str, tmp_path: Path) -> None:
        """A config that is not a JSON object is corrupt."""
        (tmp_path / "config.json").write_text(text)

        with pytest.raises(ModelLoadError, match="corrupt"):
            load(tmp_path)

    def test_corrupt_weights(self, tmp_path: Path) -> None:
        """A truncated safetensors file is named."""
        folder = make_tiny(tmp_path / "m", BERT)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:2000])

        with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt"):
            load(folder)

    def test_no_weights(self, tmp_path: Path) -> None:
        """A folder without weights says which files are looked for."""
        folder = make_tiny(tmp_path / "m", BERT)
        (folder / "model.safetensors").unlink()

        with pytest.raises(ModelLoadError, match="holds no weights"):
            load(folder)

    def test_pickle(self, tmp_path: Path, folder_of: Folders) -> None:
        """Weights only as pickle are refused, unless the entry allows them."""
        folder = make_tiny(tmp_path / "m", BERT)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

        with pytest.raises(ModelLoadError, match=r"only as pickle.*allow_pickle"):
            load(folder)
        allowed = load(folder, allow_pickle=True)
        items = draw_ids(7)
        assert_close(
            logits_of(score(allowed, items=items)),
            logits_of(score(load(folder_of(BERT)), items=items)),
            tolerance=1e-5,
        )

    def test_code_to_be_trusted(self, tmp_path: Path) -> None:
        """A checkpoint that needs its own code is refused unless the entry trusts it."""
        folder = make_tiny(tmp_path / "m", BERT)
        edit_config(folder, model_type="my_own", auto_map={"AutoModel": "modeling_my_own.MyOwn"})

        with pytest.raises(ModelLoadError, match="trust_remote_code"):
            load(folder)

    def test_unknown_model_type(self, tmp_path: Path) -> None:
        """A model type that transformers does not know is refused."""
        folder = make_tiny(tmp_path / "m", BERT)
        edit_config(folder, model_type="from_the_future")

        with pytest.raises(ModelLoadError, match="cannot be loaded"):
            load(folder)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        """A checkpoint without tokenizer is refused."""
        folder = make_tiny(tmp_path / "m", BERT)
        (folder / "tokenizer.json").unlink()

        with pytest.raises(ModelLoadError, match="tokenizer"):
            load(folder)


class TestEntry:
    """What the registry entry asks for."""

    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            ({"dtype": "float8"}, "dtype"),
            ({"device": "abacus"}, "device"),
            ({"device": "cuda:7"}, "not available"),
            ({"max_tokens": 5000}, "512 positions"),
        ],
    )
    def test_refused(self, entry: dict[str, Any], match: str, folder_of: Folders) -> None:
        """An impossible wish is refused by name."""
        with pytest.raises(ModelLoadError, match=match):
            load(folder_of(BERT), **entry)

    def test_dtype(self, tmp_path: Path) -> None:
        """Auto is fp32 on a CPU, also for a bf16 checkpoint; bfloat16 is what it says."""
        folder = make_tiny(tmp_path / "m", LLAMA, dtype=torch.bfloat16)

        assert load(folder).description.dtype == "float32"
        assert load(folder, dtype="bfloat16").description.dtype == "bfloat16"

    def test_position_limits(self, scorer_of: Scorers) -> None:
        """RoBERTa's table of 514 serves 512 tokens; the entry may ask for less."""
        assert scorer_of("RobertaForSequenceClassification").description.max_tokens == 512
        assert scorer_of(LLAMA, entry={"max_tokens": 40}).description.max_tokens == 40

    def test_receipt(self, scorer_of: Scorers) -> None:
        """The receipt names everything that the numbers depend on."""
        found = score(scorer_of(LLAMA), items=["good"]).receipt

        assert found["weights"].startswith("sha256:")
        assert found["tokenizer"].startswith("sha256:")
        named = {
            "model",
            "source",
            "revision",
            "architecture",
            "dtype",
            "device",
            "attention",
            "linear",
        }
        named |= {"template", "path", "pooling", "head", "activation", "labels", "torch"}
        named |= {"transformers", "truncated_items", "shared_prefix_items"}
        assert named <= found.keys()

    def test_threads(self) -> None:
        """A number is taken as it is, None takes the cores of this process."""
        assert set_up_threads(1) == 1
        assert set_up_threads() >= 1
        set_up_threads(1)
        assert torch.get_num_threads() == 1
