"""Classification: activations, pooling by length, pairs, shapes, hidden states, isolation."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.errors import InvalidRequestError, NonFiniteScoreError
from contract.models import ModelConfig
from contract.scores import Activation, ItemError
from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request, score
from tests.reference import Reference
from tests.tiny_models import make_tiny
from worker.engine.activations import activate, read_default_activation
from worker.engine.loader import load_model
from worker.engine.pooling import Pooling, pool_hidden_states
from worker.engine.results import finish_job
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Reading

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]
Folders = Callable[..., Path]

LLAMA = "LlamaForSequenceClassification"
BERT = "BertForSequenceClassification"


@pytest.mark.parametrize(
    "logits", [[-100.0, 5.0], [-60.0, 30.0], [1e4, -1e4], [0.0, 0.0], [3.0, 2.0, 1.0]]
)
def test_softmax_is_centred(logits: list[float]) -> None:
    """Finite, sums to one, and equals torch's softmax in float64, however far apart."""
    found = activate(np.array([logits], np.float32), Activation.SOFTMAX)

    expected = torch.softmax(torch.tensor([logits], dtype=torch.float64), -1)
    assert np.isfinite(found).all()
    assert_close(found, expected, tolerance=1e-12)
    assert_close(found.sum(-1), 1.0, tolerance=1e-12)


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 0.5, 2.0, 1e300])
def test_any_temperature_gives_a_distribution(temperature: float) -> None:
    """Finite, sums to one, in the logits' order; equals torch's where torch does not overflow."""
    logits = np.array([[1.5, -2.0, 1.0]], np.float32)

    found = activate(logits, Activation.SOFTMAX, temperature=temperature)

    assert_close(found.sum(-1), 1.0, tolerance=1e-12)
    assert found[0, 0] >= found[0, 2] >= found[0, 1]
    if temperature > 1e-300:
        scaled = torch.tensor(logits, dtype=torch.float64) / temperature
        assert_close(found, torch.softmax(scaled, -1), tolerance=1e-12)


def test_sigmoid_keeps_the_order_of_close_logits() -> None:
    """8.1 and 9.3 differ after a sigmoid, and large negative logits do not overflow."""
    found = activate(np.array([8.1, 9.3, -1e4, 1e4], np.float32), Activation.SIGMOID)

    assert found[0] < found[1] < 1
    assert found[2:].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("config", "labels", "expected"),
    [
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            2,
            "none",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            3,
            "sigmoid",
        ),
        ({"sbert_ce_default_activation_function": "my.own.Thing"}, 3, None),
        ({"problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"problem_type": "single_label_classification"}, 4, "softmax"),
        ({"problem_type": "regression"}, 1, "none"),
        ({}, 1, "sigmoid"),
        ({}, 2, "softmax"),
    ],
)
def test_default_activation(config: dict[str, object], labels: int, expected: str | None) -> None:
    """A checkpoint's own word first, then its problem type, then what pipelines do."""
    found = read_default_activation(config, labels)

    assert found == expected


