"""What a model can do, found out by trying it at load: the only place that decides, and says why.

The stock model answers a few fixed sequences one at a time. The engine's way (pooled rows, packed
tokens, shared prefixes) is used only where it gives the same; a silent difference is what makes
an engine fast and wrong.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from contract.errors import ModelLoadError
from worker.engine import packing
from worker.engine.causal import CausalHead, install_selective
from worker.engine.foreign import FAULTS, Model, explain
from worker.engine.forward import Backbone, copy_to_host, upload
from worker.engine.heads import ClassificationHead, Replay, detach_backbone, find_linear
from worker.engine.linear import pack_weights
from worker.engine.network import Network
from worker.engine.plan import plan_batch
from worker.engine.pooling import Pooling
from worker.engine.precision import held_in_float32
from worker.engine.pruning import install_last_layer
from worker.engine.seam import Floats, Ids, Sequence

__all__ = ["TOLERANCES", "Examined", "examine"]

#: largest difference from the stock model, as a share of the largest stock value
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_LENGTHS = (29, 3, 17)
_SHARED = 9


@dataclass(slots=True, eq=False)
class Examined:
    """A network that agrees with its stock model, and what it must do without."""

    network: Network
    pooling: Pooling
    attention: str
    #: whose matrix products, ``torch``'s ordinary ones or ``onednn``'s with packed weights
    linear: str
    refusals: dict[str, str] = field(default_factory=dict)
    #: how many logits the head yields
    width: int = 0
    #: how far the engine's logits were from the stock model's
    difference: float = 0.0
    #: the sequences that were tried, and the stock model's logits for them
    probes: list[Ids] = field(default_factory=list)
    stock: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    #: the same in float32, where it was asked for and memory allowed it
    reference: Floats | None = None


def examine(
    model: Model, *, causal: bool, max_tokens: int, with_reference: bool = False
) -> Examined:
    """Take ``model`` apart and find the fastest way to run it that gives its own numbers.

    ``with_reference`` also runs the stock model in float32, whatever its dtype.
    Raises ``ModelLoadError`` where no way does.
    """
    try:
        with torch.inference_mode():
            probes = _make_probes(model, max_tokens)
            reference = _run_reference(model, probes, causal=causal) if with_reference else None
            examined = _examine(model, probes, causal=causal)
            examined.reference = reference
            return examined
    except FAULTS as error:
        message = f"{type(model).__name__} cannot be served: {explain(error)}"
        raise ModelLoadError(message) from error


def _examine(model: Model, probes: list[Ids], *, causal: bool) -> Examined:
    stock_attention: str = model.config._attn_implementation  # noqa: SLF001
    stock = _run_stock(model, probes, causal=causal)
    # after the stock model has answered: all below is held against it
    linear = "onednn" if pack_weights(model) else "torch"
    selective = install_selective(model) if causal else None
    backbone_module, replay = detach_backbone(model)
    backbone = Backbone(backbone_module, model.device)
    heads = (
        [CausalHead(model, replay, selective, vocabulary=stock.shape[-1])]
        if causal
        else _list_heads(model, replay)
    )
    network, pooling, difference = _find_head(model, backbone, heads, probes, stock)
    examined = Examined(network, pooling, stock_attention, linear, width=stock.shape[-1])
    examined.difference = difference
    examined.probes = probes
    examined.stock = copy_to_host([stock])[0].numpy()
    reason = _refuse_packing(model, backbone) or _try_packing(examined, probes)
    if reason is None:
        examined.attention = packing.NAME
        reason = _try_sharing(examined, probes)
        if reason is not None:
            examined.refusals["shared_prefix"] = reason
        reason = _try_pruning(examined, probes)
        if reason is not None:
            examined.refusals["last_layer_rows"] = reason
    else:
        examined.refusals["packing"] = reason
        examined.refusals["shared_prefix"] = reason
        network.backbone.packed = False
        network.backbone.set_attention(stock_attention)
    return examined


def _make_probes(model: Model, max_tokens: int) -> list[Ids]:
    width = model.get_input_embeddings().num_embeddings
    special = {getattr(model.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    allowed = np.array([token for token in range(min(width, 4096)) if token not in special])
    generator = np.random.default_rng(7)
    return [
        generator.choice(allowed, min(length, max_tokens)).astype(np.int32) for length in _LENGTHS
    ]


def _run_stock(model: Model, probes: list[Ids], *, causal: bool) -> Tensor:
    rows = []
    for ids in probes:
        given = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
        logits = model(input_ids=given, attention_mask=torch.ones_like(given)).logits
        rows.append(logits[0, -1] if causal else logits[0])
    return torch.stack(rows).float()


def _run_reference(model: Model, probes: list[Ids], *, causal: bool) -> Floats | None:
    with held_in_float32(model) as exact:
        if not exact:
            return None
        stock = _run_stock(model, probes, causal=causal)
        return copy_to_host([stock])[0].numpy().copy()


def _find_head(
    model: Model,
    backbone: Backbone,
    heads: Rows[CausalHead | ClassificationHead],
    probes: list[Ids],
    stock: Tensor,
) -> tuple[Network, Pooling, float]:
    """Return the first head that gives the stock logits on the backbone's padded rows."""
    layout = plan_batch([_sequence(ids) for ids in probes], sharing=False)
    hidden = backbone.run(layout)
    spans = [(read.begin, read.row + 1) for read in layout.reads]
    begins, ends = upload(hidden.device, np.array(spans).T)
    difference = float("inf")
    for head in heads:
        try:
            if isinstance(head, CausalHead):
                logits = head.logits(hidden[ends - 1])
            else:
                logits, _ = head.read(hidden, begins, ends, spans)
        except (ValueError, IndexError, RuntimeError, TypeError):
            continue  # this head cannot take such rows: the next one may
        difference = _compare(logits, stock)
        if difference <= TOLERANCES[hidden.dtype]:
            return Network(backbone, head), head.pooling, difference
    message = (
        f"{type(model).__name__} gives other logits when its head is applied to single rows "
        f"(difference {difference:.3g}): this architecture cannot be served"
    )
    raise ModelLoadError(message)


