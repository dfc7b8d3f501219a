"""Options become the children's environment and their registry."""

from pathlib import Path

import pytest

from contract.config import Settings
from contract.errors import SettingsError
from contract.models import parse_models
from scorekeep.launch import LaunchOptions, find_registry, render_environment


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with a data folder, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return Settings(data_dir=str(tmp_path / "data"))


def test_options_beat_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given is set, absolute; what is not given stays as it was."""
    monkeypatch.chdir(tmp_path)
    before = {"PATH": "/bin", "SCOREKEEP_PORT": "1", "SCOREKEEP_HOST": "::1"}

    after = render_environment(LaunchOptions(data=Path("d"), config=Path("c.toml"), port=0), before)

    assert after == {
        "PATH": "/bin",
        "SCOREKEEP_PORT": "0",
        "SCOREKEEP_HOST": "::1",
        "SCOREKEEP_DATA_DIR": f"{tmp_path}/d",
        "SCOREKEEP_CONFIG": f"{tmp_path}/c.toml",
    }


def test_bad_settings_are_found_before_anything_starts() -> None:
    """The children would refuse them one by one."""
    with pytest.raises(SettingsError, match="SCOREKEEP_LEESE"):
        render_environment(LaunchOptions(), {"SCOREKEEP_LEESE": "1"})


def test_models_are_written_into_a_registry(settings: Settings, tmp_path: Path) -> None:
    """Folders become absolute; hub ids and odd characters survive."""
    (tmp_path / 'my "model"').mkdir()
    options = LaunchOptions(models=['a=my "model"', "team/b=org/name"])

    found = parse_models(find_registry(options, settings))

    assert {name: config.source for name, config in found.items()} == {
        "a": f'{tmp_path}/my "model"',
        "team/b": "org/name",
    }


@pytest.mark.parametrize("model", ["a", "a=", "=b", "a b=c", "-a=b"])
def test_a_model_without_name_or_source_is_refused(settings: Settings, model: str) -> None:
    """With the form that is wanted."""
    with pytest.raises(SettingsError, match="write NAME=SOURCE"):
        find_registry(LaunchOptions(models=[model]), settings)


def test_a_name_is_given_once(settings: Settings) -> None:
    """Two sources for one name are a mistake."""
    with pytest.raises(SettingsError, match="a is given twice"):
        find_registry(LaunchOptions(models=["a=b", "a=c"]), settings)


def test_config_and_model_exclude_each_other(settings: Settings) -> None:
    """There is one registry."""
    with pytest.raises(SettingsError, match="either --config or --model"):
        find_registry(LaunchOptions(models=["a=b"], config=Path("c")), settings)


def test_the_registry_is_looked_for_in_order(settings: Settings, tmp_path: Path) -> None:
    """The setting (which --config sets), then scorekeep.toml here, then a sentence that teaches."""
    text = '[models.a]\nsource = "b"\n'
    with pytest.raises(SettingsError, match=r"--model NAME=SOURCE.*scorekeep\.toml"):
        find_registry(LaunchOptions(), settings)
    (tmp_path / "scorekeep.toml").write_text(text)
    assert find_registry(LaunchOptions(), settings) == tmp_path / "scorekeep.toml"
    (tmp_path / "other.toml").write_text(text)
    named = Settings(config="other.toml")
    assert find_registry(LaunchOptions(), named) == tmp_path / "other.toml"


def test_a_wrong_registry_is_found_before_anything_starts(
    settings: Settings, tmp_path: Path
) -> None:
    """With file and field."""
    (tmp_path / "scorekeep.toml").write_text('[models.a]\nsauce = "b"\n')

    with pytest.raises(SettingsError, match=r"scorekeep\.toml.*sauce"):
        find_registry(LaunchOptions(), settings)
