"""Every architecture against plain transformers: alone, batched, packed, with shared prefixes."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request, score
from tests.reference import Reference
from tests.tiny_models import CAUSALS, CLASSIFIERS
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

LABELS = [5, 9, 77]
UNPACKED = {"DebertaV2ForSequenceClassification", "MPNetForSequenceClassification"}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
class TestClassifiers:
    """Sequence classifiers by token ids."""

    def test_logits_and_hidden_states(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """A batch of very different lengths gives each item what it has alone."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        query = draw_ids(30, seed=1)[0]
        items = [*draw_ids(3, 20, 40, 1, 17, 100, 41, 3), []]

        found = score(scorer, query=query, items=items, return_pooled_hidden_states=True)

        expected = [reference.logits(query + item) for item in items]
        assert_close(logits_of(found), expected, tolerance=1e-5)
        row = -1 if scorer.description.pooling == "last" else 0
        hidden = [reference.hidden(query + item, row=row) for item in items]
        assert_close(found.tensors["hidden_states"], hidden, tolerance=1e-5)

    def test_layout(self, architecture: str, scorer_of: Scorers) -> None:
        """It is packed unless its attention cannot be replaced; decoders share prefixes."""
        scorer = scorer_of(architecture)

        packed = architecture not in UNPACKED
        assert (scorer.description.attention == "scorekeep_packed") is packed
        assert ("packing" in scorer.description.refusals) is not packed
        decoder = scorer.description.pooling == "last"
        assert ("shared_prefix" in scorer.description.refusals) is not decoder

    def test_text(self, architecture: str, scorer_of: Scorers, reference_of: References) -> None:
        """Text is encoded as the tokenizer does it: a pair, or one string with its own specials."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        query, items = "is the film good?", ["a good film with a great cast", "terrible", "yes. no"]

        found = score(scorer, query=query, items=items)

        expected = []
        for item in items:
            pair = scorer.description.pair
            made = reference.tokenizer(query, item) if pair else reference.tokenizer(query + item)
            expected.append(reference.logits(made.input_ids, made.get("token_type_ids")))
        assert_close(logits_of(found), expected, tolerance=1e-5)


@pytest.mark.parametrize("architecture", CAUSALS)
class TestCausals:
    """Language models by token ids and by text."""

    def test_probabilities(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """Full-vocabulary probabilities, label mass, logprobs and hidden states, all at once."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        query = draw_ids(30, seed=2)[0]
        items = [*draw_ids(3, 20, 40, 1, 3, 60), []]

        found = score(
            scorer,
            query=query,
            items=items,
            label_token_ids=LABELS,
            return_token_logprobs=True,
            return_pooled_hidden_states=True,
        )

        expected = np.array([reference.logprobs(query + item)[LABELS] for item in items])
        assert_close(found.tensors["scores"], np.exp(expected), tolerance=1e-6)
        assert_close(found.tensors["token_logprobs"], expected, tolerance=1e-4)
        assert_close(found.tensors["label_mass"], np.exp(expected).sum(1), tolerance=1e-6)
        hidden = [reference.hidden(query + item, row=-1) for item in items]
        assert_close(found.tensors["hidden_states"], hidden, tolerance=1e-5)
        assert found.receipt["shared_prefix_items"] == len(items)

    def test_softmax_over_labels(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """Softmax needs the labels' rows of the head alone, with soft caps and scales honoured."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        items = draw_ids(3, 40, 17)

        found = score(
            scorer,
            items=items,
            label_token_ids=LABELS,
            apply_softmax=True,
            temperature=0.7,
            return_label_mass=False,
        )

        logits = np.array([reference.logits(item)[LABELS] for item in items]) / 0.7
        weights = np.exp(logits - logits.max(1, keepdims=True))
        expected = weights / weights.sum(1, keepdims=True)
        assert_close(found.tensors["scores"], expected, tolerance=1e-5)
        assert "label_mass" not in found.tensors


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForSequenceClassification",
        "Qwen2ForSequenceClassification",
        "Qwen3ForSequenceClassification",
        "MistralForSequenceClassification",
        "BertForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "DebertaV2ForSequenceClassification",
    ],
)
def test_batch_invariance(architecture: str, scorer_of: Scorers) -> None:
    """Forty items alone, in one job, in forty jobs of one batch, and reversed: one answer."""
    scorer = scorer_of(architecture)
    items = draw_ids(*range(1, 201, 5), seed=3)

    together = logits_of(score(scorer, items=items))

    reversed_ = logits_of(score(scorer, items=items[::-1]))[::-1]
    alone = np.concatenate([logits_of(score(scorer, items=[item])) for item in items])
    jobs = [scorer.prepare(make_request(items=[item])) for item in items]
    readings = scorer.forward([job.sequences[0] for job in jobs])
    mixed = np.stack([reading.values for reading in readings])
    assert len(items) == 40
    for other in (reversed_, alone, mixed):
        assert_close(other, together, tolerance=1e-5)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM"])
def test_positions_do_not_depend_on_the_batch(architecture: str, scorer_of: Scorers) -> None:
    """Short items beside a very long one keep their positions, hence their probabilities."""
    scorer = scorer_of(architecture)
    items = draw_ids(2, 250, 5, 3, seed=5)

    together = score(scorer, items=items, label_token_ids=LABELS).tensors["scores"]

    alone = [
        score(scorer, items=[item], label_token_ids=LABELS).tensors["scores"][0] for item in items
    ]
    assert_close(together, alone, tolerance=1e-6)
