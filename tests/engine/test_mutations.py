"""The tests are able to fail: the two mistakes that engines make elsewhere are caught by name.

Each mutation replaces one function of the engine; then the test that is there against it is run
as it stands, and must fail. A control shows that the replacement alone does not make it fail.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine import test_classification, test_packing, test_parity
from tests.reference import Reference
from worker.engine import attention, network
from worker.engine.plan import AttentionBlock, Layout
from worker.engine.pooling import Pooling
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]


def pool_by_id(monkeypatch: pytest.MonkeyPatch, pad: int | None) -> None:
    """Pool as transformers does: the right-most token that is not the pad token."""

    def list_rows(layout: Layout, _: Pooling) -> list[int]:
        rows = []
        for read in layout.reads:
            real = np.flatnonzero(layout.ids[read.begin : read.row + 1] != pad)
            rows.append(read.begin + int(real[-1]) if len(real) else read.row)
        return rows

    monkeypatch.setattr(network, "_list_rows", list_rows)


def attend_naively(monkeypatch: pytest.MonkeyPatch, *, by_position: bool) -> None:
    """Attend node by node; the window counts positions, or else the index in the pack."""

    def block(
        self: Any, query_HTE: Tensor, key_KTE: Tensor, value_KTE: Tensor, block: AttentionBlock
    ) -> Tensor:
        groups = query_HTE.shape[0] // key_KTE.shape[0]
        before = [index for low, high in block.ancestors for index in range(low, high)]
        outputs = []
        for begin in range(block.begin, block.end, block.length):
            own = list(range(begin, begin + block.length))
            seen = torch.tensor(before + own)
            at = torch.arange(len(seen)) if by_position else seen
            distance = at[len(before) :, None] - at[None]
            visible = distance >= 0
            if self.window is not None:
                visible &= distance < self.window
            key = key_KTE[:, seen].repeat_interleave(groups, 0)
            value = value_KTE[:, seen].repeat_interleave(groups, 0)
            scores = query_HTE[:, own] @ key.transpose(1, 2) * self.scaling
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            outputs.append((weights.nan_to_num() @ value).transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(attention.PackedAttention, "block", block)


@pytest.mark.parametrize("pad", ["eos", "own"])
def test_pooling_by_id_is_caught(
    pad: str, scorer_of: Scorers, reference_of: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that ends with the pad token has another score when pooled by id."""
    scorer = scorer_of(test_classification.LLAMA, tokenizer={"pad": pad})
    check = test_classification.TestPooling().test_pad_token_inside_and_at_the_end

    pool_by_id(monkeypatch, None)
    check(test_classification.LLAMA, pad, scorer_of, reference_of)
    pool_by_id(monkeypatch, scorer.prompter.tokenizer.pad_token_id)

    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(test_classification.LLAMA, pad, scorer_of, reference_of)


def test_a_window_by_index_is_caught(
    scorer_of: Scorers, reference_of: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items behind others in the pack lose sight of the query where the window counts indices."""
    name = "MistralForCausalLM"
    checks = (
        test_packing.TestMultiItem().test_sliding_window,
        test_parity.TestCausals().test_probabilities,
    )

    attend_naively(monkeypatch, by_position=True)
    for check in checks:
        check(name, scorer_of, reference_of)
    attend_naively(monkeypatch, by_position=False)

    for check in checks:
        with pytest.raises(AssertionError, match="Mismatched elements"):
            check(name, scorer_of, reference_of)
