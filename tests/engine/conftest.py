"""The engine's fixtures: every tiny checkpoint, its scorer and its reference, made once."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.models import ModelConfig
from tests.reference import Reference
from tests.tiny_models import make_tiny
from worker.engine.loader import load_model, set_up_threads
from worker.engine.scorer import ModelScorer

#: what a test varies of a checkpoint, as arguments of ``make_tiny``
Folders = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests compute with one thread: several run beside each other."""
    set_up_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Make a tiny checkpoint once for each distinct set of arguments."""
    made: dict[str, Path] = {}

    def find(architecture: str, **options: Any) -> Path:
        key = f"{architecture} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / architecture
            made[key] = make_tiny(folder, architecture, **options)
        return made[key]

    return find


@pytest.fixture(scope="session")
def scorer_of(folder_of: Folders) -> Callable[..., ModelScorer]:
    """Load a tiny checkpoint once; ``entry`` holds fields of its registry entry."""
    made: dict[str, ModelScorer] = {}

    def find(
        architecture: str, *, entry: dict[str, Any] | None = None, **options: Any
    ) -> ModelScorer:
        key = f"{architecture} {entry} {sorted(options.items())}"
        if key not in made:
            folder = folder_of(architecture, **options)
            found = load_model("tiny", ModelConfig(source=str(folder), **(entry or {})))
            assert isinstance(found, ModelScorer)
            made[key] = found
        return made[key]

    return find


@pytest.fixture(scope="session")
def reference_of(folder_of: Folders) -> Callable[..., Reference]:
    """Load a tiny checkpoint once as plain transformers does."""

    @functools.cache
    def load(folder: Path, causal: bool) -> Reference:
        return Reference(folder, causal=causal)

    def find(architecture: str, **options: Any) -> Reference:
        causal = not architecture.endswith("ForSequenceClassification")
        return load(folder_of(architecture, **options), causal)

    return find


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Nothing in the engine draws numbers; a test that does is repeatable."""
    torch.manual_seed(0)
