"""Matrix products on a CPU: weights laid out for oneDNN beforehand, where that is faster.

torch's own float32 product takes whatever library it was built with, which on many processors with
AVX-512 reaches less than half of what oneDNN does with a weight in its own layout. The operations
are torch's private ones (its compiler uses them): they are looked for, tried, held against the
ordinary product and timed at load, and left alone where they are missing, other or no faster.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.engine.foreign import FAULTS, Model
from worker.engine.precision import free_bytes

__all__ = ["pack_weights"]

#: fewer weights than these are not worth a copy
_SMALLEST = 64 * 64
_ROWS = 512
#: what a trial may cost, in multiplications and additions
_TRIAL_FLOPS = 2e9
_TRIES = 5
#: of the ordinary product's time, what the other must save to be worth the memory
_WORTH = 0.8
#: of the memory that is free, what the copies may take
_SHARE = 0.5
#: largest difference from the ordinary product, as a share of its largest value
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class _PackedLinear(nn.Linear):
    """A linear layer with its weight once more, in oneDNN's layout."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, of rows in any number of leading dimensions."""
        if input.dtype is not self.packed.dtype:  # the parameters are held in another for a moment
            return super().forward(input)
        return _multiply(input, self.packed, self.bias)


def pack_weights(model: Model) -> bool:
    """Give the linear layers of a model on a CPU packed weights; return whether any has them.

    None has where a trial shows no gain, or the copies would take over half of the free memory.
    The parameters stay: whoever reads a weight finds it.
    """
    layers = _list_layers(model)
    if not layers:
        return False
    largest = max(layers, key=lambda layer: layer.weight.numel())
    layers = [layer for layer in layers if layer.weight.dtype is largest.weight.dtype]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    if size > _SHARE * free_bytes(torch.device("cpu")):
        return False
    if not _is_worth_it(largest):
        return False
    for layer in layers:
        layer.packed = _pack(layer.weight)
        layer.__class__ = _PackedLinear
    return True


def _list_layers(model: Model) -> list[nn.Linear]:
    """Return the plain linear layers, without the vocabulary's, of which few rows are read."""
    vocabulary = model.get_output_embeddings()
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear  # a quantised one is a class of its own
        and module is not vocabulary
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _TOLERANCES
        and module.weight.numel() >= _SMALLEST
    ]


def _is_worth_it(layer: nn.Linear) -> bool:
    """Tell whether the packed product gives the ordinary one's numbers in clearly less time."""
    weight, bias = layer.weight, layer.bias
    rows = max(16, min(_ROWS, int(_TRIAL_FLOPS / (2 * weight.numel()))))
    given = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0))
    given = given.to(weight.dtype)
    try:
        packed = _pack(weight)
        found = _multiply(given, packed, bias)
    except FAULTS:
        return False
    expected = nn.functional.linear(given, weight, bias)
    difference = (found - expected).abs().max() / expected.abs().max()
    if not difference <= _TOLERANCES[weight.dtype]:
        return False
    ordinary_s = packed_s = float("inf")
    for _ in range(_TRIES):  # in turn, and the best of each: a busy neighbour meets both
        ordinary_s = min(ordinary_s, _time(lambda: nn.functional.linear(given, weight, bias)))
        packed_s = min(packed_s, _time(lambda: _multiply(given, packed, bias)))
    return packed_s <= _WORTH * ordinary_s


def _time(run: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    run()
    return time.perf_counter() - began_at


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)  # noqa: SLF001
    return packed


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # noqa: SLF001
    return product
