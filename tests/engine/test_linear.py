"""Packed weights: the same numbers, and the ordinary product wherever they are no gain."""

from typing import Any

import pytest
import torch
from torch import nn

from worker.engine import linear
from worker.engine.linear import pack_weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class _Model(nn.Module):
    """Two layers that are large enough, one that is not, and a vocabulary."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(96, 160)
        self.down = nn.Linear(160, 96, bias=False)
        self.small = nn.Linear(96, 8)
        self.vocabulary = nn.Linear(96, 512, bias=False)
        self.to(dtype).requires_grad_(requires_grad=False)

    def get_output_embeddings(self) -> nn.Linear:
        """As transformers' models have it."""
        return self.vocabulary

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one row per row."""
        hidden: torch.Tensor = self.down(torch.tanh(self.up(rows)))
        return hidden


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed products win every trial: what this processor prefers is not the matter here."""
    monkeypatch.setattr(linear, "_WORTH", float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 96), (17, 96), (2, 5, 96), (1, 3000, 96)])
@pytest.mark.usefixtures("always")
def test_the_numbers_stay(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of any number of rows, in any number of dimensions, contiguous or not."""
    model = _Model(dtype)
    rows = torch.randn(*shape).to(dtype)
    apart = torch.randn(*shape, 2).to(dtype)[..., 0]
    with torch.inference_mode():
        expected = [model(rows), model(apart)]
        assert pack_weights(model)
        found = [model(rows), model(apart)]

    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(
            ours, theirs, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=1e-2
        )
    assert [type(layer) is nn.Linear for layer in model.children()] == [False, False, True, True]


@pytest.mark.usefixtures("always")
def test_a_model_held_in_another_dtype_uses_its_parameters() -> None:
    """The reference of a canary is computed in float32, not with what was packed before."""
    model = _Model(torch.bfloat16)
    pack_weights(model)
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.float() * 2
    rows = torch.randn(4, 96)
    with torch.inference_mode():
        found = model.up(rows)
        expected = rows @ (kept[0].float() * 2).T + kept[1].float() * 2

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def _slower(*_: Any) -> Any:
    message = "no such operation"
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_WORTH", 0.0),  # never faster
        ("free_bytes", lambda _: 1000),  # no memory
        ("_pack", _slower),  # another version of torch
        ("_multiply", lambda rows, _packed, _bias: rows @ torch.ones(rows.shape[1], 160)),  # wrong
    ],
)
@pytest.mark.usefixtures("always")
def test_it_is_left_alone(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing is no gain, has no room, is missing or gives other numbers."""
    monkeypatch.setattr(linear, name, value)
    model = _Model()

    assert not pack_weights(model)
    assert {type(layer) for layer in model.children()} == {nn.Linear}


def test_nothing_to_pack() -> None:
    """A model of small or of half-precision layers is no candidate."""
    assert not pack_weights(_Model(torch.float16))
