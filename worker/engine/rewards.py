"""Reward models that transformers has no class for, built from their checkpoints' weight names.

The only place for their heads; none of their own Python code is run. Each is a decoder whose last
token's state goes through ``apply_head`` and yields one reward.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen2Model, Qwen3Model
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from worker.engine.foreign import Config, Model

__all__ = ["REWARD_CLASSES", "convert_internlm2", "make_internlm2_config"]


class _RewardMixin:
    """One reward per sequence; the plain forward reads the last token and takes no padding."""

    model: Any
    apply_head: Callable[[Tensor], Tensor]

    def forward(self, input_ids: Tensor, **arguments: object) -> SequenceClassifierOutput:
        """Return the rewards ``[B, 1]`` of unpadded sequences."""
        hidden_BLD: Tensor = self.model(input_ids=input_ids, **arguments).last_hidden_state
        logits = self.apply_head(hidden_BLD[:, -1])
        return SequenceClassifierOutput(logits=cast("torch.FloatTensor", logits))


def _make_mlp(config: Config) -> nn.Sequential:
    size: int = config.hidden_size
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))


class Qwen2ForRewardModel(_RewardMixin, Qwen2PreTrainedModel):  # type: ignore[no-untyped-call]
    """Qwen2.5-Math-RM and its kin: an MLP of two layers, ``score.0`` and ``score.2``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.score = _make_mlp(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def apply_head(self, rows_BD: Tensor) -> Tensor:
        """Return rewards ``[B, 1]``."""
        return cast("Tensor", self.score(rows_BD))


class Qwen3ForRewardModel(_RewardMixin, Qwen3PreTrainedModel):  # type: ignore[no-untyped-call]
    """The same head on Qwen3."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.score = _make_mlp(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def apply_head(self, rows_BD: Tensor) -> Tensor:
        """Return rewards ``[B, 1]``."""
        return cast("Tensor", self.score(rows_BD))


class InternLM2ForRewardModel(_RewardMixin, LlamaPreTrainedModel):  # type: ignore[no-untyped-call]
    """InternLM2 is Llama under other weight names; ``v_head`` is linear and bias-free."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.v_head = nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def apply_head(self, rows_BD: Tensor) -> Tensor:
        """Return rewards ``[B, 1]``."""
        return cast("Tensor", self.v_head(rows_BD))


class _Gate(nn.Module):
    """URM's MLP that weighs its attributes."""

    def __init__(self, size: int, attributes: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(size, size),
            nn.SELU(),
            nn.Linear(size, size),
            nn.SELU(),
            nn.Linear(size, attributes),
        )

    def forward(self, rows_BD: Tensor) -> Tensor:
        """Return one weight per attribute."""
        return cast("Tensor", self.fc(rows_BD))


class LlamaForSequenceClassificationWithNormal_Weights(  # type: ignore[no-untyped-call]  # noqa: N801  # its name
    _RewardMixin, LlamaPreTrainedModel
):
    """URM: ``score`` yields mean and spread of each attribute; the means are weighed and summed."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.weights = _Gate(config.hidden_size, config.num_labels // 2)
        self.post_init()  # type: ignore[no-untyped-call]

    def apply_head(self, rows_BD: Tensor) -> Tensor:
        """Return rewards ``[B, 1]``."""
        logits_BC = cast("Tensor", self.score(rows_BD))
        means: Tensor = logits_BC.view(len(rows_BD), -1, 2)[..., 0]
        weighed: Tensor = means * self.weights(rows_BD)
        return weighed.sum(-1, keepdim=True)


REWARD_CLASSES: Mapping[str, Model] = {
    kind.__name__: kind
    for kind in (
        Qwen2ForRewardModel,
        Qwen3ForRewardModel,
        InternLM2ForRewardModel,
        LlamaForSequenceClassificationWithNormal_Weights,
    )
}

_RENAMED = {
    "model.tok_embeddings": "model.embed_tokens",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def make_internlm2_config(raw: Mapping[str, Any]) -> Config:
    """Return the Llama config of an InternLM2 one.

    Its dynamic rope scaling changes nothing up to ``max_position_embeddings``, our limit.
    """
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings",
        "rms_norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    kind: Config = LlamaConfig
    return kind(
        **{name: raw[name] for name in same if name in raw},
        attention_bias=bool(raw.get("bias", False)),
        rope_parameters={"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000)},
        num_labels=1,
        tie_word_embeddings=False,
    )


def convert_internlm2(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Rename InternLM2's weights to Llama's, and take its fused ``wqkv`` apart.

    ``wqkv`` holds, for each key head, its query heads, then its key, then its value.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if "attention.wqkv" in name:
            converted |= _split_fused(name, tensor, config)
            continue
        renamed = name
        for old, new in _RENAMED.items():
            renamed = renamed.replace(old, new)
        converted[renamed] = tensor
    return converted


def _split_fused(name: str, fused: Tensor, config: Config) -> dict[str, Tensor]:
    groups = config.num_attention_heads // config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    parts = fused.view(config.num_key_value_heads, groups + 2, size, *fused.shape[1:])
    layer, _, kind = name.partition("attention.wqkv")
    taken = {"q": parts[:, :groups], "k": parts[:, groups], "v": parts[:, groups + 1]}
    return {
        f"{layer}self_attn.{letter}_proj{kind}": part.reshape(-1, *fused.shape[1:]).contiguous()
        for letter, part in taken.items()
    }
