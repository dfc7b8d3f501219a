"""Small words for the engine's tests: score a request, draw token ids, compare."""

from typing import Any

import msgspec
import numpy as np

from contract.scores import ScoreRequest
from worker.engine.seam import JobScores, Scorer

__all__ = ["assert_close", "draw_ids", "logits_of", "make_request", "score", "score_request"]


def score(scorer: Scorer, **fields: Any) -> JobScores:
    """Put one request through the whole engine."""
    return score_request(scorer, make_request(**fields))


def make_request(**fields: Any) -> ScoreRequest:
    """Return the request that these fields' JSON would be."""
    return msgspec.convert(fields, ScoreRequest)


def score_request(scorer: Scorer, request: ScoreRequest) -> JobScores:
    """Put one request through the whole engine, checked as the API checks it."""
    prepared = scorer.prepare(request.check(max_items=10_000))
    return scorer.finish(prepared, scorer.forward(prepared.sequences))


def draw_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return lists of ordinary token ids of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(8, 300, length).tolist() for length in lengths]


def logits_of(scores: JobScores) -> np.ndarray[Any, Any]:
    """Return the raw logits, or the label logits."""
    return np.asarray(scores.tensors["logits"], np.float64)


def assert_close(given: Any, expected: Any, *, tolerance: float) -> None:
    """Fail unless every element is within ``tolerance``; NaN equals NaN."""
    np.testing.assert_allclose(given, expected, rtol=0, atol=tolerance)
