"""Names for what transformers hands out untyped, and for what it raises.

What the engine relies on is checked when a model is loaded, by trying it, not by these names.
"""

from typing import Any, TypeAlias

from safetensors import SafetensorError

__all__ = ["FAULTS", "Config", "Encoding", "Model", "Tokenizer", "explain"]

#: a ``PreTrainedConfig``, whose fields depend on the family
Config: TypeAlias = Any
#: a ``PreTrainedModel`` with a head
Model: TypeAlias = Any
#: a fast ``PreTrainedTokenizerBase``
Tokenizer: TypeAlias = Any
#: a ``tokenizers.Encoding``
Encoding: TypeAlias = Any

#: what transformers raises for files, configs and architectures that it cannot handle
FAULTS = (
    AttributeError, ImportError, LookupError, OSError, RuntimeError, SafetensorError, TypeError,
    ValueError,
)  # fmt: skip


def explain(error: Exception) -> str:
    """Return an exception's first line and its kind."""
    lines = str(error).strip().splitlines() or [""]
    return f"{lines[0]} ({type(error).__name__})"
