"""Families beyond the fixtures: whatever transformers can build is served right, or says why not.

Models are built in memory from small configs; the stock model answers before it is taken apart.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from contract.errors import ModelLoadError
from tests.engine.helpers import assert_close
from worker.engine import packing
from worker.engine.capabilities import Examined, examine
from worker.engine.foreign import Model
from worker.engine.seam import Sequence

SMALL: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LENGTHS = (3, 40, 11, 11, 70, 1)


def build(kind: str, config: str, **fields: Any) -> Model:
    """Return a small random model; every parameter is random."""
    made = getattr(transformers, config)(**(SMALL | fields))
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made).eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def compare(model: Model, *, causal: bool, tolerance: float = 1e-5) -> Examined:
    """Hold the engine's batch against the stock model, one by one; return what was found out."""
    packing.register()
    generator = np.random.default_rng(3)
    ids = [generator.integers(5, 119, length).astype(np.int32) for length in LENGTHS]
    expected = []
    for one in ids:
        given = torch.from_numpy(one.astype(np.int64))[None]
        logits = model(input_ids=given, attention_mask=torch.ones_like(given)).logits
        expected.append((logits[0, -1] if causal else logits[0]).numpy())

    found = examine(model, causal=causal, max_tokens=100)

    labels = np.arange(120, dtype=np.int32) if causal else None
    sequences = [Sequence(one, len(one), labels=labels, wants_mass=causal) for one in ids]
    values = np.stack([reading.values for reading in found.network.read(sequences)])
    assert_close(values, np.stack(expected), tolerance=tolerance)
    return found


@pytest.mark.parametrize(
    ("kind", "config", "fields"),
    [
        ("MixtralForCausalLM", "MixtralConfig", EXPERTS | {"num_local_experts": 4}),
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "head_dim": 8}),
        ("CohereForCausalLM", "CohereConfig", GROUPED | {"logit_scale": 0.3}),
        ("GraniteForCausalLM", "GraniteConfig", GROUPED | {"logits_scaling": 4.0}),
        ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
        ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
        ("FalconForCausalLM", "FalconConfig", {"new_decoder_architecture": False}),
    ],
)
def test_causal(kind: str, config: str, fields: dict[str, Any]) -> None:
    """Experts, scaled logits, other norms: the model's own head makes the logits."""
    compare(build(kind, config, **fields), causal=True)


def test_decoder_with_a_deep_head() -> None:
    """A decoder whose head is more than one linear layer is read at its last token."""
    model = build(
        "ModernBertDecoderForSequenceClassification",
        "ModernBertDecoderConfig",
        num_labels=3,
        cls_token_id=1,
        sep_token_id=2,
    )

    found = compare(model, causal=False)

    assert found.pooling == "last"


@pytest.mark.parametrize(
    ("kind", "config", "fields", "reason"),
    [
        ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}, "attention interface"),
        (
            "GptOssForCausalLM",
            "GptOssConfig",
            EXPERTS | {"num_local_experts": 4, "head_dim": 8},
            "s_aux",
        ),
        ("MambaForCausalLM", "MambaConfig", {}, "attention interface"),
        ("NemotronForCausalLM", "NemotronConfig", GROUPED, "packed attention is not possible"),
        (
            "MiniMaxForCausalLM",
            "MiniMaxConfig",
            EXPERTS | {"num_local_experts": 4, "head_dim": 8},
            "another kind",
        ),
    ],
)
def test_not_packed(kind: str, config: str, fields: dict[str, Any], reason: str) -> None:
    """Sinks, masks, linear attention, state space: padded, right, and the description says why."""
    found = compare(build(kind, config, **fields), causal=True)

    assert reason in found.refusals["packing"]
    assert not found.network.backbone.packed
    assert not found.network.sharing


def test_packing_that_differs() -> None:
    """MobileBERT takes the hook and gives other numbers: the probe at load finds out."""
    model = build(
        "MobileBertForSequenceClassification",
        "MobileBertConfig",
        num_labels=3,
        embedding_size=32,
        intra_bottleneck_size=32,
    )

    found = compare(model, causal=False)

    assert "differs from the stock" in found.refusals["packing"]


def test_head_that_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose logits depend on more than the pooled rows is refused, not served wrong."""
    model = build("LlamaForCausalLM", "LlamaConfig", **GROUPED)
    plain = type(model).forward

    def forward(self: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
        output = plain(self, input_ids, **arguments)
        output.logits = output.logits + input_ids.shape[1]
        return output

    monkeypatch.setattr(type(model), "forward", forward)

    with pytest.raises(ModelLoadError, match="gives other logits"):
        examine(model, causal=True, max_tokens=100)


def test_model_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the architecture itself raises is a load error, with its first line."""
    model = build("LlamaForCausalLM", "LlamaConfig", **GROUPED)

    def forward(*_: Any, **__: Any) -> None:
        message = "needs a camera\nand more"
        raise ValueError(message)

    monkeypatch.setattr(type(model), "forward", forward)

    with pytest.raises(ModelLoadError, match=r"needs a camera \(ValueError\)"):
        examine(model, causal=True, max_tokens=100)