class TestActivations:
    """What a request does to the logits."""

    def test_raw_logits_are_rows(self, scorer_of: Scorers) -> None:
        """One label gives rows of one, never bare numbers; the raw logit is kept too."""
        scorer = scorer_of(BERT, labels=1)

        found = score(scorer, query="good?", items=["yes", "no"])

        assert np.shape(found.tensors["scores"]) == (2, 1)
        assert_close(found.tensors["scores"], logits_of(found), tolerance=0)

    @pytest.mark.parametrize("fields", [{"apply_softmax": True}, {"activation": "softmax"}])
    def test_softmax_of_one_label_is_refused(
        self, fields: dict[str, bool], scorer_of: Scorers
    ) -> None:
        """It would be the constant 1.0; the refusal names the sigmoid."""
        scorer = scorer_of(LLAMA, labels=1)

        with pytest.raises(InvalidRequestError, match="sigmoid"):
            score(scorer, items=["yes"], **fields)

    def test_multi_label_follows_the_checkpoint(self, scorer_of: Scorers) -> None:
        """activation=model on a multi-label checkpoint is a sigmoid of each class."""
        scorer = scorer_of(BERT, labels=4, problem_type="multi_label_classification")

        found = score(scorer, items=["good film", "terrible"], activation="model")

        assert_close(found.tensors["scores"], 1 / (1 + np.exp(-logits_of(found))), tolerance=1e-6)
        assert found.receipt["activation"] == "sigmoid"
        assert np.abs(np.sum(found.tensors["scores"], 1) - 1).max() > 1e-3

    def test_unknown_activation_of_a_checkpoint(self, scorer_of: Scorers) -> None:
        """activation=model is refused where the checkpoint names a function of its own."""
        scorer = scorer_of(BERT, sbert_ce_default_activation_function="my.own.Thing")

        with pytest.raises(InvalidRequestError, match="activation"):
            score(scorer, items=["yes"], activation="model")

    def test_apply_softmax(self, scorer_of: Scorers) -> None:
        """Softmax over the classes, equal to float64."""
        scorer = scorer_of(BERT)

        found = score(scorer, items=["good", "bad"], apply_softmax=True)

        expected = torch.softmax(torch.from_numpy(logits_of(found)), -1)
        assert_close(found.tensors["scores"], expected, tolerance=1e-6)
        assert found.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]

    def test_half_precision_does_not_tie(self, folder_of: Folders, tmp_path: Path) -> None:
        """A bf16 model with logits beyond 8 still gives distinct sigmoids in the right order."""
        folder = make_tiny(tmp_path / "half", LLAMA, labels=1)
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] *= 12
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        scorer = load_model("half", ModelConfig(source=str(folder), dtype="bfloat16"))

        found = score(scorer, items=draw_ids(*range(3, 40), seed=4), activation="sigmoid")

        logits, scores = logits_of(found)[:, 0], np.asarray(found.tensors["scores"])[:, 0]
        high = (logits > 7) & (logits < 14)
        assert high.sum() >= 2
        assert len(set(scores[high])) == len(set(logits[high]))
        order = np.argsort(logits[high], kind="stable")
        assert (np.diff(scores[high][order]) >= 0).all()

    def test_labels_are_ignored_with_a_warning(self, scorer_of: Scorers) -> None:
        """A classifier scores its own classes; the result says that labels were ignored."""
        found = score(scorer_of(BERT), items=["yes"], label_token_ids=[1, 2])

        assert any("ignored" in warning for warning in found.warnings)


