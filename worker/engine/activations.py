"""What turns logits into scores: the only place for softmax and sigmoid, always in float64.

Half precision rounds the top scores to 1.0 and ties them, and a softmax that is shifted by the
element of largest absolute value overflows: so float64, centred by the maximum.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.scores import Activation

__all__ = ["activate", "apply_sigmoid", "apply_softmax", "read_default_activation"]

Doubles = NDArray[np.float64]

_BY_NAME = {
    "identity": Activation.NONE,
    "linear": Activation.NONE,
    "none": Activation.NONE,
    "sigmoid": Activation.SIGMOID,
    "softmax": Activation.SOFTMAX,
}
_BY_PROBLEM = {
    "single_label_classification": Activation.SOFTMAX,
    "multi_label_classification": Activation.SIGMOID,
    "regression": Activation.NONE,
}


def apply_softmax(logits: NDArray[Any], *, temperature: float = 1.0) -> Doubles:
    """Return the softmax over the last axis of ``logits / temperature``."""
    wide = logits.astype(np.float64)
    below = wide - wide.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the maximum to -inf
        weights = np.exp(below / temperature)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def apply_sigmoid(logits: NDArray[Any]) -> Doubles:
    """Return the logistic function of each element; large negative ones do not overflow."""
    wide = logits.astype(np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1.0, small) / (1.0 + small)


def activate(logits: NDArray[Any], activation: Activation, *, temperature: float = 1.0) -> Doubles:
    """Apply ``activation``, which must not be ``MODEL``: that one is resolved by the caller."""
    match activation:
        case Activation.SOFTMAX:
            return apply_softmax(logits, temperature=temperature)
        case Activation.SIGMOID:
            return apply_sigmoid(logits)
        case _:
            return logits.astype(np.float64)


def read_default_activation(config: dict[str, Any], label_count: int) -> Activation | None:
    """Return what a checkpoint's config says is applied to its logits.

    sentence-transformers' entries come first, then ``problem_type``, then what transformers'
    own pipeline does: softmax over several labels, sigmoid of one. None where the checkpoint
    names a function that is not known here.
    """
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named:
        return _BY_NAME.get(str(named).rsplit(".", 1)[-1].lower())
    problem = config.get("problem_type")
    if problem in _BY_PROBLEM:
        return _BY_PROBLEM[problem]
    return Activation.SOFTMAX if label_count > 1 else Activation.SIGMOID
