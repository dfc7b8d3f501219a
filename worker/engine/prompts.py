"""Query and item become token ids: the only place for joining, special tokens and truncation.

Text is joined without a separator and tokenised as one string, so that ids are those of the plain
text; pair models encode query and item as a pair. Only query and item tokens are ever cut.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import InputTooLongError, InvalidRequestError
from contract.scores import ScoreRequest, TokenCounts, Truncation
from worker.engine.foreign import Encoding, Tokenizer
from worker.engine.seam import Ids
from worker.engine.templates import Rendered, Span, Template

__all__ = ["Encoded", "Prompter", "check_input_ids"]

Parts = NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One sequence's ids. ``parts`` tells for each token: 0 query, 1 item, -1 neither."""

    ids: Ids
    types: Ids | None
    parts: Parts | None = None


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

    def render(self, request: ScoreRequest) -> list[Rendered]:
        """Return the text of every text item together with the query."""
        query = request.query if isinstance(request.query, str) else ""
        return [
            self._arrange(query, item, item_first=request.item_first)
            for item in request.item_list
            if isinstance(item, str)
        ]

    def encode(self, request: ScoreRequest, rendered: list[Rendered]) -> list[Encoded]:
        """Return the ids of every item together with the query, before any truncation."""
        if rendered:
            return self._encode_texts(rendered, item_first=request.item_first)
        given = request.query if isinstance(request.query, list) else []
        return [
            _concatenate(given, item, item_first=request.item_first)
            for item in request.item_list
            if isinstance(item, list)
        ]

    def encode_prefix(self, request: ScoreRequest, rendered: list[Rendered]) -> Ids:
        """Return the ids that the sequences may begin with: what comes before the item."""
        if not rendered:
            return np.array(request.query or [], np.int32)
        return self._encode_open(rendered[0].shared)

    def count_context(self, request: ScoreRequest, rendered: list[Rendered]) -> int:
        """Return how many tokens are the query's, where each item's own likelihood is read.

        As lm-evaluation-harness splits: white space at the query's end belongs to the item.
        """
        if not rendered:
            return len(request.query or [])
        return len(self._encode_open(rendered[0].shared.rstrip()))

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

    def truncate(self, encoded: Encoded, mode: Truncation) -> tuple[Encoded, TokenCounts]:
        """Cut what ``mode`` allows until the limit holds.

        Raises ``InputTooLongError`` with both numbers where it cannot.
        """
        given = len(encoded.ids)
        excess = given - self.max_tokens
        if excess <= 0:
            return encoded, TokenCounts(given, given, 0)
        if mode == Truncation.ERROR or encoded.parts is None:
            raise self._too_long(given, "")
        wanted = 1 if mode == Truncation.ITEM else 0
        places = np.flatnonzero(encoded.parts == wanted)
        if len(places) < excess:
            raise self._too_long(given, f", {given - len(places)} of them beside the {mode}")
        cut = places[len(places) - excess :] if self.truncation_side == "right" else places[:excess]
        kept = np.delete(encoded.ids, cut)
        types = None if encoded.types is None else np.delete(encoded.types, cut)
        return Encoded(kept, types), TokenCounts(given, len(kept), excess)

    def _too_long(self, given: int, beside: str) -> InputTooLongError:
        message = f"{given} tokens{beside}; the model's limit is {self.max_tokens}"
        return InputTooLongError(message)

    def _arrange(self, query: str, item: str, *, item_first: bool) -> Rendered:
        if self.template is not None:
            return self.template.render(query, item)
        first, second = (item, query) if item_first else (query, item)
        if self.pair and query:
            return Rendered(first, (), pair=second)
        middle, end = len(first), len(first) + len(second)
        parts = (Span(0, middle, int(item_first)), Span(middle, end, int(not item_first)))
        return Rendered(first + second, parts)

    def _encode_texts(self, rendered: list[Rendered], *, item_first: bool) -> list[Encoded]:
        inputs = [one.text if one.pair is None else (one.text, one.pair) for one in rendered]
        found = self._backend.encode_batch(inputs, add_special_tokens=True)
        return [
            self._finish(encoding, one, item_first=item_first)
            for encoding, one in zip(found, rendered, strict=True)
        ]

    def _finish(self, encoding: Encoding, rendered: Rendered, *, item_first: bool) -> Encoded:
        ids = np.array(encoding.ids, np.int32)
        types = np.array(encoding.type_ids, np.int32) if self._takes_types else None
        if self.template is not None and encoding.special_tokens_mask[-1]:
            # a closing token would stand behind the template's last words
            ids, types = ids[:-1], None if types is None else types[:-1]
        kept = self._drop_double(ids)
        dropped = len(ids) - len(kept)
        types = None if types is None else types[dropped:]
        if len(kept) <= self.max_tokens:
            return Encoded(kept, types)
        parts = _find_parts(encoding, rendered, item_first=item_first)
        return Encoded(kept, types, parts[dropped : dropped + len(kept)])

    def _drop_double(self, ids: Ids) -> Ids:
        """A text or template that already begins with BOS gets no second one."""
        begin = self.tokenizer.bos_token_id
        doubled = begin is not None and len(ids) > 1 and ids[0] == begin and ids[1] == begin
        return ids[1:] if doubled else ids


def _find_parts(encoding: Encoding, rendered: Rendered, *, item_first: bool) -> Parts:
    """Tell each token's part; one that reaches over a part's edge belongs to neither."""
    if rendered.pair is not None:
        sides = [-1 if side is None else side for side in encoding.sequence_ids]
        return np.array([1 - side if item_first and side >= 0 else side for side in sides], np.int8)
    offsets = np.array(encoding.offsets)
    parts = np.full(len(offsets), -1, np.int8)
    for span in rendered.spans:
        inside = (offsets[:, 0] >= span.begin) & (offsets[:, 1] <= span.end)
        parts[inside & (offsets[:, 0] < offsets[:, 1])] = span.part
    parts[np.array(encoding.special_tokens_mask, bool)] = -1
    return parts


def _concatenate(query: list[int], item: list[int], *, item_first: bool) -> Encoded:
    first, second = (item, query) if item_first else (query, item)
    parts = np.array([int(item_first)] * len(first) + [int(not item_first)] * len(second), np.int8)
    return Encoded(np.array([*first, *second], np.int32), None, parts)


def check_input_ids(request: ScoreRequest, width: int) -> None:
    """Raise ``InvalidRequestError`` for a query id that the embedding table does not have."""
    for index, token in enumerate(request.query if isinstance(request.query, list) else []):
        if token >= width:
            message = f"token id {token} is outside the model's {width} input embeddings"
            raise InvalidRequestError(message, param=f"query[{index}]")
