"""From a registry entry to a scorer: what a checkpoint is taken for, and its tokenizer."""

import logging
import os
import re
from pathlib import Path

import msgspec
import torch
import transformers
from torch import nn

from contract.errors import ModelLoadError
from contract.models import (
    ModelConfig,
    ModelDescription,
    ScoringPath,
    check_request,
    list_refusals,
)
from contract.scores import Activation
from worker.engine import packing
from worker.engine.activations import read_default_activation
from worker.engine.adapters import check_libraries
from worker.engine.canary import Canary, find_record
from worker.engine.capabilities import Examined, examine
from worker.engine.deterministic import SOURCE, DeterministicScorer
from worker.engine.foreign import FAULTS, Model, Tokenizer, explain
from worker.engine.pooling import Pooling
from worker.engine.prompts import Prompter
from worker.engine.receipt import describe_model
from worker.engine.registry import (
    REWARD_ARCHITECTURES,
    Checkpoint,
    choose_device,
    choose_dtype,
    find_checkpoint,
)
from worker.engine.scorer import ModelScorer, check_template
from worker.engine.seam import Scorer
from worker.engine.templates import Template, find_template
from worker.engine.weights import load_weights

__all__ = ["load_model", "set_up_threads"]

_DEFAULT_LIMIT = 512


def set_up_threads(count: int | None = None) -> int:
    """Set how many threads torch computes with, once per process; return the number.

    None takes the cores that this process may run on.
    """
    wanted = len(os.sched_getaffinity(0)) if count is None else count
    torch.set_num_threads(wanted)
    return wanted


def load_model(name: str, config: ModelConfig, canaries: Path | None = None) -> Scorer:
    """Return the scorer of one registry entry, ready on its device.

    With the folder ``canaries``, what its fixed inputs give is recorded there at the first load
    and held against the record at every other. Raises ``ModelLoadError`` that says what is wrong
    with the checkpoint or the entry, or that the numbers have drifted.
    """
    if config.source == SOURCE:
        return DeterministicScorer(name, config)
    packing.register()
    check_libraries(name, config)
    checkpoint = find_checkpoint(name, config)
    device = choose_device(name, config)
    dtype = choose_dtype(name, config, checkpoint.raw, device.type)
    path = config.path or _guess_path(checkpoint)
    with _quiet_transformers():
        tokenizer = _load_tokenizer(checkpoint, config)
        names = (config.source, checkpoint.folder.name, str(checkpoint.raw.get("_name_or_path")))
        template = find_template(name, config, tokenizer, names)
        model = load_weights(checkpoint, config, path, dtype, device)
    max_tokens = _choose_limit(name, config, model, tokenizer)
    model.eval().requires_grad_(requires_grad=False)
    width = model.get_input_embeddings().num_embeddings
    causal = path is ScoringPath.CAUSAL
    record = None
    if canaries is not None:
        record = find_record(canaries, checkpoint.fingerprint, name, config)
    examined = examine(
        model,
        causal=causal,
        max_tokens=max_tokens,
        with_reference=record is not None and not record.exists(),
    )
    description = _describe(name, config, model, examined, template, path, max_tokens)
    prompter = Prompter(
        tokenizer,
        pair=description.pair,
        max_tokens=max_tokens,
        truncation_side=config.truncation_side,
        template=template,
    )
    description = _add_refusals(description, template)
    receipt = describe_model(checkpoint, config, description, prompter, examined.linear)
    description = msgspec.structs.replace(description, fingerprint=receipt["fingerprint"])
    canary = Canary.of(examined, checkpoint.fingerprint)
    if record is not None:
        canary = canary.remember(record)
    scorer = ModelScorer(
        examined.network, prompter, description, receipt, width=width, canary=canary
    )
    if record is not None:
        _check_canary(scorer)
    return scorer


def _check_canary(scorer: ModelScorer) -> None:
    result = scorer.check_canary()
    if not result.passed:
        raise ModelLoadError(result.explain())


