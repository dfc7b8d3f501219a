"""Text labels become token ids: the only place that holds them to one token each.

A label is read where the prompt ends, so what counts is how prompt and label tokenise together.
"""

import numpy as np

from contract.errors import InvalidRequestError
from contract.scores import Mode, ScoreRequest
from worker.engine.prompts import Prompter
from worker.engine.seam import Budget, Ids
from worker.engine.templates import Rendered

__all__ = ["LabelReader", "name_labels"]

#: how much of a prompt's end decides how a label behind it is tokenised, in characters
_TAIL = 160
#: how many labels are tokenised behind their prompts at a time
_CHUNK_LABELS = 1 << 13


def name_labels(request: ScoreRequest) -> list[str | int | list[int]]:
    """Return the labels as the result names its columns."""
    if request.mode == Mode.LOGLIKELIHOOD:
        return [str(Mode.LOGLIKELIHOOD)]
    if request.labels is not None:
        return list(request.labels)
    return list(request.label_token_ids or [])


class LabelReader:
    """Finds the ids of a request's labels behind prompts; each distinct ending is read once."""

    def __init__(self, request: ScoreRequest, prompter: Prompter, budget: Budget) -> None:
        self._budget = budget
        self._labels = request.labels or []
        self._prompter = prompter
        self._pick = _pick_all if request.multi_token else _pick_one
        self._found: dict[str, tuple[Ids, ...]] = {}
        self._alone: dict[str, list[int]] = {}

    def read_long(self, count: int, rendered: list[Rendered]) -> list[tuple[Ids, ...]]:
        """Return the labels of ``count`` items as the tokens that follow each item's prompt.

        Raises ``InvalidRequestError`` that names a label without a token of its own, or, unless
        the request is for labels of several tokens, one that is not exactly one.
        """
        tails = [_cut_tail(one.text) for one in rendered] or [""] * count
        keys = [self._shorten(tail) for tail in tails]
        new = [key for key in dict.fromkeys(keys) if key not in self._found]
        rows = max(1, _CHUNK_LABELS // max(1, len(self._labels)))
        for begin in range(0, len(new), rows):
            self._budget.check()
            self._resolve(new[begin : begin + rows])
        return [self._found[key] for key in keys]

    def read_labels(self, request: ScoreRequest, rendered: list[Rendered]) -> list[tuple[int, ...]]:
        """Return the label token ids of every item of ``request``. Raises as above."""
        items = request.item_list
        if request.labels is not None:
            own: dict[int, tuple[int, ...]] = {}
            branches = self.read_long(len(items), rendered)
            for row in branches:
                if id(row) not in own:
                    own[id(row)] = tuple(int(ids[0]) for ids in row)
            return [own[id(row)] for row in branches]
        ids = request.label_token_ids or []
        if ids and isinstance(ids[0], list):
            return [tuple(entry) for entry in ids if isinstance(entry, list)]
        return [tuple(entry for entry in ids if isinstance(entry, int))] * len(items)

    def _shorten(self, tail: str) -> str:
        """Leave of a prompt's end what decides about the labels behind it."""
        rules = self._prompter.rules
        if all(rules.is_edge(tail, label) for label in self._labels):
            return tail[-1:]
        return tail[rules.find_cut(tail, 0, len(tail)) :]

    def _resolve(self, tails: list[str]) -> None:
        edges = [[self._prompter.rules.is_edge(t, label) for label in self._labels] for t in tails]
        labels = {
            label for own in edges for label, edge in zip(self._labels, own, strict=True) if edge
        }
        self._read_alone(sorted(labels - self._alone.keys()))
        joined = iter(
            self._prompter.encode_alone(
                [
                    tail + label
                    for tail, own in zip(tails, edges, strict=True)
                    for label, edge in zip(self._labels, own, strict=True)
                    if not edge
                ]
            )
        )
        plain = self._prompter.encode_alone(tails)
        for tail, prompt, own in zip(tails, plain, edges, strict=True):
            found = []
            for column, (label, edge) in enumerate(zip(self._labels, own, strict=True)):
                whole = [*prompt, *self._alone[label]] if edge else next(joined)
                try:
                    found.append(self._pick(prompt, whole, label))
                except ValueError as error:
                    message = f"label {label!r} {error}"
                    raise InvalidRequestError(message, param=f"labels[{column}]") from error
            self._found[tail] = tuple(found)

    def _read_alone(self, labels: list[str]) -> None:
        """Tokenise labels that no prompt's end can change."""
        found = self._prompter.encode_alone(labels)
        self._alone.update(zip(labels, found, strict=True))


def _pick_all(prompt: list[int], whole: list[int], label: str) -> Ids:
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        problem = "merges with the end of the prompt" if label else "is empty"
        message = f"{problem}: move the space between them from one to the other"
        raise ValueError(message)
    return np.array(whole[len(prompt) :], np.int32)


def _pick_one(prompt: list[int], whole: list[int], label: str) -> Ids:
    ids = _pick_all(prompt, whole, label)
    if len(ids) != 1:
        message = f"must be exactly one token, and is {len(ids)} tokens where it is read"
        raise ValueError(message)
    return ids


def _cut_tail(text: str) -> str:
    if len(text) <= _TAIL:
        return text
    tail = text[-_TAIL:]
    space = tail.find(" ")
    return tail[space:] if space >= 0 else tail
