"""Tiny random checkpoints of real architectures: real configs, safetensors, a real tokenizer.

``make_tiny(folder, "LlamaForSequenceClassification")`` writes what ``from_pretrained`` reads.
Fixtures of the session hold the common ones; ``pytest_plugins = ["tests.tiny_models"]`` or an
import brings them into a conftest.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = [
    "CAUSALS",
    "CLASSIFIERS",
    "DECODERS",
    "ENCODERS",
    "make_tiny",
    "make_tokenizer",
    "tiny_bert",
    "tiny_llama_causal",
    "tiny_llama_classifier",
    "tiny_qwen2_classifier",
    "tiny_qwen3_causal",
]

VOCABULARY = 384
HIDDEN = 32

_SENTENCES = [
    "the service scores every item and keeps what it found until you say otherwise",
    "a good film with a great cast, and a plot that holds to the end",
    "terrible sound, poor battery; i would not buy this phone again",
    "yes, the answer is correct. no, the answer is wrong and the reason is plain",
    "question: is the capital of france paris? answer: yes",
    "the quick brown fox jumps over the lazy dog while seven wizards box",
    "He said: 'positive' or 'negative', Never both! (2026, 12:30 - 100%)",
    "naïve café über straße — ¿qué? 你好 世界 привет мир",
]

#: family prefix -> (config class, what differs from the common small config)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "Mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 16}),
    "Qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "Gemma": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 8}),
    "Gemma2": (
        "Gemma2Config",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    ),
    "Gemma3Text": (
        "Gemma3TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    "GPT2": ("GPT2Config", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "GPTNeoX": ("GPTNeoXConfig", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", {}),
    "Roberta": ("RobertaConfig", {"max_position_embeddings": 514}),
    "XLMRoberta": ("XLMRobertaConfig", {"max_position_embeddings": 514}),
    "DistilBert": (
        "DistilBertConfig",
        {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "Electra": ("ElectraConfig", {"embedding_size": 16}),
    "DebertaV2": (
        "DebertaV2Config",
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
    ),
    "MPNet": ("MPNetConfig", {"max_position_embeddings": 514}),
    "ModernBert": (
        "ModernBertConfig",
        {"local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Albert": ("AlbertConfig", {"embedding_size": 16}),
}
CLASSIFIERS = [f"{family}ForSequenceClassification" for family in [*ENCODERS, *DECODERS]]
CAUSALS = [
    {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(f, f"{f}ForCausalLM")
    for f in DECODERS
]
_FAMILIES = {"GPT2LMHeadModel": "GPT2", "Gemma3ForCausalLM": "Gemma3Text", "BertModel": "Bert"}
_WITHOUT_TYPES = {"Roberta", "XLMRoberta", "MPNet", "DistilBert", "ModernBert"}
_ROBERTA_LIKE = {"Roberta", "XLMRoberta", "MPNet"}


def make_tiny(
    folder: Path,
    architecture: str,
    *,
    labels: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a tiny random checkpoint of ``architecture`` and its tokenizer; return ``folder``.

    ``config`` overrides the config's fields; ``tokenizer`` goes to ``make_tokenizer``. Every
    parameter, biases and norms included, is random, so that a part left out changes the scores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family = _FAMILIES.get(architecture, architecture.split("For", maxsplit=1)[0])
    encoder = family in ENCODERS
    words = make_tokenizer(family, **(tokenizer or {}))
    config_name, special = (ENCODERS if encoder else DECODERS)[family]
    values = _common(words) | special | {"num_labels": labels} | config
    made = getattr(transformers, config_name)(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.15))
    model.to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def make_tokenizer(
    family: str,
    *,
    pad: str | None = "own",
    padding_side: str = "right",
    bos: bool | None = None,
    chat_template: str | None = None,
    added: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """Return a tokenizer as the family's own is built; ``pad`` is "own", "eos" or None."""
    if family in ENCODERS:
        made = _encoder_tokenizer(family)
        words = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=made,
            padding_side=padding_side,
            model_max_length=512,
            model_input_names=["input_ids", "attention_mask"]
            if family in _WITHOUT_TYPES
            else ["input_ids", "token_type_ids", "attention_mask"],
            **_ENCODER_TOKENS[family in _ROBERTA_LIKE],
        )
    else:
        begins = family not in {"GPT2", "GPTNeoX", "Qwen2", "Qwen3"} if bos is None else bos
        words = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=_decoder_tokenizer(begins),
            bos_token="<s>" if begins else None,
            eos_token="</s>",  # noqa: S106  # a token of text
            pad_token={"own": "<pad>", "eos": "</s>", None: None}[pad],
            padding_side=padding_side,
        )
    if chat_template is not None:
        words.chat_template = chat_template
    if added:
        words.add_tokens(list(added), special_tokens=True)
    return words


def _common(words: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "cls_token_id": words.cls_token_id,
        "sep_token_id": words.sep_token_id,
    }


_ENCODER_TOKENS: dict[bool, dict[str, str]] = {
    False: {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    True: {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
}


@functools.cache
def _trained(special: tuple[str, ...], *, words: bool) -> str:
    if words:
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106  # a token of text
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=VOCABULARY - 16, special_tokens=list(special), show_progress=False
        )
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY - 16,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    made.train_from_iterator(_SENTENCES * 4, trainer)
    return str(made.to_str())


def _encoder_tokenizer(family: str) -> Tokenizer:
    if family in _ROBERTA_LIKE:
        made = Tokenizer.from_str(
            _trained(("<s>", "<pad>", "</s>", "<unk>", "<mask>"), words=False)
        )
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        return made
    made = Tokenizer.from_str(_trained(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), words=True))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def _decoder_tokenizer(begins: bool) -> Tokenizer:
    made = Tokenizer.from_str(_trained(("<pad>", "<s>", "</s>"), words=False))
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return made


def _session(name: str, architecture: str, **config: Any) -> Any:
    @pytest.fixture(scope="session", name=name)
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_tiny(tmp_path_factory.mktemp(name), architecture, **config)

    fixture.__doc__ = f"The folder of a tiny {architecture}."
    return fixture


tiny_bert = _session("tiny_bert", "BertForSequenceClassification")
tiny_llama_classifier = _session("tiny_llama_classifier", "LlamaForSequenceClassification")
tiny_qwen2_classifier = _session("tiny_qwen2_classifier", "Qwen2ForSequenceClassification")
tiny_llama_causal = _session("tiny_llama_causal", "LlamaForCausalLM")
tiny_qwen3_causal = _session("tiny_qwen3_causal", "Qwen3ForCausalLM")
