"""Canaries, adapters, quantisation, device maps, and the device's errors as ours."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from contract.errors import DeviceLostError, ModelLoadError, OutOfMemoryError
from contract.models import ModelConfig
from tests.engine.helpers import assert_close, draw_ids, logits_of, score
from tests.tiny_models import make_tiny
from worker.engine import adapters
from worker.engine.forward import copy_to_host, translate_errors
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
Folders = Callable[..., Path]

LLAMA = "LlamaForSequenceClassification"


class TestLibraries:
    """What needs an optional library says so."""

    @pytest.mark.parametrize(
        ("entry", "library"),
        [
            ({"adapter": "a"}, "peft"),
            ({"quantization": "8bit"}, "bitsandbytes"),
            ({"device_map": "auto"}, "accelerate"),
        ],
    )
    def test_missing(
        self,
        entry: dict[str, Any],
        library: str,
        folder_of: Folders,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The library is named."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

        with pytest.raises(ModelLoadError, match=library):
            load_model("tiny", ModelConfig(source=str(folder_of(LLAMA)), **entry))

    def test_unknown_quantization(self, folder_of: Folders) -> None:
        """Only 8bit and 4bit are known."""
        with pytest.raises(ModelLoadError, match="8bit, 4bit"):
            load_model("tiny", ModelConfig(source=str(folder_of(LLAMA)), quantization="2bit"))

    def test_tensor_parallel(self, folder_of: Folders) -> None:
        """A tensor parallel plan is refused with what is supported instead."""
        entry = ModelConfig(source=str(folder_of(LLAMA)), tp_plan="auto")

        with pytest.raises(ModelLoadError, match=r"one process .* set device_map = \"auto\""):
            load_model("tiny", entry)

    def test_quantization_arguments(self) -> None:
        """The entry's word becomes transformers' own config, on the devices it chooses."""
        entry = ModelConfig(source="s", quantization="4bit")
        found = adapters.choose_placement(entry, "cuda:1", quantized=False)

        assert found["quantization_config"].load_in_4bit
        assert found["device_map"] == {"": "cuda:1"}

    @pytest.mark.parametrize(
        ("stored", "entry", "match"),
        [
            ({"quant_method": "gptq", "bits": 4}, {}, r"optimum"),
            ({"quant_method": "compressed-tensors"}, {}, r"compressed-tensors"),
            ({"quant_method": "of_my_own"}, {}, r"'of_my_own' is not known"),
            ({"bits": 4}, {}, r"None is not known"),
            ({"quant_method": "awq"}, {"quantization": "8bit"}, r"quantized already \(awq\)"),
        ],
    )
    def test_quantized_checkpoint(
        self,
        stored: dict[str, Any],
        entry: dict[str, Any],
        match: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A checkpoint's own quantisation is honoured or refused by name, never passed over."""
        monkeypatch.setattr(adapters, "check_libraries", lambda *_: None)
        folder = make_tiny(tmp_path / "m", LLAMA)
        config = folder / "config.json"
        raw = json.loads(config.read_text())
        config.write_text(json.dumps(raw | {"quantization_config": stored}))

        with pytest.raises(ModelLoadError, match=match):
            load_model("tiny", ModelConfig(source=str(folder), **entry))

    @pytest.mark.parametrize("bits", [8, 4])
    def test_quantized(self, bits: int, folder_of: Folders, scorer_of: Scorers) -> None:
        """Where bitsandbytes is installed: plain transformers' quantised scores, not the plain."""
        pytest.importorskip("bitsandbytes")
        items = draw_ids(5, 20)
        wide = {
            "hidden_size": 64,
            "intermediate_size": 128,
        }  # a row holds a block of 64
        folder = folder_of(LLAMA, **wide)
        library: Any = transformers
        plain = library.AutoModelForSequenceClassification.from_pretrained(
            folder,
            quantization_config=library.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}),
            device_map={"": "cpu"},
            dtype=torch.float32,
        )
        with torch.no_grad():
            states = [plain.model(torch.tensor([item])).last_hidden_state[0, -1] for item in items]
            expected = torch.stack([plain.score(state) for state in states]).numpy()

        entry = ModelConfig(source=str(folder), quantization=f"{bits}bit")
        found = logits_of(score(load_model("q", entry), items=items))

        assert_close(found, expected, tolerance=1e-3)
        exact = logits_of(score(scorer_of(LLAMA, **wide), items=items))
        assert np.abs(found - exact).max() > 1e-3

    def test_device_map(self, folder_of: Folders, scorer_of: Scorers) -> None:
        """A model placed by a device map gives the same scores."""
        folder = folder_of(LLAMA)
        items = draw_ids(5, 20)

        mapped = load_model("mapped", ModelConfig(source=str(folder), device_map="cpu"))

        expected = logits_of(score(scorer_of(LLAMA), items=items))
        assert_close(logits_of(score(mapped, items=items)), expected, tolerance=1e-5)


