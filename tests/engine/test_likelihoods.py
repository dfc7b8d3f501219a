"""Longer labels, likelihoods of the items themselves, and strict determinism."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contract.errors import InvalidRequestError
from contract.scores import Determinism
from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request, score
from tests.reference import Reference
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

LLAMA = "LlamaForCausalLM"
QWEN = "Qwen2ForCausalLM"
ALL = [LLAMA, "Gemma2ForCausalLM", "GPT2LMHeadModel"]


def sum_logprobs(reference: Reference, prompt: list[int], ids: list[int]) -> tuple[float, bool]:
    """Return the log-probability of ``ids`` after ``prompt``, one plain forward per token."""
    total, greedy = 0.0, True
    for index, token in enumerate(ids):
        logprobs = reference.logprobs(prompt + ids[:index])
        total += logprobs[token]
        greedy &= int(np.argmax(logprobs)) == token
    return total, greedy


class TestLongerLabels:
    """multi_token: a label may be several tokens."""

    @pytest.mark.parametrize("architecture", ALL)
    def test_summed_logprobs(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """The sum over a label's tokens, its mean per token, softmax over the sums."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        query, items = "is the film good?", [" answer:", " the plot holds to the end. answer:", ""]
        labels = [" the", " terrible sound", " wizards box"]

        found = score(scorer, query=query, items=items, labels=labels, multi_token=True)
        soft = score(
            scorer, query=query, items=items, labels=labels, multi_token=True, apply_softmax=True
        )

        sums, lengths = np.zeros((3, 3)), np.zeros((3, 3))
        for row, item in enumerate(items):
            prompt = reference.tokenizer(query + item).input_ids
            for column, label in enumerate(labels):
                whole = reference.tokenizer(query + item + label).input_ids
                assert whole[: len(prompt)] == prompt
                lengths[row, column] = len(whole) - len(prompt)
                sums[row, column], _ = sum_logprobs(reference, prompt, whole[len(prompt) :])
        assert lengths.max() > 1
        assert_close(found.tensors["scores"], sums, tolerance=1e-4)
        assert_close(found.tensors["normalized_logprobs"], sums / lengths, tolerance=1e-4)
        assert_close(found.tensors["token_counts"], lengths, tolerance=0)
        weights = np.exp(sums - sums.max(1, keepdims=True))
        assert_close(
            soft.tensors["scores"], weights / weights.sum(1, keepdims=True), tolerance=1e-5
        )
        assert found.receipt["activation"] == "summed_logprobs"

    def test_the_prompt_is_computed_once(self, scorer_of: Scorers) -> None:
        """Labels share their prompt, prompts share their query."""
        scorer = scorer_of(LLAMA)
        query, *items = draw_ids(30, 5, 6)

        found = score(
            scorer, query=query, items=items, labels=[" the", " terrible sound"], multi_token=True
        )

        lengths = np.asarray(found.tensors["token_counts"])
        assert found.usage.computed_tokens == 30 + 11 + int((lengths - 1).sum())
        assert found.usage.prompt_tokens == 60 + 11

    @pytest.mark.parametrize(
        "fields",
        [
            {"label_token_ids": [5], "multi_token": True},
            {"labels": [" the"], "multi_token": True, "return_token_logprobs": True},
            {"labels": [""], "multi_token": True},
        ],
    )
    def test_refused(self, fields: dict[str, Any], scorer_of: Scorers) -> None:
        """It is for text labels that have a token of their own."""
        with pytest.raises(InvalidRequestError):
            score(scorer_of(LLAMA), items=["a"], **fields)