class _quiet_transformers:  # noqa: N801  # a context manager that reads as a verb
    """Keep transformers' progress bars and its advice about missing weights off the log."""

    def __enter__(self) -> None:
        self._level = transformers.logging.get_verbosity()
        self._bars = transformers.utils.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity(logging.ERROR)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        transformers.logging.set_verbosity(self._level)
        if self._bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _guess_path(checkpoint: Checkpoint) -> ScoringPath:
    causal = re.search(r"ForCausalLM$|LMHeadModel$", checkpoint.architecture)
    return ScoringPath.CAUSAL if causal else ScoringPath.CLASSIFICATION


def _load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, trust_remote_code=config.trust_remote_code
        )
    except FAULTS as error:
        message = (
            f"{checkpoint.name}: {checkpoint.folder} has no usable tokenizer: {explain(error)}"
        )
        raise ModelLoadError(message) from error
    if not tokenizer.is_fast:
        message = (
            f"{checkpoint.name}: {type(tokenizer).__name__} is not a fast tokenizer; save the "
            "checkpoint with its tokenizer.json"
        )
        raise ModelLoadError(message)
    return tokenizer


def _choose_limit(name: str, config: ModelConfig, model: Model, tokenizer: Tokenizer) -> int:
    """Return the most tokens of a sequence: the entry's, at most what the model can.

    A learned position table that is indexed from ``padding_idx + 1`` has that many fewer.
    """
    limits = []
    text = model.config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if isinstance(stated, int) and stated > 0:
        limits.append(stated)
    for key, module in model.named_modules():
        if isinstance(module, nn.Embedding) and key.endswith("position_embeddings"):
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - skipped)
    if not limits:
        given = tokenizer.model_max_length
        limits.append(given if given < 1 << 30 else _DEFAULT_LIMIT)
    limit = min(limits)
    if config.max_tokens is not None and config.max_tokens > limit:
        message = f"{name}: max_tokens = {config.max_tokens} exceeds the model's {limit} positions"
        raise ModelLoadError(message)
    return config.max_tokens or min(limit, max(tokenizer.model_max_length, 1))


def _describe(
    name: str,
    config: ModelConfig,
    model: Model,
    examined: Examined,
    template: Template | None,
    path: ScoringPath,
    max_tokens: int,
) -> ModelDescription:
    causal = path is ScoringPath.CAUSAL
    text = model.config.get_text_config()
    labels = (
        _name_labels(model, examined) if not causal else list(template.labels) if template else []
    )
    pair = not causal and template is None and examined.pooling is not Pooling.LAST
    position = {"last": "last token", "mean": "mean of all tokens"}.get(
        examined.pooling, "first token"
    )
    return ModelDescription(
        name=name,
        path=path,
        architecture=type(model).__name__,
        labels=labels,
        label_count=0 if causal else len(labels),
        vocabulary=examined.width if causal else 0,
        hidden_size=text.hidden_size,
        max_tokens=max_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention=examined.attention,
        pooling=str(examined.pooling),
        head=examined.network.head.name,
        pair=pair if config.pair is None else config.pair,
        instruction=template.instruction if template and template.instructed else None,
        default_activation=None if causal else _find_activation(model, len(labels)),
        hidden_states=f"last layer, after its final norm: {position}",
        refusals=examined.refusals,
    )


def _add_refusals(model: ModelDescription, template: Template | None) -> ModelDescription:
    """Add to what the engine goes without what this model makes of each kind of request."""
    refused = list_refusals(
        lambda request: [*check_request(request, model), *check_template(request, template)]
    )
    return msgspec.structs.replace(model, refusals=refused | model.refusals)


def _name_labels(model: Model, examined: Examined) -> list[str]:
    """Return the classes by name; a reward model's one column is the reward."""
    if type(model).__name__ in REWARD_ARCHITECTURES:
        return ["reward"]
    names = model.config.id2label
    return [str(names.get(index, f"LABEL_{index}")) for index in range(examined.width)]


def _find_activation(model: Model, count: int) -> Activation | None:
    if type(model).__name__ in REWARD_ARCHITECTURES:
        return Activation.NONE
    return read_default_activation(model.config.to_dict(), count)
