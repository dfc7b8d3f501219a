"""One safetensors file per batch, and the scorer without a model."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from contract.errors import InvalidRequestError
from contract.models import ModelConfig, ScoringPath
from tests.engine.helpers import make_request, score
from worker.engine.deterministic import DeterministicScorer
from worker.engine.encoding import encode
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Sequence, count_computed_tokens

Scorers = Callable[..., ModelScorer]


def test_any_reader_opens_it(scorer_of: Scorers) -> None:
    """Tensors are named by job, in their dtype, and their byte ranges are absolute."""
    scorer = scorer_of("LlamaForSequenceClassification", entry={"dtype": "bfloat16"})
    jobs = {
        "job_a": score(scorer, items=["a", "b"], return_pooled_hidden_states=True),
        "job_b": score(scorer, items=["c"]),
        "job_c": score(scorer, items=[]),
    }

    found = encode(jobs)

    read = safetensors.torch.load(found.data)
    assert torch.equal(
        read["job_a/hidden_states"], torch.as_tensor(jobs["job_a"].tensors["hidden_states"])
    )
    assert read["job_a/hidden_states"].dtype == torch.bfloat16
    assert (read["job_b/scores"].numpy() == jobs["job_b"].tensors["scores"]).all()
    assert set(found.tensors) == set(jobs)
    for job, tensors in found.tensors.items():
        for tensor in tensors:
            expected = read[f"{job}/{tensor.name}"]
            raw = found.data[tensor.begin : tensor.end]
            assert len(raw) == expected.numel() * expected.element_size()
            assert tensor.shape == tuple(expected.shape)
            if tensor.dtype == "F32":
                assert raw == expected.numpy().tobytes()


class TestDeterministic:
    """A real scorer of the service, for load and chaos runs."""

    def test_same_input_same_score(self) -> None:
        """Scores depend on the input alone, are finite and obey the activation."""
        scorer = load_model("d", ModelConfig(source="builtin:deterministic"))

        one = score(scorer, query="q", items=["a", "b"], apply_softmax=True)
        other = score(scorer, query="q", items=["b"], apply_softmax=True)

        assert np.allclose(np.sum(one.tensors["scores"], 1), 1)
        assert (one.tensors["scores"][1] == other.tensors["scores"][0]).all()
        assert isinstance(scorer, DeterministicScorer)
        assert one.labels == ["negative", "positive"]

    def test_causal(self) -> None:
        """Labels by text, by id and by item; token items; item_first."""
        config = ModelConfig(source="builtin:deterministic", path=ScoringPath.CAUSAL)
        scorer = load_model("d", config)

        by_text = score(scorer, items=["a"], labels=["yes", "no"])
        by_id = score(scorer, query=[1], items=[[2], [3]], label_token_ids=[[1, 2], [3]])
        swapped = score(scorer, query=[1], items=[[2]], label_token_ids=[1], item_first=True)

        assert by_text.labels == ["yes", "no"]
        assert by_id.label_counts == [2, 1]
        assert by_id.tokens[0].used == 2
        assert np.isfinite(swapped.tensors["scores"]).all()
        assert np.all(np.asarray(by_text.tensors["label_mass"]) < 1)

    def test_limits_and_hidden_states(self) -> None:
        """Too long an item fails alone; hidden states come where asked for; checks hold."""
        scorer = load_model("d", ModelConfig(source="builtin:deterministic", max_tokens=5))

        found = score(scorer, items=["abc", "abcdefgh"], return_pooled_hidden_states=True)

        assert [error.code for error in found.errors] == ["input_too_long"]
        assert np.shape(found.tensors["hidden_states"]) == (2, 16)
        encoded = encode({"job": found})
        read = safetensors.numpy.load(encoded.data)
        assert np.isnan(read["job/hidden_states"][1]).all()
        with pytest.raises(InvalidRequestError):
            score(scorer, items=["a"], return_token_logprobs=True)

    def test_it_does_not_load_torch(self) -> None:
        """The seam, the encoding and this scorer are free of torch."""
        code = (
            "import sys, worker.engine.seam, worker.engine.encoding, worker.engine.deterministic;"
            "sys.exit('torch' in sys.modules)"
        )

        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=30)  # noqa: S603

        assert done.returncode == 0


def test_cost_counts_a_shared_prefix_once() -> None:
    """What the batcher budgets with equals what the layout computes."""
    ids = np.arange(10, dtype=np.int32)
    shared = Sequence(ids=ids, cost_tokens=10, group=b"g", prefix_length=6)

    assert count_computed_tokens([shared, shared, Sequence(ids=ids, cost_tokens=10)]) == 24
    assert len(make_request(items="one").item_list) == 1
