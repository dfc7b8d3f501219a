"""From a job's readings to its scores: the only place where rows are assembled and checked.

A score is never invented: an item without a reading, or with one that is not finite, is an error
of that item, and its row is NaN in every tensor. Nothing here loads torch.
"""

import hashlib
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.errors import NonFiniteScoreError
from contract.models import ModelDescription, ScoringPath
from contract.scores import Activation, ItemError, Mode, ScoreRequest, TokenCounts, Usage
from worker.engine.activations import activate, apply_softmax
from worker.engine.seam import Floats, JobScores, PreparedItem, PreparedJob, Reading

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["choose_activation", "describe_instruction", "finish_job"]

_NAN = float("nan")


def choose_activation(request: ScoreRequest, model: ModelDescription) -> Activation:
    """Return what a classification request applies to the logits, never ``MODEL``."""
    if request.activation is None:
        return Activation.SOFTMAX if request.apply_softmax else Activation.NONE
    if request.activation == Activation.MODEL:
        return model.default_activation or Activation.NONE
    return request.activation


def describe_instruction(request: ScoreRequest, model: ModelDescription) -> dict[str, str]:
    """Return what a receipt says of the instruction: its hash, where the model is told one.

    Receipts outlive the jobs, which hold the text.
    """
    told = model.instruction if request.instruction is None else request.instruction
    if told is None:
        return {}
    return {"instruction_hash": f"sha256:{hashlib.sha256(told.encode()).hexdigest()}"}


def finish_job(
    prepared: PreparedJob,
    readings: Rows[Reading | ItemError],
    model: ModelDescription,
    receipt: dict[str, Any],
) -> JobScores:
    """Assemble the scores of ``prepared`` from one reading for each of its sequences."""
    if len(readings) != len(prepared.sequences):
        message = f"{len(readings)} readings for {len(prepared.sequences)} sequences"
        raise AssertionError(message)
    rows, errors = _match(prepared.items, readings)
    causal = model.path is ScoringPath.CAUSAL
    counts = [_count_labels(item, prepared, model) for item in prepared.items]
    columns = max(counts, default=_count_labels(None, prepared, model))
    tensors = (
        _score_causal(prepared, rows, columns)
        if causal
        else _score_classes(prepared, rows, columns, model)
    )
    hidden = {index: row.hidden for index, row in rows.items() if row.hidden is not None}
    if hidden:
        tensors["hidden_states"] = _stack(hidden, len(prepared.items))
    tokens = [
        item.tokens if item.index in rows else TokenCounts(item.tokens.given, 0, 0)
        for item in prepared.items
    ]
    prompt = sum(count.used for count in tokens)
    usage = Usage(
        prompt_tokens=prompt,
        total_tokens=prompt,
        computed_tokens=sum(row.computed_tokens for row in rows.values()),
    )
    return JobScores(
        tensors=tensors,
        labels=prepared.labels,
        label_counts=counts,
        errors=sorted(errors, key=lambda error: error.index),
        tokens=tokens,
        usage=usage,
        receipt=receipt
        | {
            "truncated_items": sum(count.cut > 0 for count in tokens),
            "shared_prefix_items": sum(row.shared for row in rows.values()),
        },
        warnings=prepared.warnings,
    )


def _match(
    items: list[PreparedItem], readings: Rows[Reading | ItemError]
) -> tuple[dict[int, Reading], list[ItemError]]:
    rows: dict[int, Reading] = {}
    errors: list[ItemError] = []
    left = iter(readings)
    for item in items:
        found = next(left) if item.error is None else item.error
        if isinstance(found, ItemError):
            errors.append(ItemError(item.index, found.code, found.message))
        elif _is_finite(found, item):
            rows[item.index] = found
        else:
            message = "the model yielded a number that is not finite for this item"
            errors.append(ItemError(item.index, NonFiniteScoreError.code, message))
    return rows, errors


def _is_finite(reading: Reading, item: PreparedItem) -> bool:
    read = [reading.values]
    if item.sequence is not None and item.sequence.labels is not None and item.sequence.wants_mass:
        read.append(np.array([reading.logsumexp], np.float32))
    return all(bool(np.isfinite(values).all()) for values in read)


def _count_labels(item: PreparedItem | None, prepared: PreparedJob, model: ModelDescription) -> int:
    if model.path is ScoringPath.CLASSIFICATION:
        return model.label_count
    return len(item.labels) if item is not None and item.labels else len(prepared.labels)


def _score_classes(
    prepared: PreparedJob, rows: dict[int, Reading], columns: int, model: ModelDescription
) -> dict[str, Any]:
    logits: Floats = np.full((len(prepared.items), columns), _NAN, np.float32)
    for index, row in rows.items():
        logits[index] = row.values
    # rows without a reading stay NaN
    request = prepared.request
    activation = choose_activation(request, model)
    scores = activate(logits, activation, temperature=request.temperature)
    return {"scores": scores.astype(np.float32), "logits": logits}


def _score_causal(prepared: PreparedJob, rows: dict[int, Reading], columns: int) -> dict[str, Any]:
    request = prepared.request
    if request.multi_token or request.mode == Mode.LOGLIKELIHOOD:
        return _score_branches(prepared, rows, columns)
    count = len(prepared.items)
    scores = np.full((count, columns), _NAN, np.float32)
    logits, logprobs = scores.copy(), scores.copy()
    mass: Floats = np.full(count, _NAN, np.float32)
    for index, row in rows.items():
        width = len(row.values)
        own = row.values.astype(np.float64) - row.logsumexp
        logits[index, :width] = row.values
        logprobs[index, :width] = own
        mass[index] = np.exp(own).sum()
        scores[index, :width] = (
            apply_softmax(row.values, temperature=request.temperature)
            if request.apply_softmax
            else np.exp(own)
        )
    tensors: dict[str, Any] = {"scores": scores, "logits": logits}
    if request.return_label_mass or not request.apply_softmax:
        tensors["label_mass"] = mass
    if request.return_token_logprobs:
        tensors["token_logprobs"] = logprobs
    return tensors


def _score_branches(
    prepared: PreparedJob, rows: dict[int, Reading], columns: int
) -> dict[str, Any]:
    """Summed log-probabilities of longer labels, or of the items themselves."""
    request = prepared.request
    shape = (len(prepared.items), columns)
    names = ("scores", "logits", "normalized_logprobs", "token_counts", "is_greedy")
    tensors: dict[str, Any] = {name: np.full(shape, _NAN, np.float32) for name in names}
    branches = {item.index: item.sequence.branches for item in prepared.items if item.sequence}
    for index, row in rows.items():
        sums = row.values.astype(np.float64)
        lengths = np.array([len(branch) for branch in branches[index]])
        softmax = request.apply_softmax
        tensors["logits"][index] = sums
        tensors["normalized_logprobs"][index] = sums / lengths
        tensors["token_counts"][index] = lengths
        tensors["is_greedy"][index] = row.greedy
        tensors["scores"][index] = (
            apply_softmax(sums, temperature=request.temperature) if softmax else sums
        )
    return tensors


def _stack(rows: dict[int, "Floats | Tensor"], count: int) -> "Floats | Tensor":
    first = next(iter(rows.values()))
    shape = (count, len(first))
    stacked: Any = (
        np.full(shape, _NAN, first.dtype)
        if isinstance(first, np.ndarray)
        else first.new_full(shape, _NAN)
    )
    for index, row in rows.items():
        stacked[index] = row
    return stacked  # type: ignore[no-any-return]  # either kind is indexed alike
