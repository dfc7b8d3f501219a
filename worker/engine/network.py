"""A loaded model as the engine sees it: a backbone, a head, and how a batch is read through them.

Dimension key:
    B  sequences in the batch      T  tokens, end to end      D  hidden size
    C  classes                     K  labels read             R  positions read
"""

from collections.abc import Sequence as Rows
from dataclasses import replace

import numpy as np
import torch

from worker.engine.causal import CausalHead, VocabularyReads
from worker.engine.forward import Backbone, Span, copy_to_host, translate_errors, upload
from worker.engine.heads import ClassificationHead
from worker.engine.plan import Layout, Read, plan_batch
from worker.engine.pooling import Pooling
from worker.engine.seam import Reading, Sequence

__all__ = ["Network"]

#: what stands for a sequence is one of its rows: no other row of the last layer is needed
_ONE_ROW = (Pooling.LAST, Pooling.CLS)


class Network:
    """Reads batches of sequences; one thread at a time.

    ``sharing`` says whether what a group has in common is computed once.
    """

    def __init__(self, backbone: Backbone, head: ClassificationHead | CausalHead) -> None:
        self.backbone = backbone
        self.head = head
        self.sharing = False

    def read(self, sequences: Rows[Sequence]) -> list[Reading]:
        """Return one reading per sequence, in order; none of them where anything is raised."""
        together = [index for index, one in enumerate(sequences) if not one.alone]
        found = dict(zip(together, self._read([sequences[i] for i in together]), strict=True))
        for index, sequence in enumerate(sequences):
            if sequence.alone:
                found[index] = self._read([sequence])[0]
        return [found[index] for index in range(len(sequences))]

    def _read(self, sequences: Rows[Sequence]) -> list[Reading]:
        if not sequences:
            return []
        with torch.inference_mode(), translate_errors():
            layout = plan_batch(sequences, sharing=self.sharing)
            if isinstance(self.head, CausalHead):
                return _read_causal(self.head, sequences, layout, self.backbone)
            return _read_classes(self.head, sequences, layout, self.backbone)


def _read_classes(
    head: ClassificationHead, sequences: Rows[Sequence], layout: Layout, backbone: Backbone
) -> list[Reading]:
    if head.pooling in _ONE_ROW:
        rows, places = np.unique(_list_rows(layout, head.pooling), return_inverse=True)
        hidden_TD = backbone.run(layout, rows)
        spans: list[Span] = [(place, place + 1) for place in places.tolist()]
    else:
        hidden_TD = backbone.run(layout)
        spans = [(read.begin, read.row + 1) for read in layout.reads]
    spans_2B = upload(hidden_TD.device, np.array(spans).T)
    logits_BC, pooled_BD = head.read(hidden_TD, spans_2B[0], spans_2B[1], spans)
    asking = np.flatnonzero([sequence.wants_hidden for sequence in sequences])
    outputs = [logits_BC]
    if len(asking):
        outputs.append(pooled_BD[upload(hidden_TD.device, asking)])
    host = copy_to_host(outputs)
    logits = host[0].numpy()
    hidden = dict(zip(asking, host[1], strict=True)) if len(asking) else {}
    return [
        Reading(
            values=logits[index],
            hidden=hidden.get(index),
            computed_tokens=read.computed_tokens,
            shared=read.shared,
        )
        for index, read in enumerate(layout.reads)
    ]


def _list_rows(layout: Layout, pooling: Pooling) -> list[int]:
    """Return the token row that stands for each sequence, by its length alone."""
    return [read.begin if pooling is Pooling.CLS else read.row for read in layout.reads]


def _read_causal(
    head: CausalHead, sequences: Rows[Sequence], layout: Layout, backbone: Backbone
) -> list[Reading]:
    reads, label_counts = _list_reads(sequences, layout.reads)
    asking = [index for index, sequence in enumerate(sequences) if sequence.wants_hidden]
    asked = [layout.reads[index].row for index in asking]
    rows, places = np.unique(np.array([*reads.rows, *asked], np.int32), return_inverse=True)
    hidden_RD = backbone.run(layout, rows)
    outputs = head.read(hidden_RD, replace(reads, rows=places[: len(reads.rows)].astype(np.int32)))
    if asking:
        outputs.append(hidden_RD[upload(hidden_RD.device, places[len(reads.rows) :])])
    host = copy_to_host(outputs)
    hidden = dict(zip(asking, host[3], strict=True)) if asking else {}
    logits, sums, greedy = (tensor.numpy() for tensor in host[:3])
    readings = []
    row = label = 0
    for index, read in enumerate(layout.reads):
        count = label_counts[index]
        values = logits[label : label + count]
        mass = float(sums[row]) if count else float("nan")
        row += 1 if count else 0
        label += count
        likelihoods = []
        for branch in read.branches:
            width = len(branch)
            own = logits[label : label + width].astype(np.float64) - sums[row : row + width]
            likelihoods.append((own.sum(), bool((greedy[label : label + width] > 0).all())))
            row += width
            label += width
        if likelihoods:
            values = np.array([value for value, _ in likelihoods], np.float32)
        readings.append(
            Reading(
                values=values,
                logsumexp=mass,
                hidden=hidden.get(index),
                greedy=tuple(best for _, best in likelihoods),
                computed_tokens=read.computed_tokens,
                shared=read.shared,
            )
        )
    return readings


def _list_reads(sequences: Rows[Sequence], reads: list[Read]) -> tuple[VocabularyReads, list[int]]:
    """List what is read: per sequence its last row with its labels, then its branches' rows."""
    rows: list[int] = []
    mass: list[bool] = []
    label_rows: list[int] = []
    label_ids: list[int] = []
    counts: list[int] = []
    for sequence, read in zip(sequences, reads, strict=True):
        labels = [] if sequence.labels is None else [*map(int, sequence.labels)]
        counts.append(len(labels))
        if labels:
            label_rows += [len(rows)] * len(labels)
            label_ids += labels
            rows.append(read.row)
            mass.append(sequence.wants_mass)
        for branch, branch_rows in zip(sequence.branches, read.branches, strict=True):
            label_rows += range(len(rows), len(rows) + len(branch))
            label_ids += map(int, branch)
            rows += map(int, branch_rows)
            mass += [True] * len(branch)
    made = VocabularyReads(
        rows=np.array(rows, np.int32),
        label_rows=np.array(label_rows, np.int32),
        label_ids=np.array(label_ids, np.int32),
        mass=np.array(mass, bool),
    )
    return made, counts
