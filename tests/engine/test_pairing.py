"""Queries of their own, and limits that a request lowers: equal to plain requests, one by one."""

from collections.abc import Callable

import numpy as np
import pytest

from contract.errors import InvalidRequestError
from contract.scores import ScoreRequest, TokenCounts
from tests.engine.helpers import score
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]

BERT = "BertForSequenceClassification"
LLAMA = "LlamaForSequenceClassification"
CAUSAL = "LlamaForCausalLM"
QUERIES = ["is the film good", "is the cast great", "is the film good"]
ITEMS = ["the plot holds", "good", "yes"]


@pytest.mark.parametrize("architecture", [BERT, LLAMA])
def test_each_item_has_its_query(architecture: str, scorer_of: Scorers) -> None:
    """The rows are those of requests of one query; places, tokens and sums are the items' own."""
    scorer = scorer_of(architecture)

    found = score(scorer, items=ITEMS, queries=QUERIES)

    single = [
        score(scorer, items=[item], query=query) for item, query in zip(ITEMS, QUERIES, strict=True)
    ]
    expected = np.concatenate([each.tensors["scores"] for each in single])
    np.testing.assert_allclose(found.tensors["scores"], expected, atol=1e-5)
    assert found.tokens == [each.tokens[0] for each in single]
    assert found.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in single)


def test_a_failed_item_keeps_its_place(scorer_of: Scorers) -> None:
    """The item that is too long fails under its own index."""
    items = ["yes", "no", "good " * 598]

    found = score(scorer_of(BERT), items=items, queries=["b", "a", "b"])

    assert [(error.index, error.code) for error in found.errors] == [(2, "input_too_long")]
    assert np.isfinite(found.tensors["scores"][:2]).all()


def test_labels_of_their_own_go_with_the_items(scorer_of: Scorers) -> None:
    """Per-item label lists are taken along when items are sorted by query."""
    scorer, labels = scorer_of(CAUSAL), [[5, 6], [7, 8], [9, 10]]

    found = score(scorer, items=ITEMS, queries=QUERIES, label_token_ids=labels)

    for index, own in enumerate(labels):
        alone = score(scorer, items=[ITEMS[index]], query=QUERIES[index], label_token_ids=own)
        np.testing.assert_allclose(
            found.tensors["scores"][index], alone.tensors["scores"][0], atol=1e-5
        )
    assert found.labels == labels


def test_no_items(scorer_of: Scorers) -> None:
    """Nothing gives nothing."""
    assert score(scorer_of(BERT), items=[], queries=[]).tokens == []


@pytest.mark.parametrize(
    "fields",
    [
        {"items": ["a"], "queries": ["p", "q"]},
        {"items": ["a"], "queries": ["p"], "query": "q"},
        {"items": [[1]], "queries": ["p"]},
    ],
)
def test_queries_that_do_not_fit(fields: dict[str, object]) -> None:
    """One for each item, of text, and no other query beside them."""
    with pytest.raises(InvalidRequestError) as caught:
        ScoreRequest(**fields).check(max_items=9)  # type: ignore[arg-type]

    assert caught.value.param == "queries"


def test_a_request_lowers_the_limit(scorer_of: Scorers) -> None:
    """Beyond ``max_tokens`` an item fails, or is cut; the message says whose limit it was."""
    scorer, item = scorer_of(BERT), "good film " * 20

    failed = score(scorer, items=[item], max_tokens=10)
    cut = score(scorer, items=[item], max_tokens=10, truncation="item")
    higher = score(scorer, items=[item], max_tokens=9999)

    assert "the request's limit is 10" in failed.errors[0].message
    assert cut.tokens[0] == TokenCounts(cut.tokens[0].given, 10, cut.tokens[0].given - 10)
    assert not higher.errors


@pytest.mark.parametrize(("side", "kept"), [("right", "good bad yes"), ("left", "no maybe fine")])
@pytest.mark.parametrize("architecture", [BERT, LLAMA])
def test_long_items_are_cut(side: str, kept: str, architecture: str, scorer_of: Scorers) -> None:
    """``max_item_tokens`` cuts each item, on the side asked for, whatever ``truncation`` says."""
    scorer = scorer_of(architecture)
    tokens = len(scorer.prompter.encode_alone([kept])[0])

    found = score(
        scorer,
        items=["good bad yes no maybe fine", "yes"],
        query="is it so",
        max_item_tokens=tokens,
        truncation_side=side,
    )

    assert found.tokens[0].cut > 0
    assert found.tokens[1].cut == 0
    assert not found.errors
    if architecture == BERT:
        plain = score(scorer, items=[kept], query="is it so")
        np.testing.assert_allclose(
            found.tensors["scores"][0], plain.tensors["scores"][0], atol=1e-5
        )


def test_a_very_long_item_that_is_cut_is_not_refused(scorer_of: Scorers) -> None:
    """A hundred thousand characters with ``max_item_tokens`` are scored."""
    found = score(scorer_of(BERT), items=["good film " * 10_000], max_item_tokens=20)

    assert not found.errors
    assert found.tokens[0].used == 22


def test_the_models_own_activation_of_a_causal_model(scorer_of: Scorers) -> None:
    """``activation: model`` is softmax over the labels; a single label keeps its probability."""
    scorer = scorer_of(CAUSAL)

    model = score(scorer, items=["a"], label_token_ids=[5, 6], activation="model")
    softmax = score(scorer, items=["a"], label_token_ids=[5, 6], apply_softmax=True)
    single = score(scorer, items=["a"], label_token_ids=[5], activation="model")

    np.testing.assert_allclose(model.tensors["scores"], softmax.tensors["scores"])
    assert single.tensors["scores"][0, 0] < 0.9
