"""The demo runs to its end with the real processes; tiny models stand in for the large ones."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scorekeep import demo
from tests.tiny_models import make_tiny


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_scores_fetches_and_is_called_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both paths, hidden states of both, two verified webhooks, timings; no setting leaks in."""
    words: dict[str, Any] = {
        "id2label": {0: "negative", 1: "positive"},
        "label2id": {"negative": 0, "positive": 1},
    }
    sentiment = make_tiny(
        tmp_path / "sentiment", "BertForSequenceClassification", labels=2, **words
    )
    added: dict[str, Any] = {"added": (" positive", " negative")}
    judge = make_tiny(
        tmp_path / "judge", "LlamaForCausalLM", tokenizer=added, max_position_embeddings=1024
    )
    facts = {"trained_on": 1, "held_out": 2, "accuracy": 0.5, "sentences": "nowhere"}
    (sentiment / "demo.json").write_text(json.dumps(facts))

    def prepare(_cache: Path, progress: Callable[[str, int, int], None]) -> dict[str, Path]:
        progress("step", 0, 1)
        progress("step", 1, 1)
        return {"sentiment": sentiment, "judge": judge}

    monkeypatch.setattr(demo, "prepare_models", prepare)
    monkeypatch.setenv("SCOREKEEP_DATABASE_URL", "postgresql+asyncpg://nobody@127.0.0.1:1/none")
    printed = io.StringIO()

    demo.run_demo(Console(file=printed, width=200), tmp_path)

    text = printed.getvalue()
    assert text.count("signature verified") == 2
    assert text.count("hidden states (8, 32) float32") == 2
    assert "Done in" in text
