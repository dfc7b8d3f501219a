"""A loaded checkpoint behind the seam: requests in, sequences through the network, scores out."""

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from contract.errors import InputTooLongError, InvalidRequestError
from contract.models import ModelDescription, ScoringPath, check_request
from contract.scores import Activation, ItemError, ScoreRequest, TokenCounts
from worker.engine.labels import name_labels, resolve_labels
from worker.engine.network import Network
from worker.engine.prompts import Encoded, Prompter, check_input_ids
from worker.engine.receipt import make_receipt
from worker.engine.results import finish_job
from worker.engine.seam import Ids, JobScores, PreparedItem, PreparedJob, Reading, Sequence

__all__ = ["ModelScorer"]


class ModelScorer:
    """The ``Scorer`` of real checkpoints."""

    def __init__(
        self,
        network: Network,
        prompter: Prompter,
        description: ModelDescription,
        receipt: dict[str, Any],
        *,
        width: int,
    ) -> None:
        self.network = network
        self.prompter = prompter
        self._description = description
        self._receipt = receipt
        self._width = width

    @property
    def description(self) -> ModelDescription:
        """What the model is, can do, and cannot do."""
        return self._description

    def prepare(self, request: ScoreRequest) -> PreparedJob:
        """Tokenise and check ``request``; see ``Scorer``."""
        model = self._description
        request = self._fill_in(request)
        warnings = [*check_request(request, model), *self._warn(request)]
        if request.activation == Activation.MODEL and model.default_activation is None:
            message = f"{model.name}'s config names an activation that is not known; name one"
            raise InvalidRequestError(message, param="activation")
        check_input_ids(request, self._width)
        causal = model.path is ScoringPath.CAUSAL
        rendered = self.prompter.render(request)
        encoded = self.prompter.encode(request, rendered)
        labels = resolve_labels(request, self.prompter, rendered) if causal else [()] * len(encoded)
        items = [
            self._prepare_item(request, index, found, own)
            for index, (found, own) in enumerate(zip(encoded, labels, strict=True))
        ]
        if self.network.sharing and not request.item_first:
            items = _mark_prefix(items, self.prompter.encode_prefix(request, rendered))
        names: list[str | int | list[int]] = name_labels(request) if causal else [*model.labels]
        return PreparedJob(request=request, items=items, warnings=warnings, labels=names)

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """Put one batch through the model; see ``Scorer``."""
        return self.network.read(sequences)

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """Turn readings into the job's scores; see ``Scorer``."""
        receipt = make_receipt(self._receipt, prepared.request, self._description, prepared.labels)
        return finish_job(prepared, readings, self._description, receipt)

    def _fill_in(self, request: ScoreRequest) -> ScoreRequest:
        """A preset knows which labels its model answers with."""
        causal = self._description.path is ScoringPath.CAUSAL
        absent = request.labels is None and request.label_token_ids is None
        if causal and absent and self._description.labels:
            return msgspec.structs.replace(request, labels=self._description.labels)
        return request

    def _warn(self, request: ScoreRequest) -> list[str]:
        if self.prompter.template is None:
            return []
        if request.item_first:
            message = "item_first has no effect: the model's template places query and item"
            raise InvalidRequestError(message, param="item_first")
        if any(isinstance(item, list) for item in request.item_list):
            return ["token ids are used as they are: the model's template is for text"]
        return []

    def _prepare_item(
        self, request: ScoreRequest, index: int, encoded: Encoded, labels: tuple[int, ...]
    ) -> PreparedItem:
        given = len(encoded.ids)
        try:
            self._check_ids(encoded.ids, index)
            encoded, tokens = self.prompter.truncate(encoded, request.truncation)
        except (InvalidRequestError, InputTooLongError) as error:
            problem = ItemError(index, error.code, error.message)
            return PreparedItem(index, TokenCounts(given, 0, 0), error=problem, labels=labels)
        sequence = Sequence(
            ids=encoded.ids,
            cost_tokens=len(encoded.ids),
            token_types=encoded.types,
            labels=np.array(labels, np.int32) if labels else None,
            wants_mass=not request.apply_softmax
            or request.return_label_mass
            or request.return_token_logprobs,
            wants_hidden=request.return_pooled_hidden_states,
        )
        return PreparedItem(index, tokens, sequence=sequence, labels=labels)

    def _check_ids(self, ids: Ids, index: int) -> None:
        if not len(ids):
            message = "query and item hold no token together: there is nothing to read"
            raise InvalidRequestError(message, param=f"items[{index}]")
        largest = ids.max()
        if largest >= self._width:
            message = f"token id {largest} is outside the model's {self._width} input embeddings"
            raise InvalidRequestError(message, param=f"items[{index}]")


def _mark_prefix(items: list[PreparedItem], prefix: Ids) -> list[PreparedItem]:
    """Mark what the sequences have in common with the query, so that it is computed once.

    The last tokens of a query may merge with an item's first ones: the split that saves most is
    taken, and an item that differs before it goes alone. Ids are never changed.
    """
    common = [
        0 if item.sequence is None else _count_common(item.sequence.ids, prefix) for item in items
    ]
    lengths = sorted(common, reverse=True)
    savings = [length * (place + 1) for place, length in enumerate(lengths)]
    if not savings or not max(savings):
        return items
    length = lengths[int(np.argmax(savings))]
    group = hashlib.blake2b(prefix[:length].tobytes(), digest_size=16).digest()
    return [
        item if own < length or item.sequence is None else _with_group(item, group, length)
        for item, own in zip(items, common, strict=True)
    ]


def _count_common(ids: Ids, prefix: Ids) -> int:
    size = min(len(ids), len(prefix))
    differing = np.flatnonzero(ids[:size] != prefix[:size])
    return int(differing[0]) if len(differing) else size


def _with_group(item: PreparedItem, group: bytes, length: int) -> PreparedItem:
    if item.sequence is None:
        return item
    return replace(item, sequence=replace(item.sequence, group=group, prefix_length=length))
