"""A checkpoint looked at before it is served."""

from pathlib import Path

from contract.findings import Finding
from contract.models import ModelConfig, ModelDescription
from worker.checking import check_model
from worker.engine.deterministic import SOURCE


def test_it_says_what_it_can_do_or_why_not(tmp_path: Path) -> None:
    """A description, or a finding in the words of the loader."""
    good = check_model("mine", ModelConfig(source=SOURCE))
    bad = check_model("mine", ModelConfig(source=str(tmp_path)))

    assert isinstance(good, ModelDescription)
    assert good.labels == ["negative", "positive"]
    assert isinstance(bad, Finding)
    assert not bad.ok
    assert "config.json" in bad.detail
