"""Shared prefixes and packed attention: exact, isolated, windows counted in positions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request, score
from tests.reference import Reference
from worker.engine import attention, packing
from worker.engine.plan import plan_batch
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Sequence

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

LLAMA = "LlamaForCausalLM"


def see(layout: Any, window: int | None) -> Any:
    """The oracle: who sees whom, token by token, from the forest of the layout."""
    count = layout.tokens
    seen = np.zeros((count, count), bool)
    for block in layout.blocks:
        for begin in range(block.begin, block.end, block.length):
            own = range(begin, begin + block.length)
            visible = [t for low, high in block.ancestors for t in range(low, high)]
            for token in own:
                allowed = [*visible, *range(begin, token + 1)]
                at = layout.positions[token]
                seen[
                    token,
                    [t for t in allowed if window is None or at - layout.positions[t] < window],
                ] = True
    return torch.from_numpy(seen)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 4, 11])
@pytest.mark.parametrize("elements", [1 << 25, 1 << 8])
@pytest.mark.parametrize("merged", [True, False])
def test_attention_equals_a_dense_mask(
    softcap: float | None,
    window: int | None,
    elements: int,
    merged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grouped queries, three levels, equal and unequal lengths, in parts, at once or merged."""
    assert attention._FLASH is not None
    if not merged:
        monkeypatch.setattr(attention, "_FLASH", None)
    monkeypatch.setattr(attention, "_SCORE_ELEMENTS", elements)
    ids = np.arange(40, dtype=np.int32)
    branches = (ids[:4], ids[:2], ids[:1], ids[5:9])
    layout = plan_batch(
        [
            Sequence(ids[:12], 12, b"g", 7, branches=branches),
            Sequence(ids[:12], 12, b"g", 7),
            Sequence(ids[:20], 20, b"g", 7),
            Sequence(ids[:7], 7, b"g", 7),
            Sequence(ids[:9], 9),
            Sequence(ids[:9], 9),
            Sequence(ids[:1], 1),
        ],
        sharing=True,
    )
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, layout.tokens, 8) for heads in (4, 2, 2))

    found, _ = packing.attend_packed(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        layout=layout,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        is_causal=True,
    )

    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~see(layout, window), float("-inf"))
    expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("given", [{"position_bias": torch.ones(1)}, {"s_aux": 1}])
def test_unknown_arguments_are_refused(given: dict[str, Any]) -> None:
    """An attention that passes sinks or biases is not silently served without them."""
    layout = plan_batch([Sequence(np.arange(3, dtype=np.int32), 3)], sharing=False)
    states = torch.zeros(1, 1, 3, 4)

    with pytest.raises(packing.UnsupportedAttentionError, match=next(iter(given))):
        packing.attend_packed(
            torch.nn.Module(), states, states, states, None, layout=layout, **given
        )
    with pytest.raises(packing.UnsupportedAttentionError):
        packing.attend_packed(torch.nn.Module(), states, states, states, None)


def test_layout_of_a_group() -> None:
    """The prefix appears once, positions restart behind it, an empty item reads its last row."""
    ids = np.arange(10, dtype=np.int32)
    group = [Sequence(ids[:length], length, b"g", 4) for length in (6, 4, 6)]

    layout = plan_batch(group, sharing=True)

    assert layout.ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [read.row for read in layout.reads] == [5, 3, 7]
    assert [read.computed_tokens for read in layout.reads] == [6, 0, 2]
    assert [block.count for block in layout.blocks] == [1, 2]


