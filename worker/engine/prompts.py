"""Query and item become token ids: the only place for joining, special tokens and truncation.

Text is joined without a separator and tokenised as one string, so that ids are those of the plain
text; pair models encode query and item as a pair. Only query and item tokens are ever cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import InputTooLongError, InvalidRequestError
from contract.scores import ScoreRequest, TokenCounts, Truncation, TruncationSide
from worker.engine.foreign import Encoding, Tokenizer
from worker.engine.rules import TokenizerRules
from worker.engine.seam import Ids
from worker.engine.templates import Rendered, Span, Template

__all__ = ["Encoded", "Head", "Prompter", "check_input_ids"]

Parts = NDArray[np.int8]

#: what is tokenised at a time: whatever of it is too long is let go before the next
_CHUNK_CHARACTERS = 1 << 18
_CHUNK_ITEMS = 512
#: an input of fewer characters is tokenised, so that its refusal names its exact length
_LONG = 1 << 13
#: a shorter beginning is not worth the care
_HEAD = 1 << 9


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One sequence's ids. ``parts`` tells for each token: 0 query, 1 item, -1 neither."""

    ids: Ids
    types: Ids | None
    parts: Parts | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How many tokens an input and its item may have, and which part is cut beyond that."""

    total: int
    item: int | None
    mode: Truncation
    side: str
    whose: str

    @property
    def least(self) -> int:
        """What is no longer than this is never cut."""
        return min(self.total, self.item or self.total)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning that all sequences of a request share: ``characters`` of text, tokenised."""

    characters: int
    ids: Ids
    offsets: NDArray[np.int64]


