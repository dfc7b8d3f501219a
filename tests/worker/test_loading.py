"""The door to the engine: what needs no torch never waits for it, and real models come through."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.config import Settings
from contract.jobs import JobState
from contract.models import ModelConfig
from tests.worker.harness import Bench
from tests.worker.processes import ROOT
from worker.main import Worker

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


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_real_model_through_a_whole_worker(
    settings: Settings, bench: Bench, tiny_bert: Path
) -> None:
    """Loaded from its folder, scored, stored: the logits are those of a plain forward."""
    texts = ["a good film", "terrible sound, poor battery; i would not buy this phone again"]
    worker = Worker(settings, {"bert": ModelConfig(source=str(tiny_bert), dtype="float32")})
    running = asyncio.create_task(worker.run())
    [job] = await bench.submit(
        texts, model="bert", parameters={"return_pooled_hidden_states": True}
    )
    [row] = await bench.wait(job)
    worker.stop()

    assert await running == 0
    assert row.state is JobState.SUCCEEDED
    assert np.abs(await bench.read(row, "logits") - forward_plainly(tiny_bert, texts)).max() < 1e-5
    assert (await bench.read(row, "hidden_states")).shape == (2, 32)


def forward_plainly(folder: Path, texts: list[str]) -> "np.ndarray[Any, Any]":
    """Return the logits of each text alone, as transformers yields them."""
    import torch  # noqa: PLC0415  # only tests of real models pay for it
    import transformers  # noqa: PLC0415

    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [model(**words(text, return_tensors="pt")).logits[0].numpy() for text in texts]
    return np.stack(rows)