class TestAdapters:
    """LoRA adapters are merged at load."""

    @pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers renamed
    def test_merged(self, folder_of: Folders, scorer_of: Scorers, tmp_path: Path) -> None:
        """Scores are those of the merged weights, the adapter's own head included."""
        peft = pytest.importorskip("peft")
        folder = make_tiny(tmp_path / "base", LLAMA)
        kind = __import__("transformers").AutoModelForSequenceClassification
        model = peft.get_peft_model(
            kind.from_pretrained(folder),
            peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"),
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "score" in name:
                    parameter.normal_(0, 0.2)
        model.save_pretrained(tmp_path / "adapter")
        weights = load_file(folder / "model.safetensors")
        del weights["score.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        items = draw_ids(5, 20)
        plain = model.merge_and_unload().eval()
        with torch.no_grad():
            expected = [
                plain.score(plain.model(torch.tensor([item])).last_hidden_state[0, -1]).numpy()
                for item in items
            ]

        config = ModelConfig(source=str(folder), adapter=str(tmp_path / "adapter"))
        found = score(load_model("lora", config), items=items)

        assert_close(logits_of(found), np.stack(expected), tolerance=1e-5)

    def test_no_such_adapter(self, folder_of: Folders, tmp_path: Path) -> None:
        """An adapter that is not there is named."""
        pytest.importorskip("peft")

        with pytest.raises(ModelLoadError, match="cannot be merged"):
            load_model("lora", ModelConfig(source=str(folder_of(LLAMA)), adapter=str(tmp_path)))


class TestDevice:
    """The device's troubles, told apart."""

    @pytest.mark.parametrize(
        ("raised", "expected"),
        [
            (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemoryError),
            (torch.AcceleratorError("CUDA error: an illegal access"), DeviceLostError),
            (RuntimeError("CUDA error: device-side assert triggered"), DeviceLostError),
            (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), DeviceLostError),
            (RuntimeError("shapes cannot be multiplied"), RuntimeError),
            (IndexError("index out of range"), IndexError),
        ],
    )
    def test_errors(self, raised: Exception, expected: type[Exception]) -> None:
        """Memory may be retried smaller, a lost context ends the process, the rest is a bug."""
        with pytest.raises(expected), translate_errors():
            raise raised

    def test_one_copy(self) -> None:
        """On a CPU nothing is copied."""
        tensors = [torch.zeros(2, 3), torch.ones(4, dtype=torch.bfloat16)]

        assert copy_to_host(tensors) is tensors

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu(self, folder_of: Folders, scorer_of: Scorers) -> None:
        """The same scores from a GPU, hidden states in one copy with them."""
        items = draw_ids(5, 20, 90)
        scorer = load_model(
            "gpu", ModelConfig(source=str(folder_of(LLAMA)), device="cuda", dtype="float32")
        )

        found = score(scorer, items=items, return_pooled_hidden_states=True)

        expected = score(scorer_of(LLAMA), items=items, return_pooled_hidden_states=True)
        assert_close(logits_of(found), logits_of(expected), tolerance=1e-3)
        assert_close(
            found.tensors["hidden_states"], expected.tensors["hidden_states"], tolerance=1e-3
        )