class Prompter:
    """Makes ids of requests for one model. Thread-safe: nothing of the tokenizer is changed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        pair: bool,
        max_tokens: int,
        truncation_side: str,
        template: Template | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pair = pair
        self.max_tokens = max_tokens
        self.truncation_side = truncation_side
        self.template = template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._takes_types = "token_type_ids" in tokenizer.model_input_names
        self.rules = TokenizerRules(tokenizer)
        probe = self._backend.encode("a", add_special_tokens=True)
        #: how many special tokens stand before a text, and the type of the text's own
        self._lead = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        self._type = probe.type_ids[self._lead] if probe.type_ids else 0

    def find_limits(self, request: ScoreRequest) -> Limits:
        """Return the model's limits, lowered as the request says."""
        lowered = request.max_tokens is not None and request.max_tokens < self.max_tokens
        return Limits(
            total=min(self.max_tokens, request.max_tokens or self.max_tokens),
            item=request.max_item_tokens,
            mode=request.truncation,
            side=str(request.truncation_side or self.truncation_side),
            whose="request" if lowered else "model",
        )

    def split(self, request: ScoreRequest) -> Iterator[ScoreRequest]:
        """Yield the request in parts of some items each, in order; none for one without items."""
        items = request.item_list
        begin = size = 0
        around = len(request.query or "") + len(request.instruction or "")
        for index, item in enumerate(items):
            size += around + len(item)
            if size >= _CHUNK_CHARACTERS or index - begin + 1 >= _CHUNK_ITEMS:
                yield request.take(range(begin, index + 1))
                begin, size = index + 1, 0
        if begin < len(items):
            yield request.take(range(begin, len(items)))

    def encode_head(self, request: ScoreRequest) -> Head | None:
        """Tokenise the query once for all items, where the halves' ids are those of the whole."""
        query = request.query
        several = not isinstance(request.items, str) and len(request.items) > 1
        if not several or not isinstance(query, str) or len(query) < _HEAD or self.pair:
            return None
        rendered = self._arrange(request, query, "")
        begin, end = next((one.begin, one.end) for one in rendered.spans if not one.part)
        if request.item_first or end > len(rendered.shared):
            return None
        # inside the query: no part begins or ends where the halves meet
        cut = self.rules.find_cut(rendered.text, begin + 1, end - 1)
        if cut < _HEAD:
            return None
        found = self._backend.encode(rendered.text[:cut], add_special_tokens=False)
        return Head(cut, np.array(found.ids, np.int32), np.array(found.offsets, np.int64))

    def render(self, request: ScoreRequest) -> list[Rendered]:
        """Return the text of every text item together with the query."""
        query = request.query if isinstance(request.query, str) else ""
        return [
            self._arrange(request, query, item)
            for item in request.item_list
            if isinstance(item, str)
        ]

    def encode(
        self, request: ScoreRequest, rendered: list[Rendered], head: Head | None = None
    ) -> list[Encoded | int]:
        """Return the ids of every item together with the query, before any truncation.

        What its characters alone show to be too long is not tokenised: a number stands in its
        place, of the tokens that it has at least.
        """
        if not rendered:
            given = request.query if isinstance(request.query, list) else []
            return [
                _concatenate(given, item, item_first=request.item_first)
                for item in request.item_list
                if isinstance(item, list)
            ]
        limits = self.find_limits(request)
        refused = self._refuse(request, rendered, limits)
        left = [one for one, least in zip(rendered, refused, strict=True) if not least]
        encoded = iter(self._encode_texts(left, head, limits, item_first=request.item_first))
        return [least or next(encoded) for least in refused]

    def refuse(self, least: int, request: ScoreRequest) -> InputTooLongError:
        """Return the error of an item that was not tokenised."""
        return _too_long(least, " at least that may not be cut", self.find_limits(request))

    def _refuse(self, request: ScoreRequest, rendered: list[Rendered], limits: Limits) -> list[int]:
        """Count what is too long by its characters, of the parts that may not be cut; else 0."""
        kept = {Truncation.ITEM: {0}, Truncation.QUERY: {1}}.get(limits.mode, {0, 1})
        if limits.item is not None:
            kept = kept - {1}
        query = request.query if isinstance(request.query, str) else ""
        least = self.rules.count_least(query) if len(query) >= _LONG else 0
        refused = []
        for item, one in zip(request.item_list, rendered, strict=True):
            counted = least if 0 in kept else 0
            if 1 in kept and isinstance(item, str) and len(item) + len(query) >= _LONG:
                counted += self.rules.count_least(item)
            long = len(one.text) + len(one.pair or "") >= _LONG and counted > limits.total
            refused.append(counted if long else 0)
        return refused

    def encode_prefix(self, request: ScoreRequest) -> Ids:
        """Return the ids that the sequences may begin with: what comes before the item."""
        shared = self._find_shared(request)
        return np.array(shared, np.int32) if isinstance(shared, list) else self._encode_open(shared)

    def count_context(self, request: ScoreRequest) -> int:
        """Return how many tokens are the query's, where each item's own likelihood is read.

        As lm-evaluation-harness splits: white space at the query's end belongs to the item.
        """
        shared = self._find_shared(request)
        return len(shared if isinstance(shared, list) else self._encode_open(shared.rstrip()))

    def _find_shared(self, request: ScoreRequest) -> str | list[int]:
        """Return what comes before the item, as ids where the items are ids."""
        query, items = request.query, request.item_list
        if isinstance(query, list) or not items or isinstance(items[0], list):
            return query if isinstance(query, list) else []
        return self._arrange(request, query or "", "").shared

    def _encode_open(self, text: str) -> Ids:
        """Return the ids of ``text`` as a beginning: without a closing special token."""
        found = self._backend.encode(text, add_special_tokens=True)
        ids = np.array(found.ids, np.int32)
        closing = np.array([*found.special_tokens_mask[::-1], 0]).argmin()
        return self._drop_double(ids[: max(1, len(ids) - int(closing))])

    def encode_alone(self, texts: list[str]) -> list[list[int]]:
        """Return each text's ids without special tokens."""
        found = self._backend.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def truncate(self, encoded: Encoded, request: ScoreRequest) -> tuple[Encoded, TokenCounts]:
        """Cut what the request allows until its limits hold.

        Raises ``InputTooLongError`` with both numbers where they cannot.
        """
        given, limits = len(encoded.ids), self.find_limits(request)
        cut = _choose_cut(encoded, limits)
        if not len(cut):
            return encoded, TokenCounts(given, given, 0)
        kept = np.delete(encoded.ids, cut)
        types = None if encoded.types is None else np.delete(encoded.types, cut)
        return Encoded(kept, types), TokenCounts(given, len(kept), len(cut))

    def _arrange(self, request: ScoreRequest, query: str, item: str) -> Rendered:
        if self.template is not None:
            return self.template.render(query, item, request.instruction)
        item_first = request.item_first
        first, second = (item, query) if item_first else (query, item)
        if self.pair and query:
            return Rendered(first, (), pair=second)
        middle, end = len(first), len(first) + len(second)
        parts = (Span(0, middle, int(item_first)), Span(middle, end, int(not item_first)))
        return Rendered(first + second, parts)

    def _encode_texts(
        self, rendered: list[Rendered], head: Head | None, limits: Limits, *, item_first: bool
    ) -> list[Encoded]:
        begin = head.characters if head else 0
        inputs = [
            one.text[begin:] if one.pair is None else (one.text, one.pair) for one in rendered
        ]
        found = self._backend.encode_batch(inputs, add_special_tokens=True)
        return [
            self._finish(encoding, one, head, limits, item_first=item_first)
            for encoding, one in zip(found, rendered, strict=True)
        ]

    def _finish(
        self,
        encoding: Encoding,
        rendered: Rendered,
        head: Head | None,
        limits: Limits,
        *,
        item_first: bool,
    ) -> Encoded:
        ids = np.array(encoding.ids, np.int32)
        types = np.array(encoding.type_ids, np.int32) if self._takes_types else None
        if head is not None:
            ids = np.insert(ids, self._lead, head.ids)
            if types is not None:
                types = np.insert(types, self._lead, np.full(len(head.ids), self._type))
        if self.template is not None and encoding.special_tokens_mask[-1]:
            # a closing token would stand behind the template's last words
            ids, types = ids[:-1], None if types is None else types[:-1]
        kept = self._drop_double(ids)
        dropped = len(ids) - len(kept)
        types = None if types is None else types[dropped:]
        if len(kept) <= limits.least:
            return Encoded(kept, types)
        parts = self._find_parts(encoding, rendered, head, item_first=item_first)
        return Encoded(kept, types, parts[dropped : dropped + len(kept)])

    def _find_parts(
        self, encoding: Encoding, rendered: Rendered, head: Head | None, *, item_first: bool
    ) -> Parts:
        """Tell each token's part; one that reaches over a part's edge belongs to neither."""
        if rendered.pair is not None:
            sides = [-1 if side is None else side for side in encoding.sequence_ids]
            turned = [1 - side if item_first and side >= 0 else side for side in sides]
            return np.array(turned, np.int8)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        special = np.array(encoding.special_tokens_mask, bool)
        if head is not None:
            offsets = np.insert(offsets + head.characters, self._lead, head.offsets, axis=0)
            special = np.insert(special, self._lead, np.zeros(len(head.ids), bool))
        parts = np.full(len(offsets), -1, np.int8)
        for span in rendered.spans:
            inside = (offsets[:, 0] >= span.begin) & (offsets[:, 1] <= span.end)
            parts[inside & (offsets[:, 0] < offsets[:, 1])] = span.part
        parts[special] = -1
        return parts

    def _drop_double(self, ids: Ids) -> Ids:
        """A text or template that already begins with BOS gets no second one."""
        begin = self.tokenizer.bos_token_id
        doubled = begin is not None and len(ids) > 1 and ids[0] == begin and ids[1] == begin
        return ids[1:] if doubled else ids


