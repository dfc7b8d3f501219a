"""How far the engine is from plain transformers: architecture x path x layout.

``python -m benchmarks.engine_parity`` makes a tiny random checkpoint of every family and scores a
query of 30 tokens with items of very different lengths alone, in a padded batch, and packed with
the query shared, as the engine would by itself. The reference runs one sequence at a time in fp32
and knows nothing of the engine. Differences are the largest of any item and column: of logits, and
of probabilities (softmax over classes; the full vocabulary's for causal models).
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.models import ModelConfig
from contract.scores import ScoreRequest
from tests.engine.helpers import draw_ids
from tests.reference import Reference
from tests.tiny_models import CAUSALS, CLASSIFIERS, make_tiny
from worker.engine.loader import load_model, set_up_threads
from worker.engine.packing import NAME
from worker.engine.scorer import ModelScorer
from worker.engine.seam import JobScores

LENGTHS = (3, 20, 40, 1, 17, 100, 41, 3, 250)
LABELS = [5, 9, 77]
HEADER = (
    f"{'architecture':40}{'path':16}"
    f"{'alone':>18}{'in a padded batch':>18}{'packed':>18}  layout\n"
    f"{'':56}{'logits   probs':>18}{'logits   probs':>18}{'logits   probs':>18}\n"
)


def main() -> None:
    """Print the table, one line per architecture."""
    set_up_threads(1)
    sys.stdout.write(HEADER)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="scorekeep-parity-") as folder:
        for architecture in [*CLASSIFIERS, *CAUSALS]:
            worst = max(worst, _measure(Path(folder) / architecture, architecture))
    sys.stdout.write(f"largest difference of a probability: {worst:.1e}\n")


def _measure(folder: Path, architecture: str) -> float:
    make_tiny(folder, architecture)
    causal = architecture in CAUSALS
    scorer = load_model("m", ModelConfig(source=str(folder), dtype="float32"))
    assert isinstance(scorer, ModelScorer)
    query, *items = draw_ids(30, *LENGTHS, seed=1)
    reference = Reference(folder, causal=causal)
    expected = np.array([reference.logits(query + item) for item in items])
    cells = []
    worst = 0.0
    for layout in ("alone", "batch", "packed"):
        if layout == "packed" and not scorer.network.backbone.packed:
            cells.append(f"{'-':>18}")
            continue
        found = _score(scorer, query, items, layout, causal=causal)
        logits, probabilities = _compare(found, expected, causal=causal)
        worst = max(worst, probabilities)
        cells.append(f"{logits:>9.1e} {probabilities:>8.1e}")
    sys.stdout.write(
        f"{architecture:40}{scorer.description.path:16}{''.join(cells)}  {_layout(scorer)}\n"
    )
    sys.stdout.flush()
    return worst


def _layout(scorer: ModelScorer) -> str:
    if not scorer.network.backbone.packed:
        return "padded: " + scorer.description.refusals["packing"]
    return "packed, shared prefix" if scorer.network.sharing else "packed"


def _score(
    scorer: ModelScorer, query: list[int], items: list[list[int]], layout: str, *, causal: bool
) -> list[JobScores]:
    """Return one result per forward: many for ``alone``, else one."""
    parts = [[item] for item in items] if layout == "alone" else [items]
    network = scorer.network
    packed, sharing = network.backbone.packed, network.sharing
    if layout == "batch" and packed:
        network.backbone.packed = network.sharing = False
        network.backbone.set_attention("eager")
    try:
        return [_score_one(scorer, query, part, causal=causal) for part in parts]
    finally:
        network.backbone.packed, network.sharing = packed, sharing
        if packed:
            network.backbone.set_attention(NAME)


def _score_one(
    scorer: ModelScorer, query: list[int], items: list[list[int]], *, causal: bool
) -> JobScores:
    request = ScoreRequest(
        query=query,
        items=[*items],
        label_token_ids=[*LABELS] if causal else None,
        apply_softmax=not causal,
    )
    prepared = scorer.prepare(request)
    return scorer.finish(prepared, scorer.forward(prepared.sequences))


def _compare(
    found: list[JobScores], expected: NDArray[np.float64], *, causal: bool
) -> tuple[float, float]:
    logits = np.concatenate([np.asarray(one.tensors["logits"], np.float64) for one in found])
    scores = np.concatenate([np.asarray(one.tensors["scores"], np.float64) for one in found])
    weights = np.exp(expected - expected.max(1, keepdims=True))
    probabilities = weights / weights.sum(1, keepdims=True)
    if causal:
        expected, probabilities = expected[:, LABELS], probabilities[:, LABELS]
    return float(np.abs(logits - expected).max()), float(np.abs(scores - probabilities).max())


if __name__ == "__main__":
    main()
