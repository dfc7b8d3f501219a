"""Text labels become token ids: the only place that holds them to one token each.

A label is read where the prompt ends, so what counts is how prompt and label tokenise together.
"""

from collections.abc import Callable

import numpy as np

from contract.errors import InvalidRequestError
from contract.scores import Mode, ScoreRequest
from worker.engine.prompts import Prompter
from worker.engine.seam import Ids
from worker.engine.templates import Rendered

__all__ = ["name_labels", "resolve_branches", "resolve_labels"]

#: how much of a prompt's end decides how a label behind it is tokenised, in characters
_TAIL = 160


def name_labels(request: ScoreRequest) -> list[str | int | list[int]]:
    """Return the labels as the result names its columns."""
    if request.mode == Mode.LOGLIKELIHOOD:
        return [str(Mode.LOGLIKELIHOOD)]
    if request.labels is not None:
        return list(request.labels)
    return list(request.label_token_ids or [])


def resolve_branches(
    request: ScoreRequest, prompter: Prompter, rendered: list[Rendered]
) -> list[tuple[Ids, ...]]:
    """Return every item's labels as the tokens that follow its prompt, one or more each.

    Raises ``InvalidRequestError`` that names a label without a token of its own.
    """
    return _resolve(request, prompter, rendered, _pick_all)


def resolve_labels(
    request: ScoreRequest, prompter: Prompter, rendered: list[Rendered]
) -> list[tuple[int, ...]]:
    """Return every item's label token ids.

    Raises ``InvalidRequestError`` that names the first label that is not exactly one token.
    """
    items = request.item_list
    if request.labels is not None:
        found = _resolve(request, prompter, rendered, _pick_one)
        return [tuple(int(ids[0]) for ids in own) for own in found]
    ids = request.label_token_ids or []
    if ids and isinstance(ids[0], list):
        return [tuple(entry) for entry in ids if isinstance(entry, list)]
    return [tuple(entry for entry in ids if isinstance(entry, int))] * len(items)


Pick = Callable[[list[int], list[int], str], Ids]


def _resolve(
    request: ScoreRequest, prompter: Prompter, rendered: list[Rendered], pick: Pick
) -> list[tuple[Ids, ...]]:
    """Tokenise every label behind every distinct prompt's end."""
    labels = request.labels or []
    tails = [_cut_tail(one.text) for one in rendered] or [""] * len(request.item_list)
    distinct = list(dict.fromkeys(tails))
    plain = prompter.encode_alone(distinct)
    joined = iter(prompter.encode_alone([tail + label for tail in distinct for label in labels]))
    found: dict[str, tuple[Ids, ...]] = {}
    for tail, prompt in zip(distinct, plain, strict=True):
        own = []
        for column, label in enumerate(labels):
            try:
                own.append(pick(prompt, next(joined), label))
            except ValueError as error:
                message = f"label {label!r} {error}"
                raise InvalidRequestError(message, param=f"labels[{column}]") from error
        found[tail] = tuple(own)
    return [found[tail] for tail in tails]


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