class TestMultiItem:
    """Many items, one query, no delimiter."""

    def test_empty_items(self, scorer_of: Scorers, reference_of: References) -> None:
        """An empty item's row is the distribution after the query."""
        query, item = draw_ids(20, 3)

        found = score(scorer_of(LLAMA), query=query, items=[[], item, []], label_token_ids=[5, 9])

        after = np.exp(reference_of(LLAMA).logprobs(query)[[5, 9]])
        scores = np.asarray(found.tensors["scores"])
        assert_close(scores[[0, 2]], [after, after], tolerance=1e-6)
        assert found.usage.computed_tokens == 23

    @pytest.mark.parametrize("architecture", [LLAMA, "LlamaForSequenceClassification"])
    def test_empty_query(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """An empty query leaves each item as if alone."""
        labels = {"label_token_ids": [5]} if architecture == LLAMA else {}
        items = ["a good film", "terrible", "yes"]
        reference = reference_of(architecture)

        found = score(scorer_of(architecture), query="", items=items, **labels)

        logits = [reference.logits(reference.tokenizer(item).input_ids) for item in items]
        expected = [row[[5]] for row in logits] if labels else logits
        assert_close(logits_of(found), expected, tolerance=1e-5)

    def test_any_token_may_occur(self, scorer_of: Scorers, reference_of: References) -> None:
        """No id has a meaning: an item may hold whatever would elsewhere be a delimiter."""
        name = "Qwen3ForSequenceClassification"
        query, first, second = draw_ids(10, 6, 6)
        items = [first, [*second, 383, 0, 1, 2, *first]]

        found = score(scorer_of(name), query=query, items=items)

        expected = [reference_of(name).logits(query + item) for item in items]
        assert_close(logits_of(found), expected, tolerance=1e-5)

    @pytest.mark.parametrize(
        "architecture", ["MistralForCausalLM", "Gemma2ForSequenceClassification"]
    )
    def test_sliding_window(
        self, architecture: str, scorer_of: Scorers, reference_of: References
    ) -> None:
        """Window 16, query of 30, items of 3, 20 and 40: the window counts positions."""
        labels = {"label_token_ids": [5]} if "Causal" in architecture else {}
        query, *items = draw_ids(30, 3, 20, 40)

        found = score(scorer_of(architecture), query=query, items=items, **labels)

        logits = [reference_of(architecture).logits(query + item) for item in items]
        expected = [row[[5]] for row in logits] if labels else logits
        assert_close(logits_of(found), expected, tolerance=1e-5)
        assert found.receipt["shared_prefix_items"] == 3

    def test_no_leak(self, scorer_of: Scorers) -> None:
        """A change in one item leaves the others' scores the same bits."""
        scorer = scorer_of("Qwen2ForCausalLM")
        query, first, third = draw_ids(12, 7, 7)
        second = [*first[:-1], 11]
        changed = [*third[:-2], 12, 13]

        one = score(scorer, query=query, items=[first, second, third], label_token_ids=[5, 9])
        other = score(scorer, query=query, items=[first, second, changed], label_token_ids=[5, 9])

        same = one.tensors["scores"] == other.tensors["scores"]
        assert np.asarray(same)[:2].all()
        assert not np.asarray(same)[2].any()
        scores = np.asarray(one.tensors["scores"])
        assert (scores[0] != scores[1]).any()

    def test_text_that_merges_over_the_boundary(
        self, scorer_of: Scorers, reference_of: References
    ) -> None:
        """The split is found per job; an item that differs before it goes alone."""
        scorer, reference = scorer_of(LLAMA), reference_of(LLAMA)
        query = "the film is good and the cast is "
        items = ["good", "great", "the best", "", "42"]

        prepared = scorer.prepare(make_request(query=query, items=items, label_token_ids=[5]))

        for sequence, item in zip(prepared.sequences, items, strict=True):
            assert sequence.ids.tolist() == reference.tokenizer(query + item).input_ids
        groups = {sequence.group for sequence in prepared.sequences}
        assert len(groups - {b""}) == 1
        found = score(scorer, query=query, items=items, label_token_ids=[5])
        expected = [
            np.exp(reference.logprobs(reference.tokenizer(query + item).input_ids)[5])
            for item in items
        ]
        assert_close(np.asarray(found.tensors["scores"])[:, 0], expected, tolerance=1e-6)
        assert found.receipt["shared_prefix_items"] >= 3

    def test_jobs_that_share_a_query(self, scorer_of: Scorers, reference_of: References) -> None:
        """Items of different jobs with one query share its prefix in a batch."""
        scorer, reference = scorer_of(LLAMA), reference_of(LLAMA)
        query, *items = draw_ids(40, 5, 6, 7)
        jobs = [
            scorer.prepare(make_request(query=query, items=[item], label_token_ids=[5]))
            for item in items
        ]

        readings = scorer.forward([job.sequences[0] for job in jobs])

        assert sum(reading.computed_tokens for reading in readings) == 40 + 18
        for job, reading, item in zip(jobs, readings, items, strict=True):
            found = scorer.finish(job, [reading]).tensors["scores"]
            expected = np.exp(reference.logprobs(query + item)[5])
            assert_close(np.asarray(found)[0, 0], expected, tolerance=1e-6)


def test_windows_that_a_model_keeps_to_itself(scorer_of: Scorers) -> None:
    """Layers that slide without telling their attention are not packed."""
    from worker.engine.capabilities import _check_windows  # noqa: PLC0415

    config = SimpleNamespace(layer_types=["sliding_attention"])
    examined: Any = SimpleNamespace(
        network=SimpleNamespace(backbone=SimpleNamespace(module=SimpleNamespace(config=config)))
    )

    assert _check_windows(examined, [(True, None)]) is not None
    assert _check_windows(examined, [(True, 16)]) is None
