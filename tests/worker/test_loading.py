"""The door to the engine: what needs no torch never waits for it, and real models come through."""

import subprocess
import sys

from tests.worker.processes import ROOT

_SCRIPT = """
import sys
import worker.main
from contract.models import ModelConfig
from contract.scores import ScoreRequest
from worker.loading import create_engine

engine = create_engine()
scorer = engine.load_model("sums", ModelConfig(source="builtin:deterministic"))
request = ScoreRequest(items=[[1, 2], [3]], return_pooled_hidden_states=True)
prepared = scorer.prepare(request)
scores = scorer.finish(prepared, scorer.forward(prepared.sequences))
names = {tensor.name for tensor in engine.encode({"job_1": scores}).tensors["job_1"]}
assert names == {"scores", "logits", "hidden_states"}, names
loaded = {"torch", "transformers"} & set(sys.modules)
assert not loaded, loaded
"""


def test_the_deterministic_scorer_loads_and_encodes_without_torch() -> None:
    """Loading, scoring, encoding and all that delivers import neither torch nor transformers."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
