"""Canaries: fixed inputs against what plain transformers gave in float32 at the first load."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from contract.errors import ModelLoadError
from contract.models import CANARY_DRIFT, ModelConfig
from tests.engine.helpers import assert_close
from tests.reference import Reference
from tests.tiny_models import make_tiny
from worker.engine import capabilities, precision
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
Folders = Callable[..., Path]
References = Callable[..., Reference]

LLAMA = "LlamaForSequenceClassification"


def read_record(folder: Path) -> dict[str, Any]:
    """Return the only record."""
    (path,) = folder.glob("*.json")
    record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return record


def change_a_weight(scorer: ModelScorer, factor: float) -> None:
    """Change one parameter under a live model."""
    with torch.no_grad():
        next(scorer.network.backbone.module.parameters()).mul_(factor)


class TestCanary:
    """Fixed inputs against what the stock model gave at the first load."""

    @pytest.mark.parametrize(
        "architecture", [LLAMA, "Gemma2ForCausalLM", "DebertaV2ForSequenceClassification"]
    )
    def test_passes(self, architecture: str, scorer_of: Scorers, tmp_path: Path) -> None:
        """A healthy model passes, also against its record on disk."""
        scorer = scorer_of(architecture)
        scorer.canary = scorer.canary.remember(tmp_path / "deep" / "canary.json")

        first = scorer.check_canary()
        scorer.canary = scorer.canary.remember(tmp_path / "deep" / "canary.json")

        assert first.passed
        assert scorer.check_canary() == first

    def test_drift(self, folder_of: Folders, tmp_path: Path) -> None:
        """Weights that changed in memory are seen; a record of other weights is replaced."""
        folder = make_tiny(tmp_path / "m", LLAMA, seed=7)
        scorer = load_model("canary", ModelConfig(source=str(folder)))
        assert isinstance(scorer, ModelScorer)
        path = tmp_path / "canary.json"
        other = load_model("other", ModelConfig(source=str(folder_of(LLAMA))))
        assert isinstance(other, ModelScorer)
        other.canary.remember(path)
        scorer.canary = scorer.canary.remember(path)
        assert scorer.check_canary().passed

        with torch.inference_mode(mode=False), torch.no_grad():
            next(scorer.network.backbone.module.parameters()).mul_(1.01)

        assert not scorer.check_canary().passed
        with torch.no_grad():
            next(scorer.network.backbone.module.parameters()).fill_(float("nan"))
        assert not scorer.check_canary().passed

    @pytest.mark.parametrize("architecture", [LLAMA, "LlamaForCausalLM"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_reference_is_float32(
        self,
        architecture: str,
        dtype: str,
        folder_of: Folders,
        reference_of: References,
        tmp_path: Path,
    ) -> None:
        """A half-precision model is recorded in float32, and its parameters stay as they are."""
        kind = getattr(torch, dtype)
        folder = folder_of(architecture, dtype=kind)
        config = ModelConfig(source=str(folder), dtype=dtype)

        scorer = load_model("half", config, tmp_path)

        record = read_record(tmp_path)
        reference = reference_of(architecture, dtype=kind)
        expected = [reference.logits(ids)[:64] for ids in record["probes"]]
        assert_close(record["logits"], expected, tolerance=1e-5)
        assert (record["reference"], record["dtype"]) == ("torch.float32", f"torch.{dtype}")
        assert 0 < record["spread"] < 0.1
        assert isinstance(scorer, ModelScorer)
        assert {p.dtype for p in scorer.network.backbone.module.parameters()} == {kind}
        assert scorer.check_canary().passed
        change_a_weight(scorer, 3.0)
        assert not scorer.check_canary().passed

    def test_without_memory(
        self, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the copy would not fit, the served dtype is recorded, and the record says so."""
        monkeypatch.setattr(precision, "free_bytes", lambda _: 1000)
        config = ModelConfig(source=str(folder_of(LLAMA, dtype=torch.bfloat16)), dtype="bfloat16")

        load_model("half", config, tmp_path)

        record = read_record(tmp_path)
        assert (record["reference"], record["spread"]) == ("torch.bfloat16", 0.0)

    def test_the_reference_is_made_once(
        self, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second load holds the model against the first one's record."""
        made = 0
        real = precision.held_in_float32

        @contextmanager
        def count(model: Any) -> Iterator[bool]:
            nonlocal made
            made += 1
            with real(model) as exact:
                yield exact

        monkeypatch.setattr(capabilities, "held_in_float32", count)
        config = ModelConfig(source=str(folder_of(LLAMA)))
        for _ in range(2):
            load_model("m", config, tmp_path)

        assert made == 1
        load_model("other", config, tmp_path)
        assert len(list(tmp_path.glob("*.json"))) == 2

    def test_drift_between_two_loads(self, folder_of: Folders, tmp_path: Path) -> None:
        """A load that no longer gives what the first gave fails, and names the record."""
        config = ModelConfig(source=str(folder_of(LLAMA)))
        load_model("m", config, tmp_path)
        record = read_record(tmp_path)
        record["logits"][1][0] += 0.1
        (path,) = tmp_path.glob("*.json")
        path.write_bytes(msgspec.json.encode(record))

        with pytest.raises(ModelLoadError, match=CANARY_DRIFT) as caught:
            load_model("m", config, tmp_path)

        assert str(path) in caught.value.message

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_is_read_only(self, folder_of: Folders, tmp_path: Path) -> None:
        """The model is served all the same, on this load's own record."""
        tmp_path.chmod(0o500)

        scorer = load_model("m", ModelConfig(source=str(folder_of(LLAMA))), tmp_path)

        assert isinstance(scorer, ModelScorer)
        assert scorer.check_canary().passed

    def test_a_folder_that_is_none(self, folder_of: Folders, tmp_path: Path) -> None:
        """Where no folder can be, the model is served on this load's own record."""
        (tmp_path / "file").write_text("")

        scorer = load_model("m", ModelConfig(source=str(folder_of(LLAMA))), tmp_path / "file")

        assert isinstance(scorer, ModelScorer)
        assert scorer.check_canary().record == ""


class TestPrecision:
    """A model in float32 for a moment."""

    def test_what_cannot_be_raised(self) -> None:
        """Quantised or offloaded parameters are left alone."""
        quantised = torch.nn.Linear(2, 2)
        quantised.weight = torch.nn.Parameter(
            torch.zeros(2, 2, dtype=torch.int8), requires_grad=False
        )
        offloaded = torch.nn.Linear(2, 2, device="meta")

        for module in (quantised, offloaded):
            with precision.held_in_float32(module) as exact:
                assert not exact

    def test_the_parameters_come_back(self) -> None:
        """The same bits, also when something raises."""
        module = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        before = module.weight.detach().clone()

        def raise_within() -> None:
            with precision.held_in_float32(module) as exact:
                assert exact
                assert module.weight.dtype == torch.float32
                raise LookupError

        with pytest.raises(LookupError):
            raise_within()

        assert module.weight.dtype == torch.bfloat16
        assert bool((module.weight == before).all())

    def test_free_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A container's limit counts as well as the machine's memory."""
        monkeypatch.setattr(precision, "_CGROUP", tmp_path)
        free = precision.free_bytes(torch.device("cpu"))
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("400\n")

        assert np.log2(free) > 20
        assert precision.free_bytes(torch.device("cpu")) == 600
