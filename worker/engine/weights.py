"""A checkpoint's weights: the only place that calls ``from_pretrained`` for them.

A checkpoint is served as it is or not at all: weights that are missing, newly initialised or left
over are an error that names them, never a random head.
"""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from contract.errors import ModelLoadError
from contract.models import ModelConfig, ScoringPath
from worker.engine.adapters import check_quantization, choose_placement, merge_adapter
from worker.engine.foreign import FAULTS, Model, explain
from worker.engine.registry import REWARD_ARCHITECTURES, Checkpoint

__all__ = ["load_weights"]

#: stored by older transformers versions and recomputed by newer ones
_LEFTOVERS = re.compile(
    r"position_ids$|inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$|num_batches"
)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    path: ScoringPath,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """Return the model with its head on ``device``, or where the entry's device map says.

    Raises ``ModelLoadError`` for what cannot be read, is not there, or would be dropped.
    """
    stored = checkpoint.raw.get("quantization_config")
    check_quantization(checkpoint.name, config, stored)
    placement = choose_placement(config, str(device), quantized=stored is not None)
    try:
        common = {"dtype": dtype, "output_loading_info": True, **placement}
        model, info = _read(checkpoint, config, path, common)
    except FAULTS as error:
        message = f"{checkpoint.name}: {checkpoint.folder} cannot be loaded: {explain(error)}"
        raise ModelLoadError(message) from error
    if config.adapter is not None:
        model = merge_adapter(checkpoint.name, model, Path(config.adapter), info)
    left = _restore_biases(model, checkpoint, sorted(info["unexpected_keys"]))
    _check_weights(checkpoint, model, info, left)
    if not placement:
        model.to(device)
    return model


def _read(
    checkpoint: Checkpoint, config: ModelConfig, path: ScoringPath, common: dict[str, Any]
) -> tuple[Model, dict[str, Any]]:
    if checkpoint.architecture in REWARD_ARCHITECTURES:
        return _read_reward(checkpoint, common)
    kind: Any = (
        transformers.AutoModelForCausalLM
        if path is ScoringPath.CAUSAL
        else transformers.AutoModelForSequenceClassification
    )
    model, info = kind.from_pretrained(
        checkpoint.folder,
        use_safetensors=None if config.allow_pickle else True,
        trust_remote_code=config.trust_remote_code,
        **common,
    )
    return model, info


def _read_reward(checkpoint: Checkpoint, common: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    # three families' code, half a second: loaded only for who serves one
    from worker.engine import rewards  # noqa: PLC0415

    kind = rewards.REWARD_CLASSES[checkpoint.architecture]
    if checkpoint.raw.get("model_type") != "internlm2":
        model, info = kind.from_pretrained(checkpoint.folder, use_safetensors=True, **common)
        return model, info
    made = rewards.make_internlm2_config(checkpoint.raw)
    stored: dict[str, torch.Tensor] = {}
    for file in checkpoint.weights:
        stored |= load_file(file)
    weights = rewards.convert_internlm2(stored, made)
    model, info = kind.from_pretrained(None, config=made, state_dict=weights, **common)
    return model, info


def _check_weights(
    checkpoint: Checkpoint, model: Model, info: dict[str, Any], left: list[str]
) -> None:
    missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if missing:
        message = (
            f"{checkpoint.name}: {checkpoint.folder} ({checkpoint.architecture or 'no class'}) "
            f"lacks weights of {type(model).__name__}: {_list(missing)}. They would be random "
            "numbers: serve a checkpoint that has them"
        )
        raise ModelLoadError(message)
    left = [key for key in left if not _LEFTOVERS.search(key)]
    if left and checkpoint.architecture != type(model).__name__:
        message = (
            f"{checkpoint.name}: {checkpoint.architecture} is not known, and as "
            f"{type(model).__name__} these of its weights would be ignored: {_list(left)}"
        )
        raise ModelLoadError(message)


def _restore_biases(model: Model, checkpoint: Checkpoint, unexpected: list[str]) -> list[str]:
    """Give a bias-free head the bias that its checkpoint has; return the keys still unused."""
    left = []
    for key in unexpected:
        parent, _, kind = key.rpartition(".")
        module: nn.Module | None = dict(model.named_children()).get(parent)
        if (
            kind == "bias"
            and isinstance(module, nn.Linear)
            and getattr(module, "bias", None) is None
        ):
            bias = _read_tensor(checkpoint, key).to(module.weight.dtype)
            module.bias = nn.Parameter(bias, requires_grad=False)
        else:
            left.append(key)
    return left


def _read_tensor(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    for path in checkpoint.weights:
        with safe_open(path, framework="pt") as file:
            if key in file.keys():  # noqa: SIM118  # not a mapping
                tensor: torch.Tensor = file.get_tensor(key)
                return tensor
    message = f"{checkpoint.name}: {key} is in no safetensors file of {checkpoint.folder}"
    raise ModelLoadError(message)


def _list(keys: list[str]) -> str:
    shown = ", ".join(keys[:6])
    return f"{shown} and {len(keys) - 6} more" if len(keys) > 6 else shown