def _concatenate(query: list[int], item: list[int], *, item_first: bool) -> Encoded:
    first, second = (item, query) if item_first else (query, item)
    parts = np.array([int(item_first)] * len(first) + [int(not item_first)] * len(second), np.int8)
    return Encoded(np.array([*first, *second], np.int32), None, parts)


def _choose_cut(encoded: Encoded, limits: Limits) -> NDArray[np.intp]:
    """Return the places of the tokens to be cut: of a long item first, then what ``mode`` names."""
    given = len(encoded.ids)
    nothing: NDArray[np.intp] = np.array([], np.intp)
    if given <= limits.least:
        return nothing
    cut = nothing
    if limits.item is not None and encoded.parts is not None:
        item = np.flatnonzero(encoded.parts == 1)
        cut = _take_end(item, len(item) - limits.item, limits.side)
    excess = given - len(cut) - limits.total
    if excess <= 0:
        return cut
    if limits.mode == Truncation.ERROR or encoded.parts is None:
        raise _too_long(given, "", limits)
    places = np.flatnonzero(encoded.parts == (limits.mode == Truncation.ITEM))
    left = np.setdiff1d(places, cut)
    if len(left) < excess:
        beside = f", {given - len(places)} of them beside the {limits.mode}"
        raise _too_long(given, beside, limits)
    return np.concatenate([cut, _take_end(left, excess, limits.side)])


def _take_end(places: NDArray[np.intp], count: int, side: str) -> NDArray[np.intp]:
    if count <= 0:
        return places[:0]
    return places[len(places) - count :] if side == TruncationSide.RIGHT else places[:count]


def _too_long(given: int, beside: str, limits: Limits) -> InputTooLongError:
    message = f"{given} tokens{beside}; the {limits.whose}'s limit is {limits.total}"
    return InputTooLongError(message)


def check_input_ids(request: ScoreRequest, width: int) -> None:
    """Raise ``InvalidRequestError`` for a query id that the embedding table does not have."""
    for index, token in enumerate(request.query if isinstance(request.query, list) else []):
        if token >= width:
            message = f"token id {token} is outside the model's {width} input embeddings"
            raise InvalidRequestError(message, param=f"query[{index}]")
