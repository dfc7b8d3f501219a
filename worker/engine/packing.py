"""Attention over a packed batch: the only place for its masks and its kernels.

Registered with transformers' AttentionInterface under ``NAME`` and without a mask of its own, so
that transformers makes none; the batch's ``Layout`` reaches it as an argument of the backbone call.
A node sees its ancestors and itself; distance is measured in positions, so a sliding window is
exact wherever the tokens lie in the pack.

Dimension key:
    T  tokens of the batch, end to end      H  query heads      K  key and value heads
    N  nodes of a block                     G  query heads per key head
    I  tokens of a node                     P  tokens of its ancestors together
    E  head size
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from worker.engine.plan import AttentionBlock, Layout

__all__ = ["NAME", "UnsupportedAttentionError", "attend_packed", "register"]

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
#: scores of one matrix product are kept below this many elements (128 MB in fp32)
_SCORE_ELEMENTS = 1 << 25


class UnsupportedAttentionError(Exception):
    """The model passes something to its attention that this one does not honour."""


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
    layout: Layout | None = arguments.pop("layout", None)
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
    layout.trace.append((bool(causal), window))
    attend = _Attention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        causal=bool(causal),
    )
    output_THE = torch.empty(
        query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device
    )
    for block in layout.blocks:
        output_THE[block.begin : block.end] = attend.block(query[0], key[0], value[0], block)
    return output_THE[None], None


class _Attention:
    """One layer's attention: its scale, its window in positions, its soft cap."""

    def __init__(
        self, *, scaling: float, window: int | None, softcap: float | None, causal: bool
    ) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap
        self.causal = causal

    def block(
        self, query_HTE: Tensor, key_KTE: Tensor, value_KTE: Tensor, block: AttentionBlock
    ) -> Tensor:
        """Return the block's rows of the output, ``[N * I, H, E]``."""
        query_HNIE = _split_nodes(query_HTE, block)
        key_KNIE = _split_nodes(key_KTE, block)
        value_KNIE = _split_nodes(value_KTE, block)
        if not block.ancestors and self.softcap is None:
            output_NHIE = self._dense(query_HNIE, key_KNIE, value_KNIE)
        else:
            prefix = (_gather(key_KTE, block.ancestors), _gather(value_KTE, block.ancestors))
            output_NHIE = self._cascade(query_HNIE, key_KNIE, value_KNIE, prefix)
        return output_NHIE.transpose(1, 2).flatten(0, 1)

    def _dense(self, query_HNIE: Tensor, key_KNIE: Tensor, value_KNIE: Tensor) -> Tensor:
        length = query_HNIE.shape[2]
        windowed = self.window is not None and length > self.window
        mask_II = (
            _mask(0, length, self.window, query_HNIE.device, causal=self.causal)
            if windowed
            else None
        )
        return functional.scaled_dot_product_attention(
            query_HNIE.transpose(0, 1),
            key_KNIE.transpose(0, 1),
            value_KNIE.transpose(0, 1),
            attn_mask=mask_II,
            is_causal=self.causal and not windowed,
            scale=self.scaling,
            enable_gqa=query_HNIE.shape[0] != key_KNIE.shape[0],
        )

    def _cascade(
        self,
        query_HNIE: Tensor,
        key_KNIE: Tensor,
        value_KNIE: Tensor,
        prefix: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend to the ancestors, whose keys all nodes share, and to the node itself."""
        heads, count, length = query_HNIE.shape[:3]
        width = prefix[0].shape[1] + length
        step = max(1, _SCORE_ELEMENTS // (heads * length * width))
        parts = [
            self._cascade_part(
                query_HNIE[:, n : n + step],
                key_KNIE[:, n : n + step],
                value_KNIE[:, n : n + step],
                prefix,
            )
            for n in range(0, count, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cascade_part(
        self,
        query_HNIE: Tensor,
        key_KNIE: Tensor,
        value_KNIE: Tensor,
        prefix: tuple[Tensor, Tensor],
    ) -> Tensor:
        key_KPE, value_KPE = prefix
        heads, count, length, size = query_HNIE.shape
        kv_heads, past = key_KPE.shape[:2]
        groups = heads // kv_heads
        # [K, N, G * I, E]: all rows that read one key head lie together
        query_KNRE = (
            query_HNIE.reshape(kv_heads, groups, count, length, size).transpose(1, 2).flatten(2, 3)
        )
        before = torch.matmul(query_KNRE.flatten(1, 2), key_KPE.transpose(1, 2))
        before_KNGIP = before.view(kv_heads, count, groups, length, past)
        own = torch.matmul(query_KNRE, key_KNIE.transpose(2, 3))
        own_KNGII = own.view(kv_heads, count, groups, length, length)
        weights = self._weights(torch.cat([before_KNGIP, own_KNGII], dim=-1), past)
        weights = weights.to(query_HNIE.dtype)
        output_KNRE = torch.matmul(
            weights[..., :past].reshape(kv_heads, count * groups * length, past), value_KPE
        ).view(kv_heads, count, groups * length, -1)
        output_KNRE = output_KNRE + torch.matmul(weights[..., past:].flatten(2, 3), value_KNIE)
        output_KNGIE = output_KNRE.view(kv_heads, count, groups, length, -1)
        return output_KNGIE.permute(1, 0, 2, 3, 4).flatten(1, 2)

    def _weights(self, scores: Tensor, past: int) -> Tensor:
        scores = scores.float() * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        length = scores.shape[-2]
        binds = self.window is not None and past + length > self.window
        if self.causal or binds:
            window = self.window if binds else None
            mask = _mask(past, length, window, scores.device, causal=self.causal)
            scores = scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1)


def _split_nodes(states_HTE: Tensor, block: AttentionBlock) -> Tensor:
    heads, _, size = states_HTE.shape
    own = states_HTE[:, block.begin : block.end]
    return own.view(heads, block.count, block.length, size)


def _gather(states_KTE: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    if len(ranges) == 1:
        return states_KTE[:, ranges[0][0] : ranges[0][1]]
    if not ranges:
        return states_KTE[:, :0]
    return torch.cat([states_KTE[:, begin:end] for begin, end in ranges], dim=1)


def _mask(
    past: int, length: int, window: int | None, device: torch.device, *, causal: bool
) -> Tensor:
    """True where row ``i``, at position ``past + i``, sees position ``j``."""
    at_I1 = torch.arange(past, past + length, device=device)[:, None]
    at_1J = torch.arange(past + length, device=device)[None]
    distance = at_I1 - at_1J
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance.abs() < window
    return seen
