"""Text labels become token ids: the only place that holds them to one token each.

A label is read where the prompt ends, so what counts is how prompt and label tokenise together.
"""

from contract.errors import InvalidRequestError
from contract.scores import ScoreRequest
from worker.engine.prompts import Prompter
from worker.engine.templates import Rendered

__all__ = ["name_labels", "resolve_labels"]

#: how much of a prompt's end decides how a label behind it is tokenised, in characters
_TAIL = 160


def name_labels(request: ScoreRequest) -> list[str | int | list[int]]:
    """Return the labels as the result names its columns; empty for classification."""
    if request.labels is not None:
        return list(request.labels)
    return list(request.label_token_ids or [])


def resolve_labels(
    request: ScoreRequest, prompter: Prompter, rendered: list[Rendered]
) -> list[tuple[int, ...]]:
    """Return every item's label token ids.

    Raises ``InvalidRequestError`` that names the first label that is not exactly one token.
    """
    items = request.item_list
    if request.labels is not None:
        return _resolve_texts(request, prompter, rendered)
    ids = request.label_token_ids or []
    if ids and isinstance(ids[0], list):
        return [tuple(entry) for entry in ids if isinstance(entry, list)]
    return [tuple(entry for entry in ids if isinstance(entry, int))] * len(items)


def _resolve_texts(
    request: ScoreRequest, prompter: Prompter, rendered: list[Rendered]
) -> list[tuple[int, ...]]:
    labels = request.labels or []
    tails = [_cut_tail(one.text) for one in rendered] or [""] * len(request.item_list)
    distinct = list(dict.fromkeys(tails))
    plain = prompter.encode_alone(distinct)
    joined = prompter.encode_alone([tail + label for tail in distinct for label in labels])
    found: dict[str, tuple[int, ...]] = {}
    for row, tail in enumerate(distinct):
        ids = []
        for column, label in enumerate(labels):
            whole = joined[row * len(labels) + column]
            ids.append(_pick(plain[row], whole, label, column))
        found[tail] = tuple(ids)
    return [found[tail] for tail in tails]


def _pick(prompt: list[int], whole: list[int], label: str, column: int) -> int:
    if len(whole) == len(prompt) + 1 and whole[: len(prompt)] == prompt:
        return whole[-1]
    if whole[: len(prompt)] == prompt:
        problem = f"is {len(whole) - len(prompt)} tokens where it is read"
    else:
        problem = "merges with the end of the prompt: move the space from one to the other"
    message = f"label {label!r} must be exactly one token; it {problem}"
    raise InvalidRequestError(message, param=f"labels[{column}]")


def _cut_tail(text: str) -> str:
    if len(text) <= _TAIL:
        return text
    tail = text[-_TAIL:]
    space = tail.find(" ")
    return tail[space:] if space >= 0 else tail
