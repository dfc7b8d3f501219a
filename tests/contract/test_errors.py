"""The error tree is drawn as it is coded."""

import re

import pytest

from contract import errors
from contract.errors import ScoreError


def _tree(kind: type[ScoreError]) -> list[type[ScoreError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


def test_every_error_is_exported_and_drawn() -> None:
    """The docstring names each class with its status, its code and whether it is retryable."""
    assert errors.__doc__ is not None
    drawn = {
        name: (int(status), code, retryable == "retryable")
        for name, status, code, retryable in re.findall(
            r"(\w+Error) +(\d{3})  (\w+) *(retryable)?", errors.__doc__
        )
    }

    for kind in _tree(ScoreError):
        if kind.__module__ != "contract.errors":
            continue
        assert kind.__name__ in errors.__all__
        if kind.__name__ in drawn:
            assert drawn[kind.__name__] == (kind.http_status, kind.code, kind.retryable)
        else:
            assert kind.__name__ in {"RequestError", "ScoringError"}


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in _tree(ScoreError)
        if kind.__module__ == "contract.errors" and kind.__init__ is ScoreError.__init__
    ],
)
def test_an_error_keeps_what_it_is_told(kind: type[ScoreError]) -> None:
    """Message, param and retry hint are kept, and the message is what it prints as."""
    error = kind("what to do", param="items[3]", retry_after_s=2.5)

    assert str(error) == "what to do"
    assert (error.param, error.retry_after_s) == ("items[3]", 2.5)
