"""The registry file is read strictly, and a request is held against the model it names."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.errors import InvalidRequestError, SettingsError
from contract.models import (
    ModelDescription,
    ScoringPath,
    check_request,
    list_refusals,
    parse_models,
)
from contract.scores import Activation, Determinism, Mode, ScoreRequest, Truncation


def _model(path: ScoringPath, **fields: Any) -> ModelDescription:
    return ModelDescription(
        name="m",
        path=path,
        architecture="A",
        hidden_size=8,
        max_tokens=64,
        dtype="float32",
        device="cpu",
        **fields,
    )


CAUSAL = _model(ScoringPath.CAUSAL, vocabulary=100)
HALF = msgspec.structs.replace(CAUSAL, dtype="bfloat16")
ONE_LABEL = _model(ScoringPath.CLASSIFICATION, label_count=1)
BRANCHES = {"label_token_ids", "multi_token", "loglikelihood", "return_token_logprobs"}
TOLD = _model(ScoringPath.CLASSIFICATION, label_count=2, instruction="")
TWO_LABELS = _model(ScoringPath.CLASSIFICATION, label_count=2)


def test_a_registry_file_gives_one_entry_per_table(tmp_path: Path) -> None:
    """Defaults are filled in, and a local source is found from the file, not from the process."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "scorekeep.toml"
    file.write_text(
        '[models.a]\nsource = "model"\nmax_tokens = 12\n[models.b]\nsource = "org/name"\n'
    )

    models = parse_models(file)

    assert models["a"].source == str(tmp_path / "model")
    assert (models["a"].max_tokens, models["a"].dtype) == (12, "auto")
    assert models["b"].source == "org/name"
    assert not models["b"].trust_remote_code


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r"no \[models.NAME\] table"),
        ("[models.a]\n", "missing required field `source`"),
        ('[models.a]\nsource = "x"\nmax_token = 3', "unknown field `max_token`"),
        ('[models.a]\nsource = "x"\nmax_tokens = 0', "max_tokens"),
        ('[model.a]\nsource = "x"', "unknown field `model`"),
        ("[models", "Expected"),
        (None, "No such file"),
    ],
)
def test_a_bad_registry_file_is_refused(tmp_path: Path, text: str | None, fault: str) -> None:
    """The error names the file and the field."""
    file = tmp_path / "scorekeep.toml"
    if text is not None:
        file.write_text(text)

    with pytest.raises(SettingsError, match=fault) as caught:
        parse_models(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("model", "fields", "param", "message"),
    [
        (CAUSAL, {}, "label_token_ids", "give label_token_ids or labels"),
        (CAUSAL, {"label_token_ids": [100]}, "label_token_ids[0]", "100 logits"),
        (CAUSAL, {"label_token_ids": [[5, 100]]}, "label_token_ids[0][1]", "100 logits"),
        (CAUSAL, {"labels": ["x"], "activation": Activation.SOFTMAX}, "activation", "apply_softm"),
        (CAUSAL, {"multi_token": True, "label_token_ids": [1]}, "multi_token", "text labels"),
        (
            CAUSAL,
            {"multi_token": True, "labels": ["x y"], "return_token_logprobs": True},
            "multi_token",
            "summed logprobs",
        ),
        *(
            (CAUSAL, {"mode": Mode.LOGLIKELIHOOD, name: value}, name, "no place in mode")
            for name, value in {
                "labels": ["x"],
                "label_token_ids": [1],
                "multi_token": True,
                "apply_softmax": True,
                "item_first": True,
                "return_token_logprobs": True,
                "truncation": Truncation.ITEM,
            }.items()
        ),
        (HALF, {"determinism": Determinism.STRICT, "labels": ["x"]}, "determinism", "float32"),
        (TWO_LABELS, {"mode": Mode.LOGLIKELIHOOD}, "mode", "is for causal models"),
        (TWO_LABELS, {"multi_token": True}, "multi_token", "is for causal models"),
        (TWO_LABELS, {"instruction": ""}, "instruction", "takes no instruction"),
        (TOLD, {"items": [[1, 2]], "instruction": "x"}, "instruction", "is for text"),
        (ONE_LABEL, {"apply_softmax": True}, "apply_softmax", "sigmoid"),
        (ONE_LABEL, {"activation": Activation.SOFTMAX}, "activation", "constant 1.0"),
        (TWO_LABELS, {"return_token_logprobs": True}, "return_token_logprobs", "no token logprobs"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    model: ModelDescription, fields: dict[str, Any], param: str, message: str
) -> None:
    """The refusal names the field and says what to do."""
    with pytest.raises(InvalidRequestError) as caught:
        check_request(ScoreRequest(**{"items": ["a"], **fields}), model)

    assert caught.value.param == param
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "fields", "warnings"),
    [
        (CAUSAL, {"label_token_ids": [0, 99]}, 0),
        (CAUSAL, {"label_token_ids": [[0], [99]]}, 0),
        (CAUSAL, {"labels": ["x y", "z"], "multi_token": True}, 0),
        (CAUSAL, {"mode": Mode.LOGLIKELIHOOD}, 0),
        (CAUSAL, {"mode": Mode.LOGLIKELIHOOD, "truncation": Truncation.QUERY}, 0),
        (CAUSAL, {"labels": ["x"], "determinism": Determinism.STRICT}, 0),
        (CAUSAL, {"labels": ["x"], "return_label_mass": False}, 0),
        (HALF, {"labels": ["x"]}, 0),
        (TWO_LABELS, {"determinism": Determinism.STRICT}, 0),
        (ONE_LABEL, {}, 0),
        (ONE_LABEL, {"apply_softmax": True, "activation": Activation.SIGMOID}, 0),
        (TWO_LABELS, {"apply_softmax": True}, 0),
        (TOLD, {"instruction": "x"}, 0),
        (TWO_LABELS, {"label_token_ids": [7]}, 1),
        (TWO_LABELS, {"labels": ["x"]}, 1),
    ],
)
def test_what_a_model_can_do_passes(
    model: ModelDescription, fields: dict[str, Any], warnings: int
) -> None:
    """Labels given to a classifier are ignored with a warning, not refused."""
    assert len(check_request(ScoreRequest(items=["a"], **fields), model)) == warnings


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (CAUSAL, {"activation", "instruction"}),
        (HALF, {"activation", "determinism", "instruction"}),
        (ONE_LABEL, {"apply_softmax", "instruction", *BRANCHES}),
        (TWO_LABELS, {"instruction", *BRANCHES}),
        (TOLD, BRANCHES),
    ],
)
def test_what_a_model_refuses_is_found_by_asking(
    model: ModelDescription, refused: set[str]
) -> None:
    """Each thing that this model does not do, with what a request for it would be told."""
    found = list_refusals(lambda request: check_request(request, model))

    assert found.keys() == refused
    assert all("m" in reason for reason in found.values())
    if "apply_softmax" in refused:
        assert "constant 1.0" in found["apply_softmax"]
