"""Classify as vLLM answers it, and predict as TEI does."""

from typing import Any

from api.compatible.forms import (
    Answered,
    Parsed,
    choose_activation,
    choose_lane,
    choose_truncation,
    choose_user,
    count_tokens,
    parse_form,
)
from contract.compatible import (
    Classification,
    ClassifyAnswer,
    ClassifyRequest,
    Prediction,
    PredictRequest,
)
from contract.errors import InvalidRequestError
from contract.scores import Activation, ScoreRequest

__all__ = ["parse_classify", "parse_predict", "render_classify", "render_predict"]


def parse_classify(body: bytes) -> Parsed:
    """Read vLLM's body; the classes' numbers are the checkpoint's own unless told otherwise."""
    wanted = parse_form(body, ClassifyRequest)
    request = ScoreRequest(
        items=wanted.input if isinstance(wanted.input, str) else list(wanted.input),
        model=wanted.model,
        activation=choose_activation(wanted.use_activation),
        **choose_truncation(wanted.truncate_prompt_tokens, wanted.truncation_side),
    )
    return Parsed(request, {}, choose_lane(wanted.priority), choose_user(wanted.user))


def render_classify(answered: Answered) -> ClassifyAnswer:
    """Answer with the likeliest label of every input, and all its numbers."""
    data = []
    for index, row in enumerate(answered.scores):
        label = (
            None
            if row is None
            else _name(answered.labels, max(range(len(row)), key=row.__getitem__))
        )
        count = len(answered.labels) if row is None else len(row)
        data.append(Classification(index=index, label=label, probs=row, num_classes=count))
    return ClassifyAnswer(
        id=answered.id,
        created=answered.created,
        model=answered.model,
        data=data,
        usage=count_tokens(answered.usage),
        errors=answered.errors,
    )


def parse_predict(body: bytes) -> Parsed:
    """Read TEI's body, or Hugging Face's, which is TEI's with ``parameters``."""
    wanted = parse_form(body, PredictRequest)
    inputs, single = _read_inputs(wanted.inputs)
    parameters = wanted.parameters
    activation = choose_activation(not wanted.raw_scores)
    form: dict[str, Any] = {"single": single and parameters is None}
    if parameters is not None and parameters.function_to_apply is not None:
        activation = Activation(parameters.function_to_apply)
    if parameters is not None and parameters.top_k is not None:
        form["top_k"] = parameters.top_k
    sides: dict[str, Any] = {}
    queries = [each[0] if len(each) == 2 else "" for each in inputs]
    if any(queries):
        sides = {"query": queries[0]} if len(set(queries)) == 1 else {"queries": queries}
    request = ScoreRequest(
        items=[each[-1] for each in inputs],
        model=wanted.model,
        activation=activation,
        **sides,
        **choose_truncation(None, wanted.truncation_direction, cut=bool(wanted.truncate)),
    )
    return Parsed(request, form)


def render_predict(answered: Answered) -> list[Prediction] | list[list[Prediction]]:
    """Answer with the classes of every input, the likeliest first."""
    rows = [_predict(row or [], answered) for row in answered.scores]
    return rows[0] if answered.form["single"] else rows


def _predict(row: list[float], answered: Answered) -> list[Prediction]:
    found = [
        Prediction(score, str(_name(answered.labels, index))) for index, score in enumerate(row)
    ]
    found.sort(key=lambda each: -each.score)
    return found[: answered.form.get("top_k")]


def _name(labels: list[Any], index: int) -> Any:  # noqa: ANN401  # a name, or token ids
    return labels[index] if index < len(labels) else index


def _read_inputs(inputs: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """Return the inputs, each of one text or two, and whether there was a single one.

    As TEI reads them: a flat list is one input, of one text or a pair.
    """
    if isinstance(inputs, str):
        return [[inputs]], True
    flat = [one for one in inputs if isinstance(one, str)]
    if flat and len(flat) == len(inputs):
        if len(flat) > 2:
            message = (
                'a list of texts is one input: a text or a pair; write [["a"], ["b"], ["c"]] '
                "for several inputs"
            )
            raise InvalidRequestError(message, param="inputs")
        return [flat], True
    nested = [one for one in inputs if isinstance(one, list)]
    if flat:
        message = "inputs mixes texts with lists; write every input as a list"
        raise InvalidRequestError(message, param="inputs")
    for index, one in enumerate(nested):
        if len(one) not in {1, 2}:
            message = "an input is a list of one text, or of two"
            raise InvalidRequestError(message, param=f"inputs[{index}]")
    return nested, False
