"""A scorer that costs nothing: scores are hashes of the input. For load and chaos runs.

Selected by ``source = "builtin:deterministic"``. It is a real scorer of the service: it obeys the
request's checks, limits and activations, and gives the same input the same score on every machine.
It says nothing about the text. It never loads torch.
"""

import hashlib
import math
from collections.abc import Sequence as Rows
from typing import Any

import msgspec
import numpy as np

from contract.errors import InputTooLongError
from contract.models import (
    ModelConfig,
    ModelDescription,
    ScoringPath,
    check_request,
    settle_activation,
)
from contract.scores import Activation, ItemError, ScoreRequest, TokenCounts, Truncation
from worker.engine.pairing import prepare_each_query
from worker.engine.results import choose_activation, describe_instruction, finish_job
from worker.engine.seam import (
    Budget,
    Floats,
    Ids,
    JobScores,
    PreparedItem,
    PreparedJob,
    Reading,
    Sequence,
)

__all__ = ["SOURCE", "DeterministicScorer"]

SOURCE = "builtin:deterministic"
_HIDDEN = 16
_VOCABULARY = 50_000
_LIMIT = 8192


class DeterministicScorer:
    """The ``Scorer`` without a model: tokens are the input's UTF-8 bytes, or its token ids."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        path = config.path or ScoringPath.CLASSIFICATION
        causal = path is ScoringPath.CAUSAL
        labels = [] if causal else ["negative", "positive"]
        self._description = ModelDescription(
            name=name,
            path=path,
            architecture="Deterministic",
            labels=labels,
            label_count=len(labels),
            vocabulary=_VOCABULARY if causal else 0,
            hidden_size=_HIDDEN,
            max_tokens=config.max_tokens or _LIMIT,
            dtype="float32",
            device="cpu",
            pooling="last",
            head="hash",
            instruction=config.instruction,
            default_activation=None if causal else Activation.SOFTMAX,
            hidden_states="numbers made from a hash of the input",
            fingerprint=_fingerprint(name, config),
        )

    @property
    def description(self) -> ModelDescription:
        """What it is."""
        return self._description

    def prepare(self, request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        """See ``Scorer``; a label text's id is a hash of it."""
        if request.queries is not None:
            return prepare_each_query(request, self.prepare, within_s=within_s)
        model = self._description
        warnings = check_request(request, model)
        if request.instruction is None and model.instruction:
            request = msgspec.structs.replace(request, instruction=model.instruction)
        request = settle_activation(request, model)
        causal = model.path is ScoringPath.CAUSAL
        names: list[Any] = [*model.labels]
        if causal:
            names = [*(request.labels or request.label_token_ids or [])]
        budget = Budget(within_s)
        items = []
        for index, item in enumerate(request.item_list):
            budget.check()
            labels = _pick_labels(names, index) if causal else ()
            items.append(self._prepare_item(request, index, item, labels))
        return PreparedJob(request=request, items=items, warnings=warnings, labels=names)

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """See ``Scorer``; any thread."""
        read = [sequence.ids.tobytes() for sequence in sequences]
        rows = _hash_rows(read)
        count = self._description.label_count
        logsumexp = float(np.log(_VOCABULARY)) + 4.0
        return [
            Reading(
                values=row[:count] if sequence.labels is None else _read_labels(ids, sequence),
                logsumexp=logsumexp,
                hidden=row if sequence.wants_hidden else None,
                computed_tokens=len(sequence.ids),
            )
            for sequence, ids, row in zip(sequences, read, rows, strict=True)
        ]

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """See ``Scorer``."""
        model = self._description
        receipt: dict[str, Any] = {
            **describe_instruction(prepared.request, model),
            "model": model.name,
            "source": SOURCE,
            "architecture": model.architecture,
            "path": str(model.path),
            "labels": prepared.labels,
            "fingerprint": model.fingerprint,
        }
        if model.path is ScoringPath.CLASSIFICATION:
            receipt["activation"] = str(choose_activation(prepared.request, model))
        return finish_job(prepared, readings, model, receipt)

    def _prepare_item(
        self, request: ScoreRequest, index: int, item: object, labels: tuple[int, ...]
    ) -> PreparedItem:
        given = len(_join(request, item))
        limit = min(
            self._description.max_tokens, request.max_tokens or self._description.max_tokens
        )
        ids = _join(request, _cut(request, item, given - limit))
        if len(ids) > limit:
            problem = ItemError(
                index, InputTooLongError.code, f"{len(ids)} tokens; the model's limit is {limit}"
            )
            return PreparedItem(index, TokenCounts(given, 0, 0), error=problem, labels=labels)
        sequence = Sequence(
            ids=ids,
            cost_tokens=max(1, len(ids)),
            labels=np.array(labels, np.int32) if labels else None,
            wants_hidden=request.return_pooled_hidden_states,
        )
        tokens = TokenCounts(given, len(ids), given - len(ids))
        return PreparedItem(index, tokens, sequence=sequence, labels=labels)


def _fingerprint(name: str, config: ModelConfig) -> str:
    told = name.encode() + msgspec.json.encode(config, order="sorted")
    return f"sha256:{hashlib.sha256(told).hexdigest()}"


def _join(request: ScoreRequest, item: object) -> Ids:
    if isinstance(item, str):
        query = request.query or ""
        text = f"{item}{query}" if request.item_first else f"{query}{item}"
        text = f"{request.instruction or ''}{text}"
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    given = request.query if isinstance(request.query, list) else []
    own = item if isinstance(item, list) else []
    return np.array([*own, *given] if request.item_first else [*given, *own], np.int32)


def _cut(request: ScoreRequest, item: object, excess: int) -> object:
    """Return the item without its last tokens, where the request has it cut."""
    data: Any = item.encode() if isinstance(item, str) else item
    keep = min(len(data), request.max_item_tokens or len(data))
    if request.truncation is Truncation.ITEM:
        keep = min(keep, len(data) - excess)
    kept = data[: max(0, keep)]
    return kept.decode(errors="ignore") if isinstance(item, str) else kept


def _pick_labels(names: list[Any], index: int) -> tuple[int, ...]:
    own = names[index] if names and isinstance(names[0], list) else names
    return tuple(
        name
        if isinstance(name, int)
        else int.from_bytes(hashlib.sha256(name.encode()).digest()[:2])
        for name in own
    )


def _read_labels(ids: bytes, sequence: Sequence) -> Floats:
    labels = [] if sequence.labels is None else sequence.labels.tolist()
    return _hash_rows([ids + b"|%d" % label for label in labels])[:, 0]


def _hash_rows(inputs: Rows[bytes]) -> Floats:
    """Return a row of numbers between -4 and 4 for each input; all at once, as a model would."""
    raw = b"".join([hashlib.shake_128(data).digest(4 * _HIDDEN) for data in inputs])
    numbers = np.frombuffer(raw, "<u4") / 2**29 - 4.0
    return numbers.astype(np.float32).reshape(len(inputs), _HIDDEN)
