"""Reward models from their own weight names, against heads applied by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import relu, selu

from contract.errors import ModelLoadError
from contract.models import ModelConfig
from tests.engine.helpers import assert_close, draw_ids, logits_of, score
from tests.reference import Reference
from tests.tiny_models import make_tiny
from worker.engine.loader import load_model
from worker.engine.registry import REWARD_ARCHITECTURES
from worker.engine.rewards import REWARD_CLASSES

URM = "LlamaForSequenceClassificationWithNormal_Weights"

Rewrite = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def rewrite(folder: Path, change: Rewrite, **config: Any) -> dict[str, torch.Tensor]:
    """Change a tiny checkpoint's weights and config; return the new weights."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return weights


def draw(*shape: int) -> torch.Tensor:
    """Return a head's random weight."""
    return torch.randn(*shape) * 0.3


def add_mlp(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace a linear head by the MLP of Qwen's reward models."""
    del weights["score.weight"]
    return weights | {
        "score.0.weight": draw(32, 32),
        "score.0.bias": draw(32),
        "score.2.weight": draw(1, 32),
        "score.2.bias": draw(1),
    }


def add_gate(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add URM's weights MLP."""
    made: dict[str, torch.Tensor] = {}
    for layer, size in ((0, 32), (2, 32), (4, 5)):
        made |= {
            f"weights.fc.{layer}.weight": draw(size, 32),
            f"weights.fc.{layer}.bias": draw(size),
        }
    return weights | made


def to_internlm2(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Write a Llama's weights under InternLM2's names, with its fused attention."""
    made = {"v_head.weight": weights.pop("score.weight")}
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn."
        query, key, value = (weights.pop(f"{stem}{part}_proj.weight") for part in "qkv")
        rows = []
        for head in range(2):
            rows += [query[head * 16 : head * 16 + 16]]
            rows += [key[head * 8 : head * 8 + 8], value[head * 8 : head * 8 + 8]]
        made[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(rows)
    for name, tensor in weights.items():
        renamed = name
        for old, new in names.items():
            renamed = renamed.replace(old, new)
        made[renamed] = tensor
    return made


def last_states(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    """Return the plain backbone's state of each last token."""
    reference = Reference(folder, causal=False)
    return torch.from_numpy(np.stack([reference.hidden(ids, row=-1) for ids in sequences]))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_qwen(family: str, tmp_path: Path) -> None:
    """Two linear layers with biases and a ReLU; the hidden state is what goes into them."""
    folder = make_tiny(tmp_path / "m", f"{family}ForSequenceClassification")
    items = draw_ids(4, 30, 11)
    states = last_states(folder, items)
    weights = rewrite(folder, add_mlp, architectures=[f"{family}ForRewardModel"])

    scorer = load_model("reward", ModelConfig(source=str(folder)))
    found = score(scorer, items=items, return_pooled_hidden_states=True)

    inner = relu(states @ weights["score.0.weight"].T + weights["score.0.bias"])
    expected = inner @ weights["score.2.weight"].T + weights["score.2.bias"]
    assert np.shape(found.tensors["scores"]) == (3, 1)
    assert_close(logits_of(found), expected, tolerance=1e-5)
    assert_close(found.tensors["hidden_states"], states, tolerance=1e-5)
    assert found.labels == ["reward"]
    model = score(scorer, items=items, activation="model")
    assert_close(model.tensors["scores"], expected, tolerance=1e-5)


def test_urm(tmp_path: Path) -> None:
    """Each attribute's mean, weighed by an MLP with SELU, summed."""
    folder = make_tiny(tmp_path / "m", "LlamaForSequenceClassification", labels=10)
    items = draw_ids(4, 30, 11)
    states = last_states(folder, items)
    weights = rewrite(folder, add_gate, architectures=[URM])

    found = score(load_model("urm", ModelConfig(source=str(folder))), items=items)

    gate = states
    for layer in (0, 2, 4):
        gate = gate @ weights[f"weights.fc.{layer}.weight"].T + weights[f"weights.fc.{layer}.bias"]
        gate = selu(gate) if layer < 4 else gate
    means = (states @ weights["score.weight"].T)[:, ::2]
    assert_close(logits_of(found), (means * gate).sum(1, keepdim=True), tolerance=1e-4)


def test_internlm2(tmp_path: Path) -> None:
    """Fused attention weights are taken apart; the reward is v_head's, without any of its code."""
    folder = make_tiny(tmp_path / "m", "LlamaForSequenceClassification", labels=1)
    items = draw_ids(4, 30, 11)
    reference = Reference(folder, causal=False)
    expected = [reference.logits(item) for item in items]
    rewrite(
        folder,
        to_internlm2,
        architectures=["InternLM2ForRewardModel"],
        model_type="internlm2",
        auto_map={"AutoModel": "modeling_internlm2.InternLM2ForRewardModel"},
        rope_theta=10_000,
        bias=False,
    )

    scorer = load_model("internlm2", ModelConfig(source=str(folder)))
    found = score(scorer, query=items[0], items=items)

    alone = score(scorer, items=items)
    assert_close(logits_of(alone), expected, tolerance=1e-5)
    assert found.receipt["shared_prefix_items"] == 3
    assert found.receipt["head"] == "InternLM2ForRewardModel's own"


def test_reward_without_head(tmp_path: Path) -> None:
    """A reward checkpoint that lacks a part of its head is refused by name."""
    folder = make_tiny(tmp_path / "m", "Qwen2ForSequenceClassification")

    def drop(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = add_mlp(weights)
        del made["score.2.bias"]
        return made

    rewrite(folder, drop, architectures=["Qwen2ForRewardModel"])

    with pytest.raises(ModelLoadError, match=r"score\.2\.bias"):
        load_model("reward", ModelConfig(source=str(folder)))


def test_every_reward_class_is_registered() -> None:
    """The names that are known without loading the classes are the classes' names."""
    assert set(REWARD_CLASSES) == REWARD_ARCHITECTURES
