"""The causal path: labels as ids and text, what is refused, prompts with exactly one BOS."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contract.errors import InvalidRequestError
from tests.engine.helpers import assert_close, draw_ids, make_request, score
from tests.reference import Reference
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

LLAMA = "LlamaForCausalLM"
QWEN = "Qwen2ForCausalLM"


class TestLabels:
    """Which tokens are read."""

    def test_text_labels(self, scorer_of: Scorers, reference_of: References) -> None:
        """A label's text is one token where the prompt ends; columns carry the texts."""
        scorer, reference = scorer_of(LLAMA), reference_of(LLAMA)
        query, items = "is the answer correct?", [" yes", " a much longer answer " * 20 + "no"]

        found = score(scorer, query=query, items=items, labels=[" the", " is"])

        ids = [
            reference.tokenizer(text, add_special_tokens=False).input_ids
            for text in (" the", " is")
        ]
        assert [len(one) for one in ids] == [1, 1]
        columns = [ids[0][0], ids[1][0]]
        expected = [
            np.exp(reference.logprobs(reference.tokenizer(query + item).input_ids))[columns]
            for item in items
        ]
        assert_close(found.tensors["scores"], expected, tolerance=1e-6)
        assert found.labels == [" the", " is"]

    def test_label_of_several_tokens(self, scorer_of: Scorers) -> None:
        """It is refused by name, with the number of tokens."""
        with pytest.raises(InvalidRequestError, match=r"'zebra qux'.* tokens") as caught:
            score(scorer_of(LLAMA), items=["good"], labels=[" the", "zebra qux"])

        assert caught.value.param == "labels[1]"

    def test_label_that_merges_with_the_prompt(self, scorer_of: Scorers) -> None:
        """A prompt that ends inside the label's token is refused, and says which space to move."""
        with pytest.raises(InvalidRequestError, match="merges"):
            score(scorer_of(LLAMA), items=["good "], labels=["the"])

    def test_labels_per_item(self, scorer_of: Scorers, reference_of: References) -> None:
        """One list per item: rows of different length, with NaN where a row has no column."""
        items = draw_ids(5, 9)

        found = score(scorer_of(LLAMA), items=items, label_token_ids=[[5, 9, 77], [8]])

        assert found.label_counts == [3, 1]
        scores = np.asarray(found.tensors["scores"])
        logprobs = [reference_of(LLAMA).logprobs(item) for item in items]
        assert_close(scores[0], np.exp(logprobs[0][[5, 9, 77]]), tolerance=1e-6)
        assert_close(scores[1, 0], np.exp(logprobs[1][8]), tolerance=1e-6)
        assert np.isnan(scores[1, 1:]).all()

    def test_added_token(self, scorer_of: Scorers) -> None:
        """An added token's id is a label; one at the logits' width is refused by name."""
        scorer = scorer_of(QWEN, tokenizer={"added": ("<|im_end|>",)})
        added = scorer.prompter.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert added >= scorer.prompter.tokenizer.vocab_size

        found = score(scorer, items=["good"], label_token_ids=[added, 5])

        assert np.isfinite(found.tensors["scores"]).all()
        with pytest.raises(InvalidRequestError, match="384"):
            score(scorer, items=["good"], label_token_ids=[384])

    def test_improbable_label(self, scorer_of: Scorers, reference_of: References) -> None:
        """The least probable token has its own probability: not zero, not an error."""
        item = draw_ids(12)[0]
        logprobs = reference_of(LLAMA).logprobs(item)
        least = int(np.argmin(logprobs))

        found = score(scorer_of(LLAMA), items=[item], label_token_ids=[least, 5])

        value = np.asarray(found.tensors["scores"])[0, 0]
        assert value > 0
        assert abs(np.log(value) - logprobs[least]) < 1e-4

    @pytest.mark.parametrize(
        "fields",
        [
            {"items": ["a"]},
            {"items": ["a"], "label_token_ids": [5], "activation": "sigmoid"},
            {"items": ["a"], "label_token_ids": [5, 5]},
            {"items": ["a"], "label_token_ids": []},
            {"items": ["a"], "label_token_ids": [[5], [6]]},
            {"items": [[1, 2]], "query": "abc", "label_token_ids": [5]},
            {"items": ["a", [1]], "label_token_ids": [5]},
        ],
    )
    def test_refused(self, fields: dict[str, Any], scorer_of: Scorers) -> None:
        """No labels, wrong labels, mixed text and tokens: refused, with the field at fault."""
        with pytest.raises(InvalidRequestError) as caught:
            score(scorer_of(LLAMA), **fields)

        assert caught.value.param

    def test_text_labels_for_token_items(self, scorer_of: Scorers) -> None:
        """Token items may have text labels: their ids are those of the bare text."""
        scorer = scorer_of(LLAMA)
        (label,) = scorer.prompter.tokenizer(" the", add_special_tokens=False).input_ids

        by_text = score(scorer, items=[[5, 6]], labels=[" the"]).tensors["scores"]
        by_id = score(scorer, items=[[5, 6]], label_token_ids=[label]).tensors["scores"]

        assert_close(by_text, by_id, tolerance=0)


class TestPrompts:
    """Query and item become one prompt."""

    def test_one_bos(self, scorer_of: Scorers, reference_of: References) -> None:
        """The tokenizer's BOS is there once, also where the text brings its own."""
        scorer, reference = scorer_of(LLAMA), reference_of(LLAMA)

        plain = scorer.prepare(make_request(query="a", items=["b"], label_token_ids=[5]))
        own = scorer.prepare(make_request(query="<s>a", items=["b"], label_token_ids=[5]))

        ids = plain.sequences[0].ids.tolist()
        assert ids == reference.tokenizer("ab").input_ids
        assert own.sequences[0].ids.tolist() == ids
        assert ids.count(reference.tokenizer.bos_token_id) == 1

    def test_joined_as_one_string(self, scorer_of: Scorers, reference_of: References) -> None:
        """Nothing is put between query and item, and item_first swaps them."""
        scorer, reference = scorer_of(QWEN), reference_of(QWEN)

        first = scorer.prepare(
            make_request(query="the ans", items=["wer is"], label_token_ids=[5], item_first=True)
        )
        second = scorer.prepare(
            make_request(query="the ans", items=["wer is"], label_token_ids=[5])
        )

        assert second.sequences[0].ids.tolist() == reference.tokenizer("the answer is").input_ids
        assert first.sequences[0].ids.tolist() == reference.tokenizer("wer isthe ans").input_ids
        assert first.sequences[0].group == b""

    def test_tokens_are_concatenated(self, scorer_of: Scorers) -> None:
        """Token ids get no BOS and no separator."""
        found = scorer_of(LLAMA).prepare(
            make_request(query=[9, 8], items=[[7]], label_token_ids=[5])
        )

        assert found.sequences[0].ids.tolist() == [9, 8, 7]


def test_usage_counts_full_sequences(scorer_of: Scorers) -> None:
    """prompt_tokens is the sum of full lengths; computed_tokens what the device did."""
    found = score(
        scorer_of(LLAMA), query=draw_ids(30)[0], items=draw_ids(4, 5, 6), label_token_ids=[5]
    )

    assert found.usage.prompt_tokens == 3 * 30 + 15
    assert found.usage.computed_tokens == 30 + 15
    assert found.usage.completion_tokens == 0
    assert [count.used for count in found.tokens] == [34, 35, 36]
