"""Length: who is refused, what is cut, and what never is."""

from collections.abc import Callable

import numpy as np
import pytest

from contract.scores import TokenCounts
from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request, score
from tests.reference import Reference
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

BERT = "BertForSequenceClassification"
LLAMA = "LlamaForSequenceClassification"


def test_too_long_by_default(scorer_of: Scorers) -> None:
    """The long item fails alone with both numbers; the others are scored."""
    found = score(scorer_of(BERT), items=["yes", "good " * 598, "no"])

    assert [(error.index, error.code) for error in found.errors] == [(1, "input_too_long")]
    assert "600 tokens" in found.errors[0].message
    assert "512" in found.errors[0].message
    assert np.isfinite(found.tensors["scores"])[[0, 2]].all()
    assert found.tokens[1] == TokenCounts(600, 0, 0)


def test_huge_document(scorer_of: Scorers) -> None:
    """A hundred thousand characters among 300 short items is cut by rule."""
    items = ["short"] * 300
    items[77] = "good film " * 10_000

    found = score(scorer_of(BERT), items=items, truncation="item")

    assert not found.errors
    assert found.tokens[77].used == 512
    assert found.receipt["truncated_items"] == 1
    assert found.usage.computed_tokens == 299 * found.tokens[0].used + 512


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mode", ["item", "query"])
@pytest.mark.parametrize("item_first", [False, True])
def test_pair(
    mode: str, side: str, item_first: bool, scorer_of: Scorers, reference_of: References
) -> None:
    """Only the named part of a pair is cut, on the named side; specials and types stay."""
    scorer = scorer_of(BERT, entry={"max_tokens": 40, "truncation_side": side})
    texts = {"query": "is the film good and the cast great", "item": "the plot holds to the end"}
    texts[mode] = " ".join([texts[mode]] * 12)

    found = score(
        scorer,
        query=texts["query"],
        items=[texts["item"]],
        truncation=mode,
        item_first=item_first,
    )

    tokenizer = reference_of(BERT).tokenizer
    plain = {
        name: tokenizer(text, add_special_tokens=False).input_ids for name, text in texts.items()
    }
    other = "query" if mode == "item" else "item"
    room = 40 - 3 - len(plain[other])
    plain[mode] = plain[mode][:room] if side == "right" else plain[mode][-room:]
    first, second = ("item", "query") if item_first else ("query", "item")
    ids = [2, *plain[first], 3, *plain[second], 3]
    types = [0] * (len(plain[first]) + 2) + [1] * (len(plain[second]) + 1)
    assert len(ids) == 40
    assert_close(logits_of(found)[0], reference_of(BERT).logits(ids, types), tolerance=1e-5)
    assert found.tokens[0].cut == found.tokens[0].given - 40


@pytest.mark.parametrize("mode", ["item", "query"])
def test_joined_text(mode: str, scorer_of: Scorers, reference_of: References) -> None:
    """Of a joined text only the named part's tokens go; BOS and the other part stay."""
    scorer = scorer_of(LLAMA, entry={"max_tokens": 30})
    query, item = "is the film good?" * (6 if mode == "query" else 1), " the plot" * 8

    found = scorer.prepare(make_request(query=query, items=[item], truncation=mode)).sequences[0]

    made = reference_of(LLAMA).tokenizer(query + item, return_offsets_mapping=True)
    ids = np.array(made.input_ids)
    of_item = np.array([begin >= len(query) for begin, _ in made.offset_mapping])
    places = np.flatnonzero(of_item if mode == "item" else ~of_item & (np.arange(len(ids)) > 0))
    expected = np.delete(ids, places[len(places) - (len(ids) - 30) :])
    assert found.ids.tolist() == expected.tolist()
    assert found.ids[0] == 1


@pytest.mark.parametrize(("mode", "item_first"), [("item", False), ("query", True)])
def test_token_ids(mode: str, item_first: bool, scorer_of: Scorers) -> None:
    """Token ids are cut by the same rule."""
    scorer = scorer_of(LLAMA, entry={"max_tokens": 10})
    query, item = draw_ids(6, 9)

    found = scorer.prepare(
        make_request(query=query, items=[item], truncation=mode, item_first=item_first)
    )

    expected = [*query, *item[:4]] if mode == "item" else [*item, *query[:1]]
    assert found.sequences[0].ids.tolist() == expected


def test_other_part_too_long(scorer_of: Scorers) -> None:
    """Where the part that must stay exceeds the limit, the item fails and says so."""
    scorer = scorer_of(LLAMA, entry={"max_tokens": 10})
    query, item = draw_ids(12, 3)

    found = score(scorer, query=query, items=[item], truncation="item")

    assert found.errors[0].code == "input_too_long"
    assert "12 of them beside the item" in found.errors[0].message
