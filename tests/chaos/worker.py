"""``python -m tests.chaos.worker LEDGER [--model NAME …]``: a worker whose scorer keeps a ledger.

The scorer appends ``job attempt`` to the file at the beginning of every forward, before anything
is stored: an account of what was really run that knows nothing of SQL. It scores as
``builtin:deterministic`` does, takes its time, and does what a poisonous item says.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence as Rows
from typing import Any
from unittest import mock

import uvloop

from contract.config import load_settings
from contract.errors import OutOfMemoryError
from contract.logs import set_up_logging
from contract.models import ModelConfig, ModelDescription
from contract.scores import ItemError, ScoreRequest
from worker.engine.deterministic import DeterministicScorer
from worker.engine.encoding import encode
from worker.engine.seam import JobScores, PreparedJob, Reading, Scorer, Sequence
from worker.loading import Engine, create_engine
from worker.main import Worker, choose_models
from worker.tasks import Tasks
from worker.work import Work

__all__ = ["EXIT", "OOM", "RAISE"]

#: Items that raise, end the process, and run out of memory beside more than seven others.
RAISE, EXIT, OOM = "poison: raise", "poison: exit", "poison: out of memory"
_PER_SEQUENCE_S = float(os.environ.get("CHAOS_FORWARD_S", "0.004"))
_LARGEST = 8
_owners: dict[int, tuple[str, int]] = {}


class LedgerScorer:
    """Wraps a scorer: writes down whose sequences it is given, then scores them."""

    def __init__(self, inner: Scorer, ledger: int) -> None:
        self._inner = inner
        self._ledger = ledger

    @property
    def description(self) -> ModelDescription:
        """The inner scorer's."""
        return self._inner.description

    def prepare(self, request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        """See ``Scorer``."""
        return self._inner.prepare(request, within_s=within_s)

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """See ``Scorer``."""
        return self._inner.finish(prepared, readings)

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """See ``Scorer``; obeys poison."""
        lines = {owner for s in sequences if (owner := _owners.get(id(s))) is not None}
        text = "".join(f"{job} {attempt}\n" for job, attempt in sorted(lines))
        os.write(self._ledger, text.encode())
        time.sleep(_PER_SEQUENCE_S * len(sequences))
        texts = {sequence.ids.astype("u1").tobytes().decode() for sequence in sequences}
        if EXIT in texts:
            os._exit(66)
        if RAISE in texts:
            message = "a poisonous item"
            raise ValueError(message)
        if OOM in texts and len(sequences) > _LARGEST:
            raise OutOfMemoryError
        return self._inner.forward(sequences)


def main() -> int:
    """Run a worker until it is told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("--model", action="append")
    arguments = parser.parse_args()
    settings = load_settings()
    set_up_logging(level=settings.log_level, style=settings.log_format)
    ledger = os.open(arguments.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def load(name: str, config: ModelConfig) -> Scorer:
        if config.source.startswith("builtin:"):
            return LedgerScorer(DeterministicScorer(name, config), ledger)
        return create_engine().load_model(name, config)

    score = Tasks.score

    async def score_known(self: Tasks, scorer: Scorer, works: Rows[Work]) -> None:
        """Tell the scorer whose sequence is whose: it is not told in the service."""
        mine: dict[int, Any] = {
            id(sequence): (work.job.id, work.job.attempt)
            for work in works
            if work.prepared is not None
            for sequence in work.prepared.sequences
        }
        _owners.update(mine)
        try:
            await score(self, scorer, works)
        finally:
            for key in mine:
                _owners.pop(key, None)

    configs = choose_models(settings, arguments.model)
    with mock.patch.object(Tasks, "score", score_known):
        return uvloop.run(Worker(settings, configs, Engine(load, encode)).run())


if __name__ == "__main__":
    sys.exit(main())
