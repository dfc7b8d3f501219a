"""The last layer, only where it is read: the only place that knows how.

A score is read at one row of each sequence, so of the last layer all rows' keys and values are
needed, but attention's output, its projection and the MLP of those rows alone. Nothing here knows
an architecture: the layer is called with all tokens until its attention has keys and values, and
once more with the rows that are read. Whether that gives the model's own numbers is found out at
load.

Dimension key:
    T  tokens of the batch, end to end      D  hidden size      R  rows that are read
"""

from typing import Any

from torch import Tensor, nn

from worker.engine.forward import upload
from worker.engine.packing import KeysTakenError, TakenKeys
from worker.engine.plan import Layout
from worker.engine.seam import Ids

__all__ = ["LastLayer", "install_last_layer"]


class LastLayer(nn.Module):
    """Stands where the last layer was; as that layer unless its layout is to be cut to rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the layer has
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the layer's own
        """Return what the layer returns, of the rows that are read: ``[1, R, D]``."""
        layout: Layout | None = kwargs.get("layout")
        if layout is None or layout.last is None:
            return self.layer(*args, **kwargs)
        kwargs["layout"] = TakenKeys(layout.last)
        try:
            self.layer(*args, **kwargs)
        except KeysTakenError:
            args, kwargs = _choose_rows((args, kwargs), layout.tokens, layout.last.rows)
            return self.layer(*args, **kwargs)
        message = f"{type(self.layer).__name__} did not call the attention that it is given"
        raise TypeError(message)


def install_last_layer(backbone: nn.Module) -> bool:
    """Put a ``LastLayer`` in the place of the backbone's last; False where none is found."""
    config: Any = backbone.config
    count = getattr(config, "num_hidden_layers", None)
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            module[-1] = LastLayer(module[-1])
            return True
    return False


def _choose_rows(given: Any, tokens: int, rows: Ids) -> Any:  # noqa: ANN401  # any nest
    """Return ``given`` with every tensor of ``[1, T, …]`` or ``[T]`` cut to the rows."""
    if isinstance(given, Tensor):
        if given.dim() > 1 and given.shape[:2] == (1, tokens):
            return given[:, upload(given.device, rows)]
        return given[upload(given.device, rows)] if given.shape == (tokens,) else given
    if isinstance(given, dict):
        return {name: _choose_rows(one, tokens, rows) for name, one in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(_choose_rows(one, tokens, rows) for one in given)
    return given
