"""Adapters, quantisation and device maps: what an entry adds to a plain checkpoint.

The only place that knows the optional libraries; without them the entry is refused by name.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from contract.errors import ModelLoadError
from contract.models import ModelConfig
from worker.engine.foreign import Model

__all__ = ["check_libraries", "check_quantization", "choose_placement", "merge_adapter"]

_QUANTIZATIONS = {"8bit": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True}}


def check_libraries(name: str, config: ModelConfig) -> None:
    """Raise ``ModelLoadError`` where the entry needs what is not installed, or not supported."""
    if config.tp_plan is not None:
        message = (
            f"{name}: tp_plan is not supported: a tensor-parallel forward needs one process for "
            "each GPU, all in step, and a worker is one process; for a model that is larger than "
            'one GPU set device_map = "auto" instead'
        )
        raise ModelLoadError(message)
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


def check_quantization(name: str, config: ModelConfig, stored: object) -> None:
    """Raise ``ModelLoadError`` where a checkpoint's own quantisation is unknown, or a second one.

    ``stored`` is its config's entry; transformers passes over one that it does not know.
    """
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        message = f"{name}: the checkpoint's quantization method {method!r} is not known"
        raise ModelLoadError(message)
    if config.quantization is not None:
        message = (
            f"{name}: the checkpoint is quantized already ({method}); leave quantization = "
            f'"{config.quantization}" out'
        )
        raise ModelLoadError(message)


def choose_placement(config: ModelConfig, device: str, *, quantized: bool) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for quantisation and device map.

    What is quantised, by its checkpoint or by the entry, cannot be moved afterwards: it is loaded
    where it stays.
    """
    arguments: dict[str, Any] = {}
    if config.device_map is not None:
        arguments["device_map"] = config.device_map
    elif quantized or config.quantization is not None:
        arguments["device_map"] = {"": device}
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
