"""What produced a result: equal receipts mean comparable scores. The only place that lists it."""

import hashlib
from typing import Any

import msgspec
import torch
import transformers

from contract.models import ModelConfig, ModelDescription, ScoringPath
from contract.scores import Mode, ScoreRequest
from worker.engine.prompts import Prompter
from worker.engine.registry import Checkpoint
from worker.engine.results import choose_activation, describe_instruction
from worker.engine.templates import Template

__all__ = ["describe_model", "make_receipt"]


def describe_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    model: ModelDescription,
    prompter: Prompter,
    linear: str,
) -> dict[str, Any]:
    """Return the part of the receipt that is the same for every job of a model."""
    template = prompter.template
    receipt = {
        "model": model.name,
        "source": config.source,
        "revision": config.revision,
        "weights": checkpoint.fingerprint,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "device": model.device,
        "attention": model.attention,
        "linear": linear,
        "tokenizer": _hash(prompter.tokenizer.backend_tokenizer.to_str()),
        "template": None if template is None else template.name,
        "template_hash": None if template is None else _hash(_join(template)),
        "path": str(model.path),
        "pooling": model.pooling,
        "head": model.head,
        "pair": model.pair,
        "max_tokens": model.max_tokens,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    # The configuration too: what it says of adapters, say, is not listed one by one.
    config_json = msgspec.json.encode(config, order="sorted").decode()
    told = model.instruction or ""  # a preset's own is not in the configuration
    return receipt | {"fingerprint": _hash(repr(sorted(receipt.items())) + config_json + told)}


def make_receipt(
    base: dict[str, Any],
    request: ScoreRequest,
    model: ModelDescription,
    labels: list[str | int | list[int]],
) -> dict[str, Any]:
    """Return the receipt of one job: the model's part and what the request chose."""
    if request.multi_token or request.mode == Mode.LOGLIKELIHOOD:
        activation = "label_softmax" if request.apply_softmax else "summed_logprobs"
    elif model.path is ScoringPath.CLASSIFICATION:
        activation = str(choose_activation(request, model))
    else:
        activation = "label_softmax" if request.apply_softmax else "vocabulary_softmax"
    return (
        base
        | describe_instruction(request, model)
        | {
            "activation": activation,
            "temperature": request.temperature,
            "labels": labels,
            "item_first": request.item_first,
            "truncation": str(request.truncation),
            "determinism": None if request.determinism is None else str(request.determinism),
        }
    )


def _join(template: Template) -> str:
    """Return a template's words, and those that it has around an instruction."""
    return "".join(template.pieces) + "\0".join(("", *template.instructed))


def _hash(text: str | None) -> str | None:
    return None if text is None else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
