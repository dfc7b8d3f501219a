"""From pooled hidden states to logits, by the checkpoint's own head: one mechanism for all.

The backbone is taken out of the model and a ``Replay`` put in its place. The model's own forward
then applies its own head (dense layers, activations, scaling, soft caps) to whatever rows the
replay hands out, so that a head runs on the rows that are read and nowhere else.

Dimension key:
    B  sequences in the batch      L  padded length      T  tokens, end to end
    D  hidden size                 C  classes
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from worker.engine.foreign import Model
from worker.engine.forward import Span, pad_rows
from worker.engine.pooling import Pooling, pool_hidden_states

__all__ = ["ClassificationHead", "Replay", "detach_backbone", "find_linear"]


class _Replayed(BaseModelOutputWithPoolingAndCrossAttentions):
    """What a backbone yields beside its rows (router logits, states) nobody reads: it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Replay(nn.Module):
    """Stands where the backbone was and answers with the rows it was last given."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(backbone, "pooler", None)
        self.activation: nn.Module | None = getattr(backbone, "pooler_activation", None)
        self._rows_BLD: Tensor | None = None
        # in a list: the backbone is not a part of the head
        self._origin = [backbone]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the backbone has
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_origin"][0], name)

    @property
    def decoder(self) -> "Replay":
        """OPT's head looks for its layers one level lower."""
        return self

    def load(self, rows_BLD: Tensor) -> None:
        """Set what the next forward answers."""
        self._rows_BLD = rows_BLD

    def forward(self, *_: object, **__: object) -> _Replayed:
        """Answer as the backbone would whose last layer yielded the loaded rows."""
        rows_BLD = self._rows_BLD
        return _Replayed(
            last_hidden_state=cast("torch.FloatTensor", rows_BLD),
            pooler_output=None if rows_BLD is None else self._pool(rows_BLD),
        )

    def _pool(self, rows_BLD: Tensor) -> Tensor | None:
        if self.pooler is None:
            return None
        if isinstance(self.pooler, nn.Linear):  # ALBERT keeps its pooler in two parts
            pooled_BD: Tensor = self.pooler(rows_BLD[:, 0])
            return (
                pooled_BD if self.activation is None else cast("Tensor", self.activation(pooled_BD))
            )
        return cast("Tensor", self.pooler(rows_BLD))


def detach_backbone(model: Model) -> tuple[nn.Module, Replay]:
    """Take the backbone out of ``model`` and leave a ``Replay`` in its place."""
    backbone: nn.Module = getattr(model, model.base_model_prefix)
    replay = Replay(backbone)
    setattr(model, model.base_model_prefix, replay)
    return backbone, replay


def find_linear(model: Model) -> Callable[[Tensor], Tensor] | None:
    """Return the head where it is one linear layer beside the backbone, or a reward's own."""
    reward: Callable[[Tensor], Tensor] | None = getattr(model, "apply_head", None)
    if reward is not None:
        return reward
    heads = [
        child
        for child in model.children()
        if not isinstance(child, Replay) and any(True for _ in child.parameters())
    ]
    if len(heads) == 1 and isinstance(heads[0], nn.Linear):
        return heads[0]
    return None


class ClassificationHead:
    """The head of a sequence classifier and the pooling that goes before it.

    ``linear`` is applied directly; without it the model's own forward is replayed.
    """

    def __init__(
        self,
        model: Model,
        replay: Replay,
        pooling: Pooling,
        *,
        linear: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.replay = replay
        self.pooling = pooling
        self.linear = linear

    @property
    def name(self) -> str:
        """What the head is, for the receipt."""
        plain = isinstance(self.linear, nn.Linear)
        return "linear" if plain else f"{type(self.model).__name__}'s own"

    def read(
        self, hidden_TD: Tensor, begins_B: Tensor, ends_B: Tensor, spans: list[Span]
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, C]`` in fp32 and the pooled rows ``[B, D]``.

        ``spans`` are the host's copy of ``begins_B`` and ``ends_B``.
        """
        pooled_BD = pool_hidden_states(hidden_TD, begins_B, ends_B, self.pooling)
        if self.linear is not None:
            logits_BC = self.linear(pooled_BD)
        elif self.pooling is Pooling.WHOLE:
            rows_BLD, mask_BL = pad_rows(hidden_TD, spans)
            logits_BC = self._replay(rows_BLD, mask_BL)
        else:
            rows_B1D = pooled_BD[:, None]
            logits_BC = self._replay(rows_B1D, torch.ones_like(rows_B1D[..., 0]).long())
        return logits_BC.float(), pooled_BD

    def _replay(self, rows_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        self.replay.load(rows_BLD)
        ids_BL = torch.zeros_like(mask_BL)
        return cast("Tensor", self.model(input_ids=ids_BL, attention_mask=mask_BL).logits)
