"""What is served, resolved: where a checkpoint lies, what it holds, on which device and dtype.

The only place that looks at a checkpoint's files before transformers does, so that what is wrong
with them is said in our words.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from contract.errors import ModelLoadError
from contract.models import ModelConfig

__all__ = ["REWARD_ARCHITECTURES", "Checkpoint", "choose_device", "choose_dtype", "find_checkpoint"]

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


#: reward models that transformers has no class for; ``rewards`` has
REWARD_ARCHITECTURES = frozenset(
    {
        "InternLM2ForRewardModel",
        "LlamaForSequenceClassificationWithNormal_Weights",
        "Qwen2ForRewardModel",
        "Qwen3ForRewardModel",
    }
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose files have been looked at."""

    name: str
    folder: Path
    raw: dict[str, Any]
    weights: tuple[Path, ...]
    fingerprint: str

    @property
    def architecture(self) -> str:
        """The class that its config names."""
        named = self.raw.get("architectures") or [""]
        return str(named[0])


def find_checkpoint(name: str, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint that ``config`` names, downloading it where it is a hub id.

    Raises ``ModelLoadError``: no such place, no or a corrupt config, no weights, weights only as
    pickle, a corrupt weights file, code that would have to be trusted.
    """
    folder = _find_folder(name, config)
    raw = _read_config(name, folder)
    if raw.get("auto_map") and not config.trust_remote_code and not _is_native(raw):
        message = (
            f"{name}: {config.source} needs its own Python code ({', '.join(raw['auto_map'])}); "
            "set trust_remote_code = true only if you have read it"
        )
        raise ModelLoadError(message)
    _check_tokenizer(name, folder)
    weights = _find_weights(name, folder, config)
    return Checkpoint(name, folder, raw, weights, _fingerprint((*weights, *_list_adapter(config))))


def choose_device(name: str, config: ModelConfig) -> torch.device:
    """Return the device: the entry's, or the best there is."""
    wanted = config.device
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        message = f'{name}: device = "{wanted}" is not one of auto, cpu, cuda, cuda:N, mps'
        raise ModelLoadError(message) from error
    missing = (device.type == "cuda" and not torch.cuda.is_available()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        message = f'{name}: device = "{wanted}" is not available here; use "auto" or "cpu"'
        raise ModelLoadError(message)
    return device


def choose_dtype(name: str, config: ModelConfig, raw: dict[str, Any], device: str) -> torch.dtype:
    """Return the dtype: the entry's; else float32 on a CPU, the checkpoint's on a GPU."""
    if config.dtype != "auto":
        if config.dtype not in _DTYPES:
            message = f'{name}: dtype = "{config.dtype}" is not one of auto, {", ".join(_DTYPES)}'
            raise ModelLoadError(message)
        return _DTYPES[config.dtype]
    if device == "cpu":
        return torch.float32
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    return _DTYPES.get(stored.removeprefix("torch."), torch.float32)


def _find_folder(name: str, config: ModelConfig) -> Path:
    local = Path(config.source).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        message = (
            f"{name}: source {config.source} is a file; name the folder that holds config.json"
        )
        raise ModelLoadError(message)
    if local.is_absolute() or config.source.startswith((".", "~")) or config.source.count("/") > 1:
        message = f"{name}: there is no folder {config.source}; correct source, or name a hub id"
        raise ModelLoadError(message)
    patterns = [*_FILES, *_PICKLES] if config.allow_pickle else _FILES
    try:
        found = snapshot_download(config.source, revision=config.revision, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {config.revision}" if config.revision else ""
        message = (
            f"{name}: {config.source}{at} is neither a local folder nor a model that the hub "
            f"(or its local cache, when offline) gives: {str(error).splitlines()[0]}"
        )
        raise ModelLoadError(message) from error
    return Path(found)


def _check_tokenizer(name: str, folder: Path) -> None:
    """Transformers makes up an empty tokenizer where there are no files for one."""
    if not any(path for kind in _TOKENIZERS for path in folder.glob(kind)):
        message = f"{name}: {folder} holds no tokenizer ({', '.join(_TOKENIZERS)})"
        raise ModelLoadError(message)


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        message = f"{name}: {folder} holds no config.json, so it is not a transformers checkpoint"
        raise ModelLoadError(message) from error
    except (OSError, ValueError) as error:
        message = f"{name}: {path} is corrupt: {error}"
        raise ModelLoadError(message) from error
    if not isinstance(raw, dict):
        message = f"{name}: {path} is corrupt: it holds no JSON object"
        raise ModelLoadError(message)
    return raw


def _is_native(raw: dict[str, Any]) -> bool:
    """Whether transformers, or this engine, knows the architecture without its own code."""
    named = raw.get("architectures") or [""]
    return str(raw.get("model_type")) in CONFIG_MAPPING or str(named[0]) in REWARD_ARCHITECTURES


def _find_weights(name: str, folder: Path, config: ModelConfig) -> tuple[Path, ...]:
    weights = tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if not weights and pickles and not config.allow_pickle:
        message = (
            f"{name}: {folder} holds its weights only as pickle ({pickles[0]}), which can run "
            "code when it is read; convert it to safetensors, or set allow_pickle = true"
        )
        raise ModelLoadError(message)
    if not weights and not pickles:
        message = f"{name}: {folder} holds no weights (*.safetensors)"
        raise ModelLoadError(message)
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            message = f"{name}: {path} is corrupt or cut short: {error}"
            raise ModelLoadError(message) from error
    return weights or tuple(folder / pickle for pickle in pickles)


def _list_adapter(config: ModelConfig) -> list[Path]:
    """Return an adapter's files: merged, they are part of the weights."""
    if config.adapter is None:
        return []
    names = ("adapter_config.json", "adapter_model.safetensors")
    return [path for name in names if (path := Path(config.adapter) / name).is_file()]


def _fingerprint(weights: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in weights:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"