class TestLoglikelihood:
    """mode = loglikelihood: each item's own log-probability given the query."""

    @pytest.mark.parametrize("architecture", ALL)
    def test_token_ids(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """Summed over the item's tokens, whatever else is in the batch; greedy is told."""
        scorer, reference = scorer_of(architecture), reference_of(architecture)
        query, *items = draw_ids(20, 1, 7, 3, 7)
        best = query.copy()
        for _ in range(3):
            best.append(int(np.argmax(reference.logprobs(best))))
        items.append(best[20:])

        found = score(scorer, query=query, items=items, mode="loglikelihood")

        expected = [sum_logprobs(reference, query, item) for item in items]
        assert_close(
            found.tensors["scores"][:, 0], [total for total, _ in expected], tolerance=1e-4
        )
        greedy = np.asarray(found.tensors["is_greedy"])[:, 0].tolist()
        assert greedy == [float(one) for _, one in expected]
        assert greedy[-1] == 1.0
        assert_close(
            found.tensors["token_counts"][:, 0], [len(item) for item in items], tolerance=0
        )
        assert found.labels == ["loglikelihood"]
        assert found.usage.computed_tokens == 20 + sum(len(item) - 1 for item in items)

    def test_space_at_the_end_of_the_query(
        self, scorer_of: Scorers, reference_of: References
    ) -> None:
        """It belongs to the item, as in lm-evaluation-harness."""
        scorer, reference = scorer_of(LLAMA), reference_of(LLAMA)

        found = score(scorer, query="is the film ", items=["good"], mode="loglikelihood")

        whole = reference.tokenizer("is the film good").input_ids
        context = reference.tokenizer("is the film").input_ids
        expected, _ = sum_logprobs(reference, context, whole[len(context) :])
        assert_close(found.tensors["scores"], [[expected]], tolerance=1e-4)

    def test_truncation_keeps_the_boundary(
        self, scorer_of: Scorers, reference_of: References
    ) -> None:
        """A query over the limit loses its own tokens; every item token is still scored."""
        entry = {"max_tokens": 24, "truncation_side": "left"}
        scorer, reference = scorer_of(LLAMA, entry=entry), reference_of(LLAMA)
        query, item = draw_ids(30, 6)

        found = score(scorer, query=query, items=[item], mode="loglikelihood", truncation="query")

        expected, _ = sum_logprobs(reference, query[-18:], item)
        assert_close(found.tensors["scores"], [[expected]], tolerance=1e-4)
        assert found.tensors["token_counts"][0, 0] == 6

    def test_nothing_before_or_behind(self, scorer_of: Scorers) -> None:
        """Without a token of context, or of its own, an item fails and says which."""
        scorer = scorer_of(QWEN)

        bare = score(scorer, items=["good"], mode="loglikelihood")
        empty = score(scorer, query="good", items=["", " film"], mode="loglikelihood")

        assert "query holds no token" in bare.errors[0].message
        assert [error.index for error in empty.errors] == [0]
        assert np.isfinite(empty.tensors["scores"][1, 0])

    @pytest.mark.parametrize(
        "fields",
        [
            {"labels": [" the"]},
            {"label_token_ids": [5]},
            {"multi_token": True},
            {"apply_softmax": True},
            {"item_first": True},
            {"return_token_logprobs": True},
            {"truncation": "item"},
        ],
    )
    def test_refused(self, fields: dict[str, Any], scorer_of: Scorers) -> None:
        """What reads or cuts something else has no place, and is named."""
        with pytest.raises(InvalidRequestError) as caught:
            score(scorer_of(LLAMA), query="a", items=["b"], mode="loglikelihood", **fields)

        assert caught.value.param in fields

    def test_other_models(self, scorer_of: Scorers) -> None:
        """Classifiers have no likelihoods, and a template leaves no bare item."""
        with pytest.raises(InvalidRequestError, match="causal"):
            score(scorer_of("BertForSequenceClassification"), items=["a"], mode="loglikelihood")
        templated = scorer_of(LLAMA, entry={"template": "{item}. answer:"})
        with pytest.raises(InvalidRequestError, match="template"):
            score(templated, query="a", items=["b"], mode="loglikelihood")


class TestStrict:
    """determinism = strict: the same input, the same bits."""

    @pytest.mark.parametrize(
        "architecture",
        ["LlamaForSequenceClassification", "BertForSequenceClassification", LLAMA],
    )
    def test_same_bits_in_any_company(self, architecture: str, scorer_of: Scorers) -> None:
        """Alone, among others, and among strict ones: every bit is the same."""
        scorer = scorer_of(architecture)
        labels = {"label_token_ids": [5, 9]} if architecture == LLAMA else {}
        query, *items = draw_ids(12, 3, 40, 41, 17)
        strict = [
            make_request(
                query=query,
                items=[item],
                determinism=Determinism.STRICT,
                return_pooled_hidden_states=True,
                **labels,
            )
            for item in items
        ]
        alone = [scorer.forward(scorer.prepare(request).sequences)[0] for request in strict]

        neighbours = scorer.prepare(make_request(query=query, items=items, **labels)).sequences
        own = [scorer.prepare(request).sequences[0] for request in strict]
        mixed = scorer.forward([own[2], *neighbours, own[0], own[3], own[1]])

        together = [mixed[index] for index in (5, 7, 0, 6)]
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one.values, other.values)
            assert np.array_equal(np.asarray(one.hidden), np.asarray(other.hidden))
            assert not other.shared

    def test_receipt_and_dtype(self, scorer_of: Scorers) -> None:
        """The receipt says so; a model in half precision refuses."""
        name = "LlamaForSequenceClassification"

        found = score(scorer_of(name), items=["a"], determinism="strict")

        assert found.receipt["determinism"] == "strict"
        assert np.isfinite(logits_of(found)).all()
        with pytest.raises(InvalidRequestError, match="float32"):
            score(scorer_of(name, entry={"dtype": "bfloat16"}), items=["a"], determinism="strict")
