"""A loaded checkpoint behind the seam: requests in, sequences through the network, scores out."""

import hashlib
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from contract.errors import InputTooLongError, InvalidRequestError
from contract.models import ModelDescription, ScoringPath, check_request, settle_activation
from contract.scores import Activation, ItemError, Mode, ScoreRequest, TokenCounts
from worker.engine.canary import Canary
from worker.engine.labels import LabelReader, name_labels
from worker.engine.network import Network
from worker.engine.pairing import prepare_each_query
from worker.engine.prompts import Encoded, Head, Prompter, check_input_ids
from worker.engine.receipt import make_receipt
from worker.engine.results import finish_job
from worker.engine.seam import (
    Budget,
    CanaryResult,
    Ids,
    JobScores,
    PreparedItem,
    PreparedJob,
    Reading,
    Sequence,
)
from worker.engine.templates import Rendered, Template

__all__ = ["ModelScorer", "check_template"]


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
        canary: Canary,
    ) -> None:
        self.network = network
        self.prompter = prompter
        self._description = description
        self._receipt = receipt
        self._width = width
        self.canary = canary

    @property
    def description(self) -> ModelDescription:
        """What the model is, can do, and cannot do."""
        return self._description

    @property
    def padding_tokens(self) -> int:
        """How many tokens of padding it computed so far; see ``Padding``."""
        return self.network.backbone.padding_tokens

    def prepare(self, request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        """Tokenise and check ``request``, some items at a time; see ``Scorer``."""
        if request.queries is not None:
            return prepare_each_query(request, self.prepare, within_s=within_s)
        budget = Budget(within_s)
        model = self._description
        request = self._fill_in(request)
        warnings = [
            *check_request(request, model),
            *check_template(request, self.prompter.template),
        ]
        request = settle_activation(request, model)
        if request.activation == Activation.MODEL and model.default_activation is None:
            message = f"{model.name}'s config names an activation that is not known; name one"
            raise InvalidRequestError(message, param="activation")
        check_input_ids(request, self._width)
        causal = model.path is ScoringPath.CAUSAL
        head = self.prompter.encode_head(request)
        asking = self._start_asking(request, budget) if causal else None
        items: list[PreparedItem] = []
        for part in self.prompter.split(request):
            budget.check()
            items += self._prepare_part(part, head, asking, len(items))
        left = any(item.sequence is not None for item in items)
        if left and self.network.sharing and not request.item_first:
            items = _mark_prefix(items, self.prompter.encode_prefix(request))
        names: list[str | int | list[int]] = name_labels(request) if causal else [*model.labels]
        return PreparedJob(request=request, items=items, warnings=warnings, labels=names)

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """Put one batch through the model; see ``Scorer``."""
        return self.network.read(sequences)

    def check_canary(self) -> CanaryResult:
        """Score the fixed inputs and compare with what they gave first; see ``SelfChecking``."""
        causal = self._description.path is ScoringPath.CAUSAL
        return self.canary.check(self.forward, causal=causal)

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """Turn readings into the job's scores; see ``Scorer``."""
        receipt = make_receipt(self._receipt, prepared.request, self._description, prepared.labels)
        return finish_job(prepared, readings, self._description, receipt)

    def _fill_in(self, request: ScoreRequest) -> ScoreRequest:
        """A preset knows which labels its model answers with."""
        causal = self._description.path is ScoringPath.CAUSAL
        absent = request.labels is None and request.label_token_ids is None
        absent = absent and request.mode == Mode.LABELS
        if causal and absent and self._description.labels:
            return msgspec.structs.replace(request, labels=self._description.labels)
        return request

    def _start_asking(self, request: ScoreRequest, budget: Budget) -> "_Asking":
        """Read of the whole request what decides what is read of its items."""
        if request.mode == Mode.LOGLIKELIHOOD:
            return _Asking(context=self.prompter.count_context(request))
        return _Asking(labels=LabelReader(request, self.prompter, budget))

    def _prepare_part(
        self, part: ScoreRequest, head: Head | None, asking: "_Asking | None", begin: int
    ) -> list[PreparedItem]:
        """Prepare some of a job's items; ``begin`` is the first one's index."""
        rendered = self.prompter.render(part)
        encoded = self.prompter.encode(part, rendered, head)
        asked = [_Asked()] * len(encoded) if asking is None else asking.ask(part, rendered)
        return [
            self._prepare_item(part, begin + index, found, own)
            for index, (found, own) in enumerate(zip(encoded, asked, strict=True))
        ]

    def _prepare_item(
        self, request: ScoreRequest, index: int, encoded: Encoded | int, asked: "_Asked"
    ) -> PreparedItem:
        if isinstance(encoded, int):
            refused = self.prompter.refuse(encoded, request)
            problem = ItemError(index, refused.code, refused.message)
            return PreparedItem(
                index, TokenCounts(encoded, 0, 0), error=problem, labels=asked.labels
            )
        given = len(encoded.ids)
        labels = asked.labels
        try:
            self._check_ids(encoded.ids, asked.context, index)
            encoded, tokens = self.prompter.truncate(encoded, request)
        except (InvalidRequestError, InputTooLongError) as error:
            problem = ItemError(index, error.code, error.message)
            return PreparedItem(index, TokenCounts(given, 0, 0), error=problem, labels=labels)
        ids, branches = encoded.ids, asked.branches
        if asked.context is not None:
            # what is cut is context: the boundary keeps its place from the right end
            boundary = len(ids) - (given - asked.context)
            ids, branches = ids[:boundary], (ids[boundary:],)
        sequence = Sequence(
            ids=ids,
            cost_tokens=len(ids) + sum(len(branch) - 1 for branch in branches),
            branches=branches,
            alone=request.determinism is not None,
            token_types=encoded.types,
            labels=np.array(labels, np.int32) if labels else None,
            wants_mass=not request.apply_softmax
            or request.return_label_mass
            or request.return_token_logprobs,
            wants_hidden=request.return_pooled_hidden_states,
        )
        return PreparedItem(index, tokens, sequence=sequence, labels=labels)

    def _check_ids(self, ids: Ids, context: int | None, index: int) -> None:
        if not len(ids):
            message = "query and item hold no token together: there is nothing to read"
            raise InvalidRequestError(message, param=f"items[{index}]")
        if context is not None and not 0 < context < len(ids):
            part = "item" if context else "query"
            message = f"the {part} holds no token: a likelihood needs one of each"
            raise InvalidRequestError(message, param=f"items[{index}]")
        largest = ids.max()
        if largest >= self._width:
            message = f"token id {largest} is outside the model's {self._width} input embeddings"
            raise InvalidRequestError(message, param=f"items[{index}]")


def check_template(request: ScoreRequest, template: Template | None) -> list[str]:
    """Raise ``InvalidRequestError`` for what a template leaves no room for; return the warnings."""
    if template is None:
        return []
    if request.item_first:
        message = "item_first has no effect: the model's template places query and item"
        raise InvalidRequestError(message, param="item_first")
    if request.mode == Mode.LOGLIKELIHOOD:
        message = "mode loglikelihood reads bare items: serve the model without a template"
        raise InvalidRequestError(message, param="mode")
    if any(isinstance(item, list) for item in request.item_list):
        return ["token ids are used as they are: the model's template is for text"]
    return []


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What is read of one item: labels, or longer ones, or itself behind ``context`` tokens."""

    labels: tuple[int, ...] = ()
    branches: tuple[Ids, ...] = ()
    context: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """What is read of a job's items: labels, or themselves behind ``context`` tokens."""

    context: int = 0
    labels: LabelReader | None = None

    def ask(self, part: ScoreRequest, rendered: list[Rendered]) -> list[_Asked]:
        """Find out what is read of every item of ``part``."""
        count = len(part.item_list)
        if self.labels is None:
            return [_Asked(context=self.context)] * count
        if part.multi_token:
            return [_Asked(branches=own) for own in self.labels.read_long(count, rendered)]
        return [_Asked(labels=own) for own in self.labels.read_labels(part, rendered)]


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
