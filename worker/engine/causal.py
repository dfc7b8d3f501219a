"""Logits of label tokens at the positions that are read: the only place for the vocabulary.

A row whose full-vocabulary probability is wanted costs a product with the whole head; softmax over
labels alone costs the labels' rows of it. The model's own forward is replayed either way, so that
scaled or soft-capped logits come out as the architecture makes them.

Dimension key:
    R  positions that are read      K  labels read, of all positions      D  hidden size
    V  vocabulary                   U  distinct labels of a batch
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.engine.foreign import Model
from worker.engine.forward import upload
from worker.engine.heads import Replay
from worker.engine.pooling import Pooling
from worker.engine.seam import Ids

__all__ = ["CausalHead", "SelectiveHead", "VocabularyReads", "install_selective"]

#: logits of one product are kept below this many elements (128 MB in fp32)
_LOGIT_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyReads:
    """Which tokens' logits are read where: ``label_ids[k]`` at row ``rows[label_rows[k]]``.

    ``mass`` marks the rows that need the whole vocabulary. Rows are token rows of the pack.
    """

    rows: Ids
    label_rows: Ids
    label_ids: Ids
    mass: np.ndarray[Any, np.dtype[np.bool_]]


class SelectiveHead(nn.Module):
    """A language-model head that can compute some rows of itself only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.selected_U: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The whole head's weight: some models look at its dtype."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The whole head's bias, where it has one."""
        return self.linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of the selected tokens, or of all."""
        hidden = hidden.to(self.linear.weight.device)  # a device map may part them
        selected_U = self.selected_U
        if selected_U is None:
            return functional.linear(hidden, self.linear.weight, self.linear.bias)
        bias = None if self.linear.bias is None else self.linear.bias[selected_U]
        return functional.linear(hidden, self.linear.weight[selected_U], bias)


def install_selective(model: Model) -> SelectiveHead | None:
    """Make the model's head able to compute some rows of itself; None where it is not linear.

    Comes before the backbone is detached: some models look for their head through it.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        return None
    selective = SelectiveHead(linear)
    model.set_output_embeddings(selective)
    return selective


class CausalHead:
    """A language-model head over rows of hidden states."""

    pooling = Pooling.LAST

    def __init__(
        self, model: Model, replay: Replay, selective: SelectiveHead | None, *, vocabulary: int
    ) -> None:
        self.model = model
        self.replay = replay
        self.vocabulary = vocabulary
        self._selective = selective

    @property
    def name(self) -> str:
        """What the head is, for the receipt."""
        return "language model"

    def read(self, hidden_TD: Tensor, reads: VocabularyReads) -> list[Tensor]:
        """Return label logits ``[K]``, logsumexp ``[R]``, and whether a label is greatest ``[K]``.

        All fp32. Where a row does not need the whole vocabulary its logsumexp is NaN, and so is
        what is said of its labels' rank.
        """
        device = hidden_TD.device
        logits_K = torch.empty(len(reads.label_ids), device=device)
        greedy_K = torch.full_like(logits_K, float("nan"))
        sums_R = torch.full((len(reads.rows),), float("nan"), device=device)
        whole = reads.mass if self._selective is not None else np.ones_like(reads.mass)
        for rows in _split(np.flatnonzero(whole), max(1, _LOGIT_ELEMENTS // self.vocabulary)):
            self._read_whole(hidden_TD, reads, rows, (logits_K, sums_R, greedy_K))
        if not whole.all():
            self._read_labels(hidden_TD, reads, np.flatnonzero(~whole), logits_K)
        return [logits_K, sums_R, greedy_K]

    def _read_whole(
        self,
        hidden_TD: Tensor,
        reads: VocabularyReads,
        rows: np.ndarray[Any, Any],
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        logits_K, sums_R, greedy_K = out
        logits_RV = self.logits(hidden_TD[upload(hidden_TD.device, reads.rows[rows])])
        sums_R[upload(hidden_TD.device, rows)] = logits_RV.logsumexp(-1)
        at, local = _select(reads.label_rows, rows)
        index_RK = upload(hidden_TD.device, np.stack([at, local, reads.label_ids[at]]))
        labels_K = logits_RV[index_RK[1], index_RK[2]]
        logits_K[index_RK[0]] = labels_K
        best_R = logits_RV.argmax(-1)
        greedy_K[index_RK[0]] = (best_R[index_RK[1]] == index_RK[2]).float()

    def _read_labels(
        self,
        hidden_TD: Tensor,
        reads: VocabularyReads,
        rows: np.ndarray[Any, Any],
        logits_K: Tensor,
    ) -> None:
        at, local = _select(reads.label_rows, rows)
        if self._selective is None or not len(at):
            return
        distinct, column = np.unique(reads.label_ids[at], return_inverse=True)
        device = hidden_TD.device
        index_RK = upload(device, np.stack([at, local, column]))
        self._selective.selected_U = upload(device, distinct)
        try:
            logits_RU = self.logits(hidden_TD[upload(device, reads.rows[rows])])
        finally:
            self._selective.selected_U = None
        logits_K[index_RK[0]] = logits_RU[index_RK[1], index_RK[2]]

    def logits(self, rows_RD: Tensor) -> Tensor:
        """Return fp32 logits of the rows, over the whole vocabulary or what is selected of it."""
        self.replay.load(rows_RD[:, None])
        ids_R1 = torch.zeros(len(rows_RD), 1, dtype=torch.long, device=rows_RD.device)
        logits_RV: Tensor = self.model(input_ids=ids_R1).logits[:, 0].float()
        return logits_RV


def _split(rows: np.ndarray[Any, Any], step: int) -> list[np.ndarray[Any, Any]]:
    return [rows[begin : begin + step] for begin in range(0, len(rows), step)]


def _select(label_rows: Ids, rows: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return which labels are read at ``rows``, and at which of them."""
    position = np.full(int(max(label_rows.max(initial=0), rows.max(initial=0))) + 1, -1)
    position[rows] = np.arange(len(rows))
    local = position[label_rows]
    at = np.flatnonzero(local >= 0)
    return at, local[at]
