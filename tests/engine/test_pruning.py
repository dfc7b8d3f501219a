"""The last layer is computed where it is read: the same numbers, of fewer rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.helpers import assert_close, draw_ids, score
from tests.tiny_models import CAUSALS, CLASSIFIERS
from worker.engine.plan import choose_last_rows, plan_batch
from worker.engine.pruning import LastLayer, install_last_layer
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Sequence

Scorers = Callable[..., ModelScorer]

#: all that packed attention serves, but for those that say why they go without
WHOLE = {
    "AlbertForSequenceClassification": "one of a list",
    "GPT2ForSequenceClassification": "cannot be called with some rows",
    "GPT2LMHeadModel": "cannot be called with some rows",
}
PADDED = ("DebertaV2ForSequenceClassification", "MPNetForSequenceClassification")


@contextmanager
def whole(scorer: ModelScorer) -> Iterator[None]:
    """Compute every row of the last layer for a moment."""
    backbone = scorer.network.backbone
    prunes, backbone.prunes = backbone.prunes, False
    try:
        yield
    finally:
        backbone.prunes = prunes


def find_last(scorer: ModelScorer) -> LastLayer:
    """Return the layer that is cut."""
    (found,) = [
        one for one in scorer.network.backbone.module.modules() if isinstance(one, LastLayer)
    ]
    return found


def count_rows(scorer: ModelScorer, **request: Any) -> tuple[int, int]:
    """Score; return how many rows the last layer yields, and how many tokens were computed."""
    yielded: list[int] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        yielded.append(hidden.shape[1])

    handle = find_last(scorer).register_forward_hook(note)
    try:
        found = score(scorer, **request)
    finally:
        handle.remove()
    (rows,) = yielded
    return rows, found.usage.computed_tokens


@pytest.mark.parametrize("architecture", [*CLASSIFIERS, *CAUSALS])
def test_the_numbers_are_those_of_the_whole_layer(architecture: str, scorer_of: Scorers) -> None:
    """Query shared or not, an empty item, windows and soft caps, hidden states as well."""
    scorer = scorer_of(architecture)
    if architecture in PADDED:
        assert not scorer.network.backbone.prunes
        return
    if architecture in WHOLE:
        assert WHOLE[architecture] in scorer.description.refusals["last_layer_rows"]
        return
    assert "last_layer_rows" not in scorer.description.refusals
    query, *items = draw_ids(30, 3, 20, 1, 3, 90)
    labels = {"label_token_ids": [5, 9]} if architecture in CAUSALS else {}
    request = {"query": query, "items": [*items, []], "return_pooled_hidden_states": True, **labels}

    cut = score(scorer, **request)

    with whole(scorer):
        expected = score(scorer, **request)
    for name, tensor in expected.tensors.items():
        assert_close(cut.tensors[name], tensor, tolerance=2e-5)


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [("BertForSequenceClassification", {}), ("Qwen3ForCausalLM", {"label_token_ids": [5]})],
)
def test_only_rows_that_are_read_are_computed(
    architecture: str, labels: dict[str, Any], scorer_of: Scorers
) -> None:
    """Four items: four rows of the last layer, whatever the tokens."""
    rows, computed = count_rows(scorer_of(architecture), items=draw_ids(20, 30, 20, 7), **labels)

    assert (rows, computed) == (4, 77)


def test_asking_for_hidden_states_computes_no_more(scorer_of: Scorers) -> None:
    """The rows that are read and the rows that are handed out are the same."""
    scorer = scorer_of("Qwen3ForCausalLM")
    request = {"items": draw_ids(20, 30), "label_token_ids": [5]}

    plain, asking = (
        count_rows(scorer, **request, return_pooled_hidden_states=asked) for asked in (False, True)
    )

    assert plain == asking == (2, 50)


def test_longer_labels_take_the_whole_layer(scorer_of: Scorers) -> None:
    """Several rows of one run of tokens are read: each would need the keys again."""
    query, item = draw_ids(10, 30)
    scorer = scorer_of("Qwen3ForCausalLM")
    request = {"query": query, "items": [item], "mode": "loglikelihood"}

    rows, computed = count_rows(scorer, **request)

    assert rows == computed == 39


def test_short_sequences_take_the_whole_layer() -> None:
    """Where most rows are read there is nothing to save."""
    ids = np.arange(9, dtype=np.int32)
    layout = plan_batch([Sequence(ids[:1], 1), Sequence(ids[:2], 2)], sharing=False)
    long = plan_batch([Sequence(ids, 9), Sequence(ids, 9)], sharing=False)

    assert choose_last_rows(layout, np.array([0, 2])) is None
    assert choose_last_rows(long, np.array([3, 5])) is None
    found = choose_last_rows(long, np.array([3, 17]))
    assert found is not None
    (block, nodes, offsets) = found.reads[0]
    assert (block.count, nodes.tolist(), offsets.tolist()) == (2, [0, 1], [3, 8])


@pytest.mark.parametrize(
    "architecture",
    ["ModernBertForSequenceClassification", "MistralForCausalLM", "Gemma2ForCausalLM"],
)
def test_rows_in_the_middle(architecture: str, scorer_of: Scorers) -> None:
    """Any one row of a sequence may be read: windows and causality count from there."""
    backbone = scorer_of(architecture).network.backbone
    ids = [np.array(one, np.int32) for one in draw_ids(50, 50, 50, 31)]
    layout = plan_batch([Sequence(one, len(one)) for one in ids], sharing=False)
    rows = np.array([3, 31 + 20, 81 + 49])
    with torch.inference_mode():
        expected = backbone.run(layout)[rows]

        found = backbone.run(layout, rows)

    assert choose_last_rows(layout, rows) is not None
    assert_close(found, expected, tolerance=2e-5)


def test_a_layer_that_does_not_call_its_attention() -> None:
    """It is an error, never a row that was not computed."""
    layout = plan_batch([Sequence(np.arange(9, dtype=np.int32), 9)], sharing=False)
    last = choose_last_rows(layout, np.array([8]))

    class Deaf(nn.Module):
        def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
            return hidden

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"num_hidden_layers": 2})
            self.layers = nn.ModuleList([Deaf(), Deaf()])

    model = Layers()
    assert install_last_layer(model)
    object.__setattr__(layout, "last", last)
    with pytest.raises(TypeError, match="did not call"):
        model.layers[-1](torch.zeros(1, 9, 4), layout=layout)
    assert model.layers[-1].layer is not None
