"""Names for what transformers hands out untyped: its models, tokenizers and their encodings.

What the engine relies on is checked when a model is loaded, by trying it, not by these names.
"""

from typing import Any, TypeAlias

__all__ = ["Config", "Encoding", "Model", "Tokenizer"]

#: a ``PreTrainedConfig``, whose fields depend on the family
Config: TypeAlias = Any
#: a ``PreTrainedModel`` with a head
Model: TypeAlias = Any
#: a fast ``PreTrainedTokenizerBase``
Tokenizer: TypeAlias = Any
#: a ``tokenizers.Encoding``
Encoding: TypeAlias = Any
