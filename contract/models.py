"""What is served: the registry's entries, what a loaded model says of itself, and what it refuses.

``check_request`` is the only place where a request is held against a model; the API calls it at
submission when the model is loaded somewhere, the worker always.
"""

import tomllib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from contract.errors import InvalidRequestError, SettingsError
from contract.scores import Activation, Determinism, Mode, ScoreRequest, Truncation

__all__ = [
    "CANARY_DRIFT",
    "ModelConfig",
    "ModelDescription",
    "ModelState",
    "ModelStatus",
    "ScoringPath",
    "check_request",
    "list_refusals",
    "parse_models",
    "settle_activation",
]


#: The first word of the reason of a model whose fixed inputs no longer give what they gave.
CANARY_DRIFT = "canary_drift"


class ScoringPath(StrEnum):
    """Which of the two ways a model scores."""

    CLASSIFICATION = "classification"  #: a head over the pooled hidden state
    CAUSAL = "causal"  #: next-token probabilities of label tokens


class ModelState(StrEnum):
    """Where a model stands on a worker."""

    LOADING = "loading"  #: being read; jobs wait
    READY = "ready"  #: takes jobs
    FAILED = "failed"  #: cannot be served; ``reason`` says why


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One ``[models.NAME]`` table of ``scorekeep.toml``.

    ``template`` holds ``{query}``, ``{item}`` and ``{instruction}``, or names a preset or ``none``.
    """

    source: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_tokens: Annotated[int, msgspec.Meta(gt=0)] | None = None
    path: ScoringPath | None = None
    pair: bool | None = None
    template: str | None = None
    chat_template: bool = False
    instruction: str | None = None
    truncation_side: str = "right"
    adapter: str | None = None
    quantization: str | None = None
    device_map: str | None = None
    tp_plan: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model can do. ``refusals`` maps what it cannot do to the reason.

    ``instruction`` is the task that it is told where a request brings none; null: it takes none.
    """

    name: str
    path: ScoringPath
    architecture: str
    labels: list[str] = []
    label_count: int = 0
    vocabulary: int = 0
    hidden_size: int
    max_tokens: int
    dtype: str
    device: str
    attention: str = ""
    pooling: str = ""
    head: str = ""
    pair: bool = False
    instruction: str | None = None
    default_activation: Activation | None = None
    hidden_states: str = ""
    #: hash of all that decides a score but the request: equal ones give comparable scores
    fingerprint: str = ""
    refusals: dict[str, str] = {}


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one worker, or summed over the workers."""

    name: str
    state: ModelState
    reason: str | None = None
    description: ModelDescription | None = None


def parse_models(path: Path) -> dict[str, ModelConfig]:
    """Read a registry file. Relative sources that exist beside the file are made absolute.

    Raises ``SettingsError`` with the file and the field at fault.
    """
    try:
        raw = tomllib.loads(path.read_text())
        tables = msgspec.convert(raw, _Registry).models
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        message = f"{path}: {error}"
        raise SettingsError(message) from error
    if not tables:
        message = f'{path}: no [models.NAME] table; add one with source = "path or hub id"'
        raise SettingsError(message)
    return {name: _resolve(config, path.parent) for name, config in tables.items()}


def check_request(request: ScoreRequest, model: ModelDescription) -> list[str]:
    """Raise ``InvalidRequestError`` for what this model cannot do; return the warnings."""
    if request.determinism is not None and model.dtype != "float32":
        message = (
            f"strict determinism needs float32, and {model.name} runs in {model.dtype}; "
            'set dtype = "float32" in its registry entry'
        )
        raise InvalidRequestError(message, param="determinism")
    if request.instruction is not None:
        _check_instruction(request, model)
    if model.path is ScoringPath.CAUSAL:
        return _check_causal(request, model)
    return _check_classification(request, model)


def settle_activation(request: ScoreRequest, model: ModelDescription) -> ScoreRequest:
    """Return the request with activation ``model`` resolved for a causal model.

    Softmax over the labels; of one label it would be the constant 1.0, so that one keeps its
    probability. Classifiers resolve theirs where logits become scores.
    """
    if model.path is not ScoringPath.CAUSAL or request.activation is not Activation.MODEL:
        return request
    ids = request.label_token_ids or []
    nested = [len(entry) for entry in ids if isinstance(entry, list)]
    count = min(nested, default=len(request.labels or ids))
    return msgspec.structs.replace(request, activation=None, apply_softmax=count > 1)


#: what a request may ask for beside items, as the smallest request that asks for it
_WISHES: dict[str, ScoreRequest] = {
    "label_token_ids": ScoreRequest(items=["x"], label_token_ids=[0]),
    "multi_token": ScoreRequest(items=["x"], labels=["x"], multi_token=True),
    "loglikelihood": ScoreRequest(query="x", items=["x"], mode=Mode.LOGLIKELIHOOD),
    "return_token_logprobs": ScoreRequest(
        items=["x"], label_token_ids=[0], return_token_logprobs=True
    ),
    "activation": ScoreRequest(items=["x"], label_token_ids=[0], activation=Activation.SIGMOID),
    "apply_softmax": ScoreRequest(items=["x"], label_token_ids=[0], apply_softmax=True),
    "instruction": ScoreRequest(items=["x"], label_token_ids=[0], instruction="x"),
    "item_first": ScoreRequest(items=["x"], label_token_ids=[0], item_first=True),
    "determinism": ScoreRequest(items=["x"], label_token_ids=[0], determinism=Determinism.STRICT),
}


def list_refusals(check: Callable[[ScoreRequest], list[str]]) -> dict[str, str]:
    """Return why each thing that a request may ask for is refused or ignored, by its name.

    ``check`` raises or warns as it would for a request: found out by asking, not listed twice.
    """
    found: dict[str, str] = {}
    for name, wish in _WISHES.items():
        try:
            warnings = check(wish)
        except InvalidRequestError as error:
            found[name] = error.message
        else:
            ignored = [text for text in warnings if name in text.split()]
            if ignored:
                found[name] = ignored[0]
    return found


class _Registry(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, ModelConfig] = {}


def _resolve(config: ModelConfig, folder: Path) -> ModelConfig:
    local = (folder / config.source).expanduser()
    if local.exists():
        return msgspec.structs.replace(config, source=str(local.resolve()))
    return config


def _check_instruction(request: ScoreRequest, model: ModelDescription) -> None:
    if model.instruction is None:
        message = (
            f"{model.name} takes no instruction: its template has no place for one; serve it with "
            "a template that holds {instruction}, or write the task into the query"
        )
        raise InvalidRequestError(message, param="instruction")
    if any(isinstance(item, list) for item in request.item_list):
        message = "an instruction is for text: token ids are used as they are"
        raise InvalidRequestError(message, param="instruction")


def _check_likelihood(request: ScoreRequest) -> list[str]:
    """Loglikelihood reads the items themselves: nothing else can be read or cut."""
    refused = {
        "label_token_ids": request.label_token_ids is not None,
        "labels": request.labels is not None,
        "multi_token": request.multi_token,
        "apply_softmax": request.apply_softmax,
        "item_first": request.item_first,
        "return_token_logprobs": request.return_token_logprobs,
        "truncation": request.truncation == Truncation.ITEM,
    }
    for param, given in refused.items():
        if given:
            message = f"{param} has no place in mode loglikelihood: the items themselves are read"
            raise InvalidRequestError(message, param=param)
    return []


def _check_causal(request: ScoreRequest, model: ModelDescription) -> list[str]:
    if request.mode == Mode.LOGLIKELIHOOD:
        return _check_likelihood(request)
    if request.multi_token and (request.labels is None or request.return_token_logprobs):
        message = "multi_token is for text labels, and yields their summed logprobs"
        raise InvalidRequestError(message, param="multi_token")
    if request.label_token_ids is None and request.labels is None and not model.labels:
        message = f"{model.name} is a causal model: give label_token_ids or labels to be scored"
        raise InvalidRequestError(message, param="label_token_ids")
    if request.activation not in {None, Activation.MODEL}:
        message = "activation is for classification models, but for model; use apply_softmax"
        raise InvalidRequestError(message, param="activation")
    for index, entry in enumerate(request.label_token_ids or []):
        nested = entry if isinstance(entry, list) else [entry]
        for position, token_id in enumerate(nested):
            if token_id >= model.vocabulary:
                where = f"[{index}][{position}]" if isinstance(entry, list) else f"[{index}]"
                message = (
                    f"label token id {token_id} is outside the model's {model.vocabulary} logits"
                )
                raise InvalidRequestError(message, param=f"label_token_ids{where}")
    return []


def _check_classification(request: ScoreRequest, model: ModelDescription) -> list[str]:
    for param, given in (
        ("mode", request.mode != Mode.LABELS),
        ("multi_token", request.multi_token),
    ):
        if given:
            message = f"{model.name} is a classification model: {param} is for causal models"
            raise InvalidRequestError(message, param=param)
    if request.return_token_logprobs:
        message = f"{model.name} is a classification model: it has no token logprobs"
        raise InvalidRequestError(message, param="return_token_logprobs")
    softmax = request.activation is Activation.SOFTMAX or (
        request.activation is None and request.apply_softmax
    )
    if softmax and model.label_count == 1:
        message = (
            f"softmax of {model.name}'s one label is the constant 1.0; "
            'use activation "sigmoid", or none for the raw logit'
        )
        raise InvalidRequestError(
            message, param="activation" if request.activation else "apply_softmax"
        )
    if request.label_token_ids is not None or request.labels is not None:
        return [f"label_token_ids are ignored: {model.name} is a classification model"]
    return []