class TestPooling:
    """The row that stands for a sequence is picked by its length."""

    @pytest.mark.parametrize("pad", ["eos", "own", None])
    @pytest.mark.parametrize("architecture", [LLAMA, "GPT2ForSequenceClassification"])
    def test_pad_token_inside_and_at_the_end(
        self, architecture: str, pad: str | None, scorer_of: Scorers, reference_of: References
    ) -> None:
        """A sequence that holds or ends with the pad id is read at its last token all the same."""
        options = {"tokenizer": {"pad": pad}}
        scorer, reference = (
            scorer_of(architecture, **options),
            reference_of(architecture, **options),
        )
        items = [[30, 2, 40, 2], [30, 2, 40, 2, 2], [0, 30, 0], *draw_ids(9, 2, 30)]

        together = logits_of(score(scorer, items=items))

        assert_close(together, [reference.logits(item) for item in items], tolerance=1e-5)
        assert_close(logits_of(score(scorer, items=[items[1]]))[0], together[1], tolerance=1e-5)

    def test_eos_in_text(self, scorer_of: Scorers, reference_of: References) -> None:
        """Pad == eos and a text that ends with it: alone and in a batch the same."""
        options = {"tokenizer": {"pad": "eos"}}
        scorer, reference = scorer_of(LLAMA, **options), reference_of(LLAMA, **options)
        items = ["good</s> film</s>", "yes", "a much longer text about the film and its plot"]

        together = logits_of(score(scorer, items=items))

        ids = [reference.tokenizer(item).input_ids for item in items]
        assert ids[0][-1] == reference.tokenizer.pad_token_id
        assert_close(together, [reference.logits(own) for own in ids], tolerance=1e-5)

    @pytest.mark.parametrize("architecture", ["Qwen2ForSequenceClassification", BERT])
    def test_left_padding_tokenizer(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """A tokenizer that says padding_side=left changes nothing."""
        options = {"tokenizer": {"padding_side": "left"}}
        scorer, reference = (
            scorer_of(architecture, **options),
            reference_of(architecture, **options),
        )
        items = ["good", "a good film with a great cast, and a plot that holds", "no"]

        found = score(scorer, items=items)

        expected = [reference.logits(reference.tokenizer(item).input_ids) for item in items]
        assert_close(logits_of(found), expected, tolerance=1e-5)

    def test_without_pad_token(self, scorer_of: Scorers) -> None:
        """Eight items of a model without pad token are scored, and one answer is not another's."""
        scorer = scorer_of("GPT2ForSequenceClassification", tokenizer={"pad": None})

        found = score(scorer, items=[f"text number {n} is good" for n in range(8)])

        assert not found.errors
        assert len(np.unique(np.round(logits_of(found)[:, 0], 5))) > 1

    def test_mean_in_any_order(self) -> None:
        """MEAN averages each sequence's own rows, in whatever order sequences are named."""
        hidden = torch.arange(12.0).reshape(6, 2)
        begins, ends = torch.tensor([4, 0]), torch.tensor([6, 4])

        pooled = pool_hidden_states(hidden, begins, ends, Pooling.MEAN)

        assert_close(pooled, [[9.0, 10.0], [3.0, 4.0]], tolerance=0)

    def test_modernbert_mean(self, scorer_of: Scorers, reference_of: References) -> None:
        """A checkpoint whose config says mean is pooled by mean, as its own head does."""
        name = "ModernBertForSequenceClassification"
        scorer = scorer_of(name, classifier_pooling="mean")
        reference = reference_of(name, classifier_pooling="mean")
        items = draw_ids(5, 60, 23, 5)

        found = score(scorer, items=items)

        assert scorer.description.pooling == "mean"
        assert_close(logits_of(found), [reference.logits(i) for i in items], tolerance=1e-5)

    def test_head_that_needs_the_whole_sequence(
        self, scorer_of: Scorers, reference_of: References
    ) -> None:
        """A head that looks at every position gets padded sequences and their mask."""
        options = {"classifier_pooling": "mean"}
        scorer = scorer_of("ModernBertForSequenceClassification", **options)
        reference = reference_of("ModernBertForSequenceClassification", **options)
        items = draw_ids(4, 30, 11)
        head = scorer.network.head
        pooling, head.pooling = head.pooling, Pooling.WHOLE

        found = score(scorer, items=items)

        head.pooling = pooling
        assert_close(logits_of(found), [reference.logits(i) for i in items], tolerance=1e-5)


class TestPairs:
    """Cross-encoders encode query and item as a pair."""

    def test_pair_can_be_turned_off(self, scorer_of: Scorers, reference_of: References) -> None:
        """Pair = false joins the texts; a query of None or "" leaves the item alone."""
        joined, reference = scorer_of(BERT, entry={"pair": False}), reference_of(BERT)

        found = logits_of(score(joined, query="good ", items=["film"]))

        ids = reference.tokenizer("good film").input_ids
        assert_close(found[0], reference.logits(ids), tolerance=1e-5)
        alone = logits_of(score(scorer_of(BERT), items=["good film"]))
        empty = logits_of(score(scorer_of(BERT), query="", items=["good film"]))
        assert_close(alone[0], reference.logits(ids), tolerance=1e-5)
        assert_close(empty, alone, tolerance=0)

    def test_item_first(self, scorer_of: Scorers, reference_of: References) -> None:
        """item_first swaps the two sides of the pair, token types included."""
        found = score(scorer_of(BERT), query="good", items=["film"], item_first=True)

        made = reference_of(BERT).tokenizer("film", "good")
        expected = reference_of(BERT).logits(made.input_ids, made.token_type_ids)
        assert_close(logits_of(found)[0], expected, tolerance=1e-5)


class TestHiddenStates:
    """Pooled hidden states: the model's dtype, only for askers, never touching the scores."""

    def test_model_dtype(self, scorer_of: Scorers) -> None:
        """A bf16 model hands out bf16 rows."""
        scorer = scorer_of(LLAMA, entry={"dtype": "bfloat16"})

        found = score(scorer, items=["good", "bad"], return_pooled_hidden_states=True)

        hidden = found.tensors["hidden_states"]
        assert (hidden.dtype, tuple(hidden.shape)) == (torch.bfloat16, (2, 32))

    @pytest.mark.parametrize("architecture", ["Qwen3ForSequenceClassification", BERT])
    def test_mixed_askers(self, architecture: str, scorer_of: Scorers) -> None:
        """Every second job asks: askers get their own rows, the scores are the same bits."""
        scorer = scorer_of(architecture)
        items = draw_ids(9, 4, 30, 12, 7, 3)
        asked = [
            scorer.prepare(make_request(items=[item], return_pooled_hidden_states=index % 2 == 0))
            for index, item in enumerate(items)
        ]
        silent = [scorer.prepare(make_request(items=[item])) for item in items]

        readings = scorer.forward([job.sequences[0] for job in asked])
        without = scorer.forward([job.sequences[0] for job in silent])

        assert [reading.hidden is not None for reading in readings] == [True, False] * 3
        for index in (0, 2, 4):
            alone = score(scorer, items=[items[index]], return_pooled_hidden_states=True)
            assert_close(readings[index].hidden, alone.tensors["hidden_states"][0], tolerance=1e-5)
        for one, other in zip(readings, without, strict=True):
            assert np.array_equal(one.values, other.values)

    def test_failed_items_are_nan(self, scorer_of: Scorers) -> None:
        """A row of an item that failed is NaN in every tensor."""
        scorer = scorer_of(BERT)

        found = score(scorer, items=draw_ids(600, 5), return_pooled_hidden_states=True)

        assert torch.isnan(found.tensors["hidden_states"][0]).all()
        assert not torch.isnan(found.tensors["hidden_states"][1]).any()


class TestIsolation:
    """One bad item fails alone."""

    def test_non_finite_head(self, folder_of: Folders, tmp_path: Path) -> None:
        """An item whose logits are NaN fails by code; four others keep their bits."""
        folder = make_tiny(tmp_path / "nan", LLAMA)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][350] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        scorer = load_model("nan", ModelConfig(source=str(folder)))
        items = draw_ids(5, 5, 5, 5, 5)
        healthy = logits_of(score(scorer, items=items))
        items[2][3] = 350

        found = score(scorer, items=items)

        assert [(error.index, error.code) for error in found.errors] == [
            (2, NonFiniteScoreError.code)
        ]
        scores = np.asarray(found.tensors["scores"])
        kept = [0, 1, 3, 4]
        assert np.isnan(scores[2]).all()
        assert (logits_of(found)[kept] == healthy[kept]).all()

    def test_an_error_in_place_of_a_reading(self, scorer_of: Scorers) -> None:
        """A sequence whose forward failed becomes an error of its own item, by the right index."""
        scorer = scorer_of(BERT)
        prepared = scorer.prepare(make_request(items=["a", "b", "c"]))
        readings: list[Reading | ItemError] = [*scorer.forward(prepared.sequences)]
        readings[1] = ItemError(0, "forward_failed", "it raised")

        found = scorer.finish(prepared, readings)

        assert found.errors == [ItemError(1, "forward_failed", "it raised")]
        assert np.isnan(found.tensors["scores"][1]).all()

    def test_a_reading_too_few_is_refused(self, scorer_of: Scorers) -> None:
        """Readings and sequences are never matched by guess."""
        scorer = scorer_of(BERT)
        prepared = scorer.prepare(make_request(items=["a", "b"]))

        with pytest.raises(AssertionError, match="1 readings for 2 sequences"):
            finish_job(prepared, [Reading(np.zeros(3, np.float32))], scorer.description, {})

    def test_ids_beyond_the_embeddings(self, scorer_of: Scorers) -> None:
        """An unknown input id never reaches the device: the item fails, a query's is refused."""
        scorer = scorer_of(LLAMA)

        found = score(scorer, items=[[5, 9999], [5, 6]])

        assert [(error.index, error.code) for error in found.errors] == [(0, "invalid_request")]
        with pytest.raises(InvalidRequestError, match="9999"):
            score(scorer, query=[9999], items=[[5]])

    def test_nothing_to_read(self, scorer_of: Scorers) -> None:
        """Query and item without any token fail that item, not the job."""
        scorer = scorer_of("Qwen2ForSequenceClassification")

        found = score(scorer, items=["", "yes"])

        assert [error.index for error in found.errors] == [0]
        assert found.tokens[0].used == 0

    def test_no_items(self, scorer_of: Scorers) -> None:
        """An empty job has an empty result and uses no token."""
        found = score(scorer_of(BERT), query="good", items=[])

        assert np.shape(found.tensors["scores"]) == (0, 3)
        assert (found.usage.prompt_tokens, found.errors) == (0, [])
