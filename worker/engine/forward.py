"""One batch through the backbone, and the one copy to the host: the only place for both.

Dimension key:
    B  sequences in the batch      L  padded length      T  tokens, end to end without padding
    D  hidden size                 R  rows of an upload
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from contract.errors import DeviceLostError, OutOfMemoryError
from worker.engine.plan import Layout, choose_last_rows
from worker.engine.seam import Ids

__all__ = ["Backbone", "Span", "copy_to_host", "pad_rows", "translate_errors", "upload"]

#: where a sequence lies in the pack: its first row and the one after its last
Span = tuple[int, int]

#: in padded execution, a sub-batch holds at most this share of padding
_MOST_PADDING = 0.15


class Backbone:
    """The model without its head: token ids in, the last layer's normed hidden states out."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.packed = False
        #: whether the last layer can be computed where it is read alone
        self.prunes = False
        self.position_offset = 0
        self.padding_tokens = 0
        parameters = inspect.signature(module.forward).parameters
        self.takes_types = "token_type_ids" in parameters
        self.takes_positions = "position_ids" in parameters
        self._fixed = {"use_cache": False} if "use_cache" in parameters else {}

    def run(self, layout: Layout, rows: Ids | None = None) -> Tensor:
        """Return the hidden states of the token ``rows``, which are sorted: ``[R, D]``.

        None takes every token of ``layout``, in its order. A layout that shares prefixes needs
        ``packed``.
        """
        if not self.packed:
            hidden_TD = self._run_padded(layout)
        else:
            last = None if rows is None or not self.prunes else choose_last_rows(layout, rows)
            hidden_TD = self._run_packed(replace(layout, last=last))
            if last is not None:
                return hidden_TD
        return hidden_TD if rows is None else hidden_TD[upload(hidden_TD.device, rows)]

    def set_attention(self, name: str) -> None:
        """Make every layer use the attention called ``name``."""
        for module in self.module.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation = name  # noqa: SLF001  # the library's only switch

    def _run_packed(self, layout: Layout) -> Tensor:
        rows = [layout.ids, layout.positions + self.position_offset]
        inputs_RT = upload(self.device, np.stack([*rows, *self._list_types(layout)]))
        output = self.module(
            input_ids=inputs_RT[0:1],
            position_ids=inputs_RT[1:2],
            layout=layout,
            **({"token_type_ids": inputs_RT[2:3]} if len(inputs_RT) > 2 else {}),
            **self._fixed,
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _run_padded(self, layout: Layout) -> Tensor:
        return torch.cat([self._run_group(layout, spans) for spans in _group_spans(layout)])

    def _run_group(self, layout: Layout, spans: list[Span]) -> Tensor:
        lengths = [end - begin for begin, end in spans]
        types = self._list_types(layout)
        inputs = np.zeros((2 + len(types), len(spans), max(lengths)), np.int64)
        inputs[0] = self._padding_id
        self.padding_tokens += inputs[0].size - sum(lengths)
        for row, (begin, end) in enumerate(spans):
            inputs[0, row, : end - begin] = layout.ids[begin:end]
            inputs[1, row, : end - begin] = 1
            for given in types:
                inputs[2, row, : end - begin] = given[begin:end]
        inputs_RBL = upload(self.device, inputs)
        output = self.module(
            input_ids=inputs_RBL[0],
            attention_mask=inputs_RBL[1],
            **({"token_type_ids": inputs_RBL[2]} if types else {}),
            **self._fixed,
        )
        hidden_BLD: Tensor = output.last_hidden_state
        kept = np.flatnonzero(inputs[1].reshape(-1))
        return hidden_BLD.flatten(0, 1)[upload(self.device, kept)]

    def _list_types(self, layout: Layout) -> list[Ids]:
        """Token types only where a tokenizer gave some: GPT-2 would embed zeros as a token."""
        return [layout.types] if self.takes_types and layout.types is not None else []

    @property
    def _padding_id(self) -> int:
        given = getattr(self.module.config, "pad_token_id", None)
        return given if isinstance(given, int) and given >= 0 else 0


def _group_spans(layout: Layout) -> Iterator[list[Span]]:
    """Yield sequences of nearly equal length together, in the layout's order."""
    group: list[Span] = []
    tokens = 0
    for block in layout.blocks:
        for begin in range(block.begin, block.end, block.length):
            padded = (len(group) + 1) * block.length
            if group and tokens + block.length < (1 - _MOST_PADDING) * padded:
                yield group
                group, tokens = [], 0
            group.append((begin, begin + block.length))
            tokens += block.length
    if group:
        yield group


def pad_rows(hidden_TD: Tensor, spans: list[Span]) -> tuple[Tensor, Tensor]:
    """Return ``[B, L, D]``, right-padded with the first row, and its 0/1 mask ``[B, L]``."""
    longest = max(end - begin for begin, end in spans)
    index = np.zeros((2, len(spans), longest), np.int64)
    for row, (begin, end) in enumerate(spans):
        index[0, row, : end - begin] = np.arange(begin, end)
        index[1, row, : end - begin] = 1
    index_RBL = upload(hidden_TD.device, index)
    return hidden_TD[index_RBL[0]], index_RBL[1]


def upload(device: torch.device, array: np.ndarray[Any, Any]) -> Tensor:
    """Return ``array`` on ``device`` as int64, from pinned memory without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, by one copy and one wait. Widest dtypes come first."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors
    flat = torch.cat(
        [tensor.contiguous().view(-1).view(torch.uint8).to(device) for tensor in tensors]
    )
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.copy_(flat, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    parts = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        parts.append(host[begin:end].view(tensor.dtype).view(tensor.shape))
        begin = end
    return parts


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the device's errors as ours: out of memory, or a context that is lost for good."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"the device ran out of memory: {error}"
        raise OutOfMemoryError(message) from error
    except torch.AcceleratorError as error:
        message = f"the device's context is lost: {error}"
        raise DeviceLostError(message) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            message = f"the host ran out of memory: {error}"
            raise OutOfMemoryError(message) from error
        if "CUDA error" in str(error) or "CUBLAS_STATUS" in str(error):
            message = f"the device's context is lost: {error}"
            raise DeviceLostError(message) from error
        raise
