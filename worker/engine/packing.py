"""Where transformers' models meet our attention: the only place that is registered with them.

Known to the AttentionInterface under ``NAME`` and without a mask of its own, so that transformers
makes none; the batch's ``Layout`` reaches it as an argument of the backbone call.

Dimension key:
    T  tokens of the batch, end to end      H  query heads      E  head size      R  rows read
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.attention import PackedAttention
from worker.engine.plan import LastRows, Layout

__all__ = [
    "NAME",
    "KeysTakenError",
    "TakenKeys",
    "UnsupportedAttentionError",
    "attend_packed",
    "register",
]

NAME = "scorekeep_packed"

#: arguments that models pass and that change nothing here
_HARMLESS = frozenset(
    {
        "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q",
        "deterministic", "dropout",
        "head_mask", "is_causal", "max_length_k", "max_length_q", "output_attentions",
        "output_hidden_states", "past_key_values", "position_embeddings", "position_ids",
        "return_dict", "use_cache",
    }
)  # fmt: skip


class UnsupportedAttentionError(Exception):
    """The model passes something to its attention that this one does not honour."""


class KeysTakenError(Exception):
    """A layer's keys and values are in the ``TakenKeys``; what follows them is not computed."""


class TakenKeys:
    """Stands for the layout in a last layer that is called twice, to compute some rows alone.

    The first call, with all tokens, leaves its keys and values here and ends with
    ``KeysTakenError``; the second, with the tokens of ``last.rows``, attends to them.
    """

    def __init__(self, last: LastRows) -> None:
        self.last = last
        self.taken: tuple[Tensor, Tensor] | None = None


def register() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, attend_packed)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,  # noqa: ANN401  # whatever a model passes
) -> tuple[Tensor, None]:
    """Transformers' attention signature: ``[1, H, T, E]`` in, ``[1, T, H, E]`` out.

    Raises ``UnsupportedAttentionError`` for a mask, a bias or an argument that it does not know.
    """
    layout: Layout | TakenKeys | None = arguments.pop("layout", None)
    scaling = arguments.pop("scaling", None)
    window = arguments.pop("sliding_window", None)
    softcap = arguments.pop("softcap", None)
    unknown = [name for name, given in arguments.items() if given is not None]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if layout is None or attention_mask is not None or unknown:
        message = f"attention was given {unknown or 'a mask, or no layout'}"
        raise UnsupportedAttentionError(message)
    causal = arguments.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    attend = PackedAttention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        causal=bool(causal),
    )
    if isinstance(layout, TakenKeys):
        return _attend_rows(attend, query, (key, value), layout)[None], None
    layout.trace.append((bool(causal), window))
    output_THE = torch.empty(
        query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device
    )
    for block in layout.blocks:
        output_THE[block.begin : block.end] = attend.block(query[0], key[0], value[0], block)
    return output_THE[None], None


def _attend_rows(
    attend: PackedAttention, query: Tensor, states: tuple[Tensor, Tensor], keys: TakenKeys
) -> Tensor:
    """Return ``[R, H, E]``: attention of the rows that are read to the keys of the first call."""
    if keys.taken is None:
        keys.taken = states
        raise KeysTakenError
    key, value = keys.taken
    parts_RHE = []
    begin = 0
    for block, nodes, offsets in keys.last.reads:
        query_HRE = query[0, :, begin : begin + len(nodes)]
        parts_RHE.append(attend.rows(query_HRE, (key[0], value[0]), block, nodes, offsets))
        begin += len(nodes)
    return torch.cat(parts_RHE)
