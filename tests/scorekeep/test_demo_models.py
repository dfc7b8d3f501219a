"""The demo's checkpoints: conversion from GGUF loses nothing, the fitted head is the optimum."""

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from scorekeep import demo_models
from tests.tiny_models import make_tiny

_BYTES = [chr(code) for code in range(33, 127)]
_TOKENS = ["<|endoftext|>", *_BYTES, "Ġ", "Ġa", "an", "Ġan"]
_MERGES = ["Ġ a", "a n", "Ġa n"]
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conversion changes in the gguf package is put back."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, getattr(gguf, name))


def _make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).bfloat16()


def _write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write the model as llama.cpp's converter does: rows of q and k in its own order."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or 0}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3] + [1] * (len(_TOKENS) - 1))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
        elif name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if count := heads.get(_NAMES[part]):
                shape = (count, 2, array.shape[0] // count // 2, array.shape[1])
                array = np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2)).reshape(
                    array.shape
                )
            writer.add_tensor(f"blk.{layer}.{_NAMES[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.usefixtures("unpatched")
def test_a_gguf_file_becomes_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every logit of the converted checkpoint is the original's; progress and facts are said."""
    model = _make_llama()
    _write_gguf(tmp_path / "tiny.gguf", model)

    demo_models.main(["judge", str(tmp_path / "tiny.gguf"), str(tmp_path / "judge")])

    converted = LlamaForCausalLM.from_pretrained(tmp_path / "judge", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    ids = torch.tensor([[5, 9, 60, 2]])
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)
    assert converted.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "judge/config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("! an")) == ["!", "Ġan"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["done"] for line in lines] == [0, 1, 2, 1]
    count = sum(weight.numel() for weight in model.parameters())
    assert lines[-1]["facts"] == {"parameters": count}


def test_a_classifier_is_trained_on_an_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backbone stays as it was; the head separates what can be separated; labels have names."""
    encoder = make_tiny(tmp_path / "encoder", "BertForSequenceClassification", labels=2)
    sentences = [
        (f"{word} {number}", label)
        for number in range(60)
        for word, label in (("good great film", 1), ("terrible poor sound", 0))
    ]
    (tmp_path / "sentences.json").write_text(json.dumps(sentences))

    demo_models.main(
        [
            *("sentiment", str(encoder), str(tmp_path / "made")),
            *("--sentences", str(tmp_path / "sentences.json")),
        ]
    )

    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["facts"]
    assert (facts["trained_on"], facts["held_out"]) == (96, 24)
    assert facts["accuracy"] > 0.7  # of a random encoder
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made")
    before = BertForSequenceClassification.from_pretrained(encoder)
    assert made.config.id2label == {0: "negative", 1: "positive"}
    for mine, theirs in zip(made.bert.parameters(), before.bert.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    with torch.no_grad():
        logits = made(**tokenizer(["good great film 7"], return_tensors="pt")).logits
    assert logits.argmax() == 1


def test_the_head_is_the_optimum() -> None:
    """The gradient of the regularised loss vanishes, computed by hand."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    truth = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.3], dtype=torch.float64)
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    targets = (features @ truth + 0.4 + noise > 0).double()

    weight, bias = demo_models.fit_head(features.float(), targets.float(), 0.01)

    error = torch.sigmoid(features @ weight.double() + bias.double()) - targets
    gradient = features.T @ error / 200 + 2 * 0.01 * weight.double()
    assert gradient.abs().max() < 1e-5
    assert error.mean().abs() < 1e-5


def test_the_penalty_suits_the_data() -> None:
    """A clean line through features wants less than the strongest penalty."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 40, generator=generator)
    line = (features[:, 0] * 0.05 + features[:, 1] * 0.02 > 0).float()

    assert demo_models.choose_penalty(features, line) < demo_models._PENALTIES[0]


def test_the_gguf_package_has_what_is_memoised() -> None:
    """The names that transformers looks up at each use."""
    parts: list[Any] = [gguf.GGUFReader, gguf.get_tensor_name_map]

    assert all(callable(functools.cache(part)) for part in parts)
