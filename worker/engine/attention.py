"""Attention within the blocks of a packed batch: the only place for its masks and its kernels.

A node sees its ancestors and itself; distance is measured in positions, so a sliding window is
exact wherever the tokens lie in the pack.

Dimension key:
    T  tokens of the batch, end to end      H  query heads      K  key and value heads
    N  nodes of a block                     G  query heads per key head
    I  tokens of a node                     P  tokens of its ancestors together
    E  head size                            Q  rows of a node that attend: all I, or one
    R  rows that are read, at most one of a node
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.engine.forward import upload
from worker.engine.plan import AttentionBlock
from worker.engine.seam import Ids

__all__ = ["PackedAttention"]

#: scores of one matrix product are kept below this many elements (128 MB in fp32)
_SCORE_ELEMENTS = 1 << 25
#: lengths at which torch's kernel for CPUs, slower in bf16 than in fp32, is 1.5 times slower than
#: explicit products; longer ones lose it to the memory of their scores
_EXPLICIT = range(48, 385)
#: attention that also yields its logsumexp, so that parts can be merged: torch's own, not public;
#: without it parts are put together before the softmax, 1.5 to 3.5 times slower. What it gives is
#: held against whole sequences at every load.
_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class PackedAttention:
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
        own = (_split_nodes(key_KTE, block), _split_nodes(value_KTE, block))
        at_1I = torch.arange(block.length, device=query_HTE.device)[None]
        prefix = (_gather(key_KTE, block.ancestors), _gather(value_KTE, block.ancestors))
        if block.ancestors and self._can_merge(block, query_HTE, value_KTE):
            output_NHIE = self._merge(query_HNIE, own, prefix)
        elif block.ancestors or self.softcap is not None or self._is_explicit(block, query_HTE):
            output_NHIE = self._cascade(query_HNIE, own, prefix, self._mask(block, at_1I))
        else:
            mask = self._mask(block, at_1I) if self._binds(block) else None
            output_NHIE = self._dense(query_HNIE, own, mask)
        return output_NHIE.transpose(1, 2).flatten(0, 1)

    def rows(
        self,
        query_HRE: Tensor,
        states: tuple[Tensor, Tensor],
        block: AttentionBlock,
        nodes_R: Ids,
        offsets_R: Ids,
    ) -> Tensor:
        """Return ``[R, H, E]`` for one row of each of some nodes of the block.

        ``states`` are keys and values of all tokens, ``[K, T, E]``.
        """
        own = [_split_nodes(one_KTE, block) for one_KTE in states]
        if len(nodes_R) < block.count:
            index_R = upload(query_HRE.device, nodes_R)
            own = [one_KNIE[:, index_R] for one_KNIE in own]
        prefix = (_gather(states[0], block.ancestors), _gather(states[1], block.ancestors))
        at_R1 = upload(query_HRE.device, offsets_R)[:, None]
        last = bool((offsets_R == block.length - 1).all()) and not self._binds(block)
        mask = None if last else self._mask(block, at_R1)
        return self._cascade(query_HRE[:, :, None], (own[0], own[1]), prefix, mask)[:, :, 0]

    def _binds(self, block: AttentionBlock) -> bool:
        """Whether some token of the block is further from another one than the window."""
        return self.window is not None and block.prefix_length + block.length > self.window

    def _mask(self, block: AttentionBlock, at_NQ: Tensor) -> Tensor | None:
        """Return what tokens at places ``at_NQ`` of their nodes see: ``[N, 1, Q, P + I]``."""
        window = self.window if self._binds(block) else None
        if not self.causal and window is None:
            return None
        past, width = block.prefix_length, block.prefix_length + block.length
        at_N1Q1 = (past + at_NQ)[:, None, :, None]
        distance = at_N1Q1 - torch.arange(width, device=at_NQ.device)
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if window is None else seen & (distance.abs() < window)

    def _dense(self, query_HNIE: Tensor, own: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        key_KNIE, value_KNIE = own
        return functional.scaled_dot_product_attention(
            query_HNIE.transpose(0, 1),
            key_KNIE.transpose(0, 1),
            value_KNIE.transpose(0, 1),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.scaling,
            enable_gqa=query_HNIE.shape[0] != key_KNIE.shape[0],
        )

    def _is_explicit(self, block: AttentionBlock, query_HTE: Tensor) -> bool:
        """Whether products and softmax of their own beat torch's one kernel."""
        slow = query_HTE.dtype is torch.bfloat16 and query_HTE.device.type == "cpu"
        plain = not self.causal and not self._binds(block)
        return slow and plain and block.length in _EXPLICIT

    def _can_merge(self, block: AttentionBlock, query_HTE: Tensor, value_KTE: Tensor) -> bool:
        plain = self.causal and self.softcap is None and not self._binds(block)
        here = _FLASH is not None and query_HTE.device.type == "cpu"
        return plain and here and query_HTE.shape[2] == value_KTE.shape[2]

    def _merge(
        self, query_HNIE: Tensor, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attend to the ancestors and to the node itself, and merge both by their logsumexp."""
        heads, count, length, _ = query_HNIE.shape
        kv_heads = len(prefix[0])
        # ancestors are seen by all rows alike: rows that read one key head lie together
        query_1KRE = query_HNIE.reshape(1, kv_heads, -1, query_HNIE.shape[3])
        before, before_sum = _FLASH(
            query_1KRE, prefix[0][None], prefix[1][None], is_causal=False, scale=self.scaling
        )
        key_NHIE, value_NHIE = (
            one_KNIE.repeat_interleave(heads // kv_heads, 0).transpose(0, 1) for one_KNIE in own
        )
        within_NHIE, within_sum_NHI = _FLASH(
            query_HNIE.transpose(0, 1), key_NHIE, value_NHIE, is_causal=True, scale=self.scaling
        )
        before_NHIE = before.reshape(heads, count, length, -1).transpose(0, 1)
        before_sum_NHI = before_sum.reshape(heads, count, length).transpose(0, 1)
        share_NHI1 = torch.sigmoid(before_sum_NHI - within_sum_NHI)[..., None]
        merged_NHIE = torch.lerp(within_NHIE.float(), before_NHIE.float(), share_NHI1)
        return merged_NHIE.to(query_HNIE.dtype)

    def _cascade(
        self,
        query_HNQE: Tensor,
        own: tuple[Tensor, Tensor],
        prefix: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """Attend to the ancestors, whose keys all nodes share, and to the node itself.

        ``mask`` is ``[N or 1, 1, Q, P + I]``. Returns ``[N, H, Q, E]``.
        """
        heads, count, queries = query_HNQE.shape[:3]
        width = prefix[0].shape[1] + own[0].shape[2]
        step = max(1, _SCORE_ELEMENTS // (heads * queries * width))
        parts = [
            self._cascade_part(
                query_HNQE[:, n : n + step],
                (own[0][:, n : n + step], own[1][:, n : n + step]),
                prefix,
                mask if mask is None or len(mask) == 1 else mask[n : n + step],
            )
            for n in range(0, count, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cascade_part(
        self,
        query_HNQE: Tensor,
        own: tuple[Tensor, Tensor],
        prefix: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        (key_KNIE, value_KNIE), (key_KPE, value_KPE) = own, prefix
        heads, count, queries, size = query_HNQE.shape
        kv_heads, past = key_KPE.shape[:2]
        groups = heads // kv_heads
        # [K, N, G * Q, E]: all rows that read one key head lie together
        query_KNRE = (
            query_HNQE.reshape(kv_heads, groups, count, queries, size).transpose(1, 2).flatten(2, 3)
        )
        before = torch.matmul(query_KNRE.flatten(1, 2), key_KPE.transpose(1, 2))
        before_KNGQP = before.view(kv_heads, count, groups, queries, past)
        within = torch.matmul(query_KNRE, key_KNIE.transpose(2, 3))
        within_KNGQI = within.view(kv_heads, count, groups, queries, -1)
        weights = self._weights(torch.cat([before_KNGQP, within_KNGQI], dim=-1), mask)
        weights = weights.to(query_HNQE.dtype)
        output_KNRE = torch.matmul(
            weights[..., :past].reshape(kv_heads, count * groups * queries, past), value_KPE
        ).view(kv_heads, count, groups * queries, -1)
        output_KNRE = output_KNRE + torch.matmul(weights[..., past:].flatten(2, 3), value_KNIE)
        output_KNGQE = output_KNRE.view(kv_heads, count, groups, queries, -1)
        return output_KNGQE.permute(1, 0, 2, 3, 4).flatten(1, 2)

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores.float() * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
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
