"""Adapters, quantisation and device maps: what an entry adds to a plain checkpoint.

The only place that knows the optional libraries; without them the entry is refused by name.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open

from contract.errors import ModelLoadError
from contract.models import ModelConfig
from worker.engine.foreign import Model

__all__ = ["check_libraries", "choose_placement", "is_placed", "merge_adapter"]

_QUANTIZATIONS = {"8bit": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True}}


def check_libraries(name: str, config: ModelConfig) -> None:
    """Raise ``ModelLoadError`` where the entry needs a library that is not installed."""
    if config.quantization is not None and config.quantization not in _QUANTIZATIONS:
        message = f'{name}: quantization = "{config.quantization}" is not one of 8bit, 4bit'
        raise ModelLoadError(message)
    needed = {
        "adapter": ("peft", config.adapter),
        "quantization": ("bitsandbytes", config.quantization),
        "device_map": ("accelerate", config.device_map),
    }
    for field, (library, given) in needed.items():
        if given is not None and importlib.util.find_spec(library) is None:
            message = f"{name}: {field} needs the library {library}, which is not installed"
            raise ModelLoadError(message)


def is_placed(config: ModelConfig) -> bool:
    """Whether loading itself puts the model on its devices."""
    return config.device_map is not None or config.quantization is not None


def choose_placement(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for quantisation and device map."""
    arguments: dict[str, Any] = {}
    if is_placed(config):
        arguments["device_map"] = config.device_map or "auto"
    if config.quantization is not None:
        kind: Any = transformers.BitsAndBytesConfig
        arguments["quantization_config"] = kind(**_QUANTIZATIONS[config.quantization])
    return arguments


def merge_adapter(name: str, model: Model, folder: Path, info: dict[str, Any]) -> Model:
    """Return ``model`` with the LoRA adapter of ``folder`` merged into its weights.

    A head that the adapter brings is no longer missing in ``info``.
    """
    peft: Any = importlib.import_module("peft")
    path = folder / "adapter_model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            brought = set(file.keys())
        merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        message = f"{name}: adapter {folder} cannot be merged: {error}"
        raise ModelLoadError(message) from error
    info["missing_keys"] = {
        key for key in info["missing_keys"] if f"base_model.model.{key}" not in brought
    }
    return merged