def _list_heads(model: Model, replay: Replay) -> list[ClassificationHead]:
    linear = find_linear(model)
    direct = [] if linear is None else [Pooling.LAST, Pooling.CLS, Pooling.MEAN]
    replayed = [Pooling.CLS, Pooling.MEAN, Pooling.LAST, Pooling.WHOLE]
    return [
        *(ClassificationHead(model, replay, pooling, linear=linear) for pooling in direct),
        *(ClassificationHead(model, replay, pooling) for pooling in replayed),
    ]


def _refuse_packing(model: Model, backbone: Backbone) -> str | None:
    """Say why a packed layout must not even be tried, or None."""
    name = type(backbone.module).__name__
    if not getattr(type(backbone.module), "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface"
    if not backbone.takes_positions:
        return f"{name} takes no position ids"
    kinds = set(getattr(model.config, "layer_types", None) or [])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of another kind: {', '.join(sorted(unknown))}"
    return None


def _try_packing(examined: Examined, probes: list[Ids]) -> str | None:
    """Turn packing on where it gives the stock attention's hidden states, else say why not."""
    backbone = examined.network.backbone
    layout = plan_batch([_sequence(ids) for ids in probes], sharing=False)
    stock = backbone.run(layout)
    backbone.packed = True
    backbone.set_attention(packing.NAME)
    pad = getattr(backbone.module.config, "pad_token_id", None)
    difference = float("inf")
    for offset in (0, *((pad + 1,) if isinstance(pad, int) else ())):
        backbone.position_offset = offset
        layout.trace.clear()
        try:
            packed = backbone.run(layout)
        except (packing.UnsupportedAttentionError, TypeError, ValueError, IndexError) as error:
            return f"packed attention is not possible: {error}"
        if not layout.trace:
            return "the model does not call the attention that it is given"
        difference = _compare(packed, stock)
        if difference <= TOLERANCES[stock.dtype]:
            return _check_windows(examined, layout.trace)
    return f"packed attention differs from the stock one by {difference:.3g}"


def _check_windows(examined: Examined, trace: list[tuple[bool, int | None]]) -> str | None:
    kinds = getattr(examined.network.backbone.module.config, "layer_types", None)
    told = sum(window is not None for _, window in trace)
    if kinds and told < sum(kind == "sliding_attention" for kind in kinds):
        return "the model does not tell its attention which layers slide"
    return None


def _try_sharing(examined: Examined, probes: list[Ids]) -> str | None:
    """Turn prefix sharing on where it gives the same hidden states, else say why not."""
    network = examined.network
    prefix = probes[0][:_SHARED]
    alone = [np.concatenate([prefix, ids]) for ids in probes[1:]]
    layout = plan_batch([_sequence(ids) for ids in alone], sharing=False)
    stock = network.backbone.run(layout)
    if not layout.trace or not all(causal for causal, _ in layout.trace):
        return "attention looks both ways: a prefix's states depend on what follows it"
    group = [_sequence(ids, group=b"probe", prefix=_SHARED) for ids in alone]
    shared_layout = plan_batch(group, sharing=True)
    shared = network.backbone.run(shared_layout)
    ends = torch.tensor([read.row for read in layout.reads])
    shared_ends = torch.tensor([read.row for read in shared_layout.reads])
    difference = _compare(shared[shared_ends], stock[ends])
    if difference > TOLERANCES[stock.dtype]:
        return f"shared prefixes differ from whole sequences by {difference:.3g}"
    network.sharing = True
    return None


def _try_pruning(examined: Examined, probes: list[Ids]) -> str | None:
    """Cut the last layer to the rows that are read where it gives the same, else say why not."""
    network = examined.network
    backbone = network.backbone
    if examined.pooling not in (Pooling.LAST, Pooling.CLS):
        return "the head reads whole sequences"
    if not install_last_layer(backbone.module):
        return "the last layer is not one of a list of layers"
    prefix = probes[0][:_SHARED]
    together = [
        _sequence(np.concatenate([prefix, ids]), group=b"probe", prefix=_SHARED) for ids in probes
    ]
    layout = plan_batch([*together, *map(_sequence, probes)], sharing=network.sharing)
    first = examined.pooling is Pooling.CLS
    rows = np.unique([read.begin if first else read.row for read in layout.reads])
    whole = backbone.run(layout, rows)
    backbone.prunes = True
    try:
        cut = backbone.run(layout, rows)
    except FAULTS as error:
        backbone.prunes = False
        return f"the last layer cannot be called with some rows: {explain(error)}"
    difference = _compare(cut, whole) if cut.shape == whole.shape else float("inf")
    if difference > TOLERANCES[whole.dtype]:
        backbone.prunes = False
        return f"the last layer's rows alone differ by {difference:.3g}"
    return None


def _sequence(ids: Ids, *, group: bytes = b"", prefix: int = 0) -> Sequence:
    return Sequence(ids=ids, cost_tokens=len(ids), group=group, prefix_length=prefix)


def _compare(given: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value.

    Where both are not finite they agree: what a checkpoint's own NaN means is not decided here.
    """
    ours, theirs = (tensor.numpy() for tensor in copy_to_host([given.float(), expected.float()]))
    known = np.isfinite(ours) | np.isfinite(theirs)
    scale = max(float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)), 1e-6)
    difference = float(np.abs(ours[known] - theirs[known]).max(initial=0.0)) / scale
    return difference if np.isfinite(difference) else float("inf")
