"""docs/configuration.md and scorekeep.toml.example say what the code does."""

import re
from pathlib import Path

import msgspec
import pytest

from contract.config import PREFIX, Settings
from contract.models import ModelConfig, parse_models

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"\| `SCOREKEEP_([A-Z_]+)` \| (?:`([^`]*)`)? ?\| (.+) \|")


def test_every_setting_has_its_line() -> None:
    """Each once, with its default, and no other."""
    rows = _ROW.findall((ROOT / "docs" / "configuration.md").read_text())
    documented = {PREFIX + name: default for name, default, _ in rows}
    settings = {
        PREFIX + field.name.upper(): _render_default(field.default)
        for field in msgspec.structs.fields(Settings)
    }

    assert documented == settings
    assert len(rows) == len(settings)


def test_the_example_registry_can_be_read() -> None:
    """As it is, and with every commented key switched on."""
    example = ROOT / "scorekeep.toml.example"

    assert sorted(parse_models(example)) == ["judge", "sentiment"]


def test_the_example_registry_names_only_real_keys(tmp_path: Path) -> None:
    """Every commented key exists and its value has the right type."""
    text = (ROOT / "scorekeep.toml.example").read_text()
    all_on = tmp_path / "scorekeep.toml"
    all_on.write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))

    found = parse_models(all_on)["sentiment"]

    assert found.max_tokens == 512
    assert found.revision == "main"


@pytest.mark.parametrize("key", sorted({*ModelConfig.__struct_fields__} - {"tp_plan"}))
def test_every_key_is_explained(key: str) -> None:
    """A reader of the example finds it, with a value and what it means."""
    text = (ROOT / "scorekeep.toml.example").read_text()

    assert re.search(rf"^(# )?{key} = .+ # \w", text, flags=re.MULTILINE)


def _render_default(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
