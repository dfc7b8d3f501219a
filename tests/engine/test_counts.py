"""What a batch costs, in quantities that noise cannot move: the gate against slow regressions.

Times are in ``benchmarks``; here a forward too many, a token computed twice or a second copy to
the host fails a test.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.helpers import draw_ids, make_request
from worker.engine import network as network_module
from worker.engine.causal import SelectiveHead
from worker.engine.forward import copy_to_host
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]

BERT = "BertForSequenceClassification"
QWEN = "Qwen3ForCausalLM"
#: arrival order, as skewed as texts are
LENGTHS = (12, 60, 7, 200, 33, 60, 90, 18, 45, 60, 5, 120)


class Counts:
    """What went through a model."""

    def __init__(self) -> None:
        self.forwards = 0
        self.tokens = 0
        self.copies = 0
        self.copied_bytes = 0
        self.logits = 0


@contextmanager
def counting(scorer: ModelScorer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Count the backbone's forwards and tokens, the head's logits, and copies to the host."""
    counts = Counts()

    def note_copy(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        counts.copies += 1
        counts.copied_bytes += sum(tensor.nbytes for tensor in tensors)
        return copy_to_host(tensors)

    def note_forward(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        counts.forwards += 1
        counts.tokens += kwargs["input_ids"].numel()

    def note_head(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        counts.logits += output.numel()

    handles = [
        scorer.network.backbone.module.register_forward_pre_hook(note_forward, with_kwargs=True)
    ]
    head = getattr(scorer.network.head, "_selective", None)
    if isinstance(head, SelectiveHead):
        handles.append(head.register_forward_hook(note_head))
    with monkeypatch.context() as patch:
        patch.setattr(network_module, "copy_to_host", note_copy)
        yield counts
    for handle in handles:
        handle.remove()


def run(scorer: ModelScorer, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Counts:
    """Score one request in one batch and return what it cost."""
    prepared = scorer.prepare(make_request(**fields))
    with counting(scorer, monkeypatch) as counts:
        scorer.finish(prepared, scorer.forward(prepared.sequences))
    return counts


@pytest.mark.parametrize("architecture", [BERT, "LlamaForSequenceClassification"])
def test_no_token_is_computed_twice_or_for_nothing(
    architecture: str, scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the lengths, a batch is one forward of its tokens, and one copy."""
    counts = run(scorer_of(architecture), monkeypatch, items=draw_ids(*LENGTHS))

    assert (counts.forwards, counts.tokens, counts.copies) == (1, sum(LENGTHS), 1)
    assert counts.copied_bytes == 4 * 3 * len(LENGTHS)


def test_padding_is_bounded_where_it_must_be(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be packed pays at most 15 % for padding, and one copy all the same."""
    counts = run(
        scorer_of("DebertaV2ForSequenceClassification"), monkeypatch, items=draw_ids(*LENGTHS)
    )

    assert counts.tokens <= sum(LENGTHS) / 0.85
    assert counts.forwards <= 8
    assert counts.copies == 1


@pytest.mark.parametrize("count", [1, 10, 50])
def test_a_query_is_computed_once(
    count: int, scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q + N * I tokens for N items of I on a query of Q."""
    query, *items = draw_ids(300, *[20] * count)

    counts = run(scorer_of(QWEN), monkeypatch, query=query, items=items, label_token_ids=[5, 9])

    assert (counts.forwards, counts.tokens, counts.copies) == (1, 300 + 20 * count, 1)


def test_only_the_labels_rows_of_the_vocabulary(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax over labels costs the labels; a probability costs the vocabulary, at one position."""
    scorer = scorer_of(QWEN)
    items = draw_ids(20, 30, 40)
    labels = {"items": items, "label_token_ids": [5, 9]}

    alone = run(scorer, monkeypatch, **labels, apply_softmax=True, return_label_mass=False)
    whole = run(scorer, monkeypatch, **labels)

    assert alone.logits == 3 * 2
    assert whole.logits == 3 * scorer.description.vocabulary


def test_hidden_states_cost_their_bytes(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward, token or copy more: one row of each item that asks."""
    scorer = scorer_of(BERT)
    items = draw_ids(*LENGTHS)

    plain = run(scorer, monkeypatch, items=items)
    asking = run(scorer, monkeypatch, items=items, return_pooled_hidden_states=True)

    assert (asking.forwards, asking.tokens, asking.copies) == (1, plain.tokens, 1)
    row = 4 * scorer.description.hidden_size
    assert asking.copied_bytes - plain.copied_bytes == row * len(LENGTHS)
