"""Turns downloaded packages into the two checkpoints that ``scorekeep demo`` serves.

The only module of this package that loads torch: it runs as a child process of its own,
``python -m scorekeep.demo_models judge|sentiment SOURCE TARGET``, so that the command line never
pays for the import. Progress goes to standard output, one JSON object a line.
"""

import argparse
import functools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

__all__ = ["choose_penalty", "convert_judge", "fit_head", "main", "train_sentiment"]

_LABELS = ("negative", "positive")
_BATCH = 64
_HELD_OUT = 0.2
_FOLDS = 5
_PENALTIES = (1e-4, 1e-5, 1e-6)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build one checkpoint and say how far it is."""
    parser = argparse.ArgumentParser(prog="python -m scorekeep.demo_models")
    parser.add_argument("model", choices=("judge", "sentiment"))
    parser.add_argument("source", type=Path, help="GGUF file, or folder of the encoder")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--sentences", type=Path, help="JSON list of [text, 0 or 1]")
    options = parser.parse_args(arguments)
    if options.model == "judge":
        facts = convert_judge(options.source, options.target)
    else:
        sentences = json.loads(options.sentences.read_text())
        facts = train_sentiment(options.source, options.target, sentences)
    _tell(done=1, total=1, facts=facts)


def convert_judge(source: Path, target: Path) -> dict[str, Any]:
    """Write the causal LM in the GGUF file ``source`` as a bfloat16 safetensors checkpoint.

    ``save_pretrained`` refuses a model that was loaded from GGUF: its weights are copied into a
    plain model of the same configuration first.
    """
    _tell(done=0, total=3)
    for repeated in ("GGUFReader", "get_tensor_name_map"):
        # transformers parses the file 3 times and builds the map 397 times: half of the time
        setattr(gguf, repeated, functools.cache(getattr(gguf, repeated)))
    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**names)
    _tell(done=1, total=3)
    loaded = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.bfloat16)
    _tell(done=2, total=3)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return {"parameters": sum(weight.numel() for weight in plain.parameters())}


def train_sentiment(
    source: Path, target: Path, sentences: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    """Fit a linear head on the frozen encoder in ``source`` and write both as one classifier.

    A fifth of the sentences is held out; the head never sees it and ``accuracy`` is measured on it.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.no_truncation()  # the encoder's file cuts at 128 and pads to it
    tokenizer.backend_tokenizer.no_padding()
    model = BertForSequenceClassification.from_pretrained(
        source,
        id2label=dict(enumerate(_LABELS)),
        label2id={label: index for index, label in enumerate(_LABELS)},
    )
    model.eval()  # type: ignore[no-untyped-call]
    shuffled = list(sentences)
    random.Random(0).shuffle(shuffled)  # noqa: S311  # a split, not a secret
    features_ND = _encode(model, tokenizer, [text for text, _ in shuffled])
    targets_N = torch.tensor([float(label) for _, label in shuffled])
    cut = int(len(shuffled) * (1 - _HELD_OUT))
    penalty = choose_penalty(features_ND[:cut], targets_N[:cut])
    weight_D, bias = fit_head(features_ND[:cut], targets_N[:cut], penalty)
    with torch.no_grad():
        # softmax over (-z/2, z/2) is sigmoid(z): the fitted line, exactly, as two rows
        model.classifier.weight.copy_(torch.stack((-weight_D / 2, weight_D / 2)))
        model.classifier.bias.copy_(torch.stack((-bias / 2, bias / 2)))
        guesses_N = model.classifier(features_ND[cut:]).argmax(-1)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    right = int((guesses_N == targets_N[cut:]).sum())
    held_out = len(shuffled) - cut
    return {"trained_on": cut, "held_out": held_out, "accuracy": right / held_out}


def choose_penalty(features_ND: Tensor, targets_N: Tensor) -> float:
    """Return the L2 penalty with the best five-fold accuracy on these rows, which hold no test row.

    The rows must be in random order: fold k is every fifth row from k.
    """
    fold_N = torch.arange(len(targets_N)) % _FOLDS

    def count_right(penalty: float) -> int:
        right = 0
        for fold in range(_FOLDS):
            kept_N = fold_N != fold
            weight_D, bias = fit_head(features_ND[kept_N], targets_N[kept_N], penalty)
            guesses_N = features_ND[~kept_N] @ weight_D + bias > 0
            right += int((guesses_N == targets_N[~kept_N]).sum())
        return right

    return max(_PENALTIES, key=count_right)


def fit_head(features_ND: Tensor, targets_N: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the logistic regression of 0/1 targets, by L-BFGS in float64.

    The loss is the mean cross-entropy and ``penalty`` times the squared norm of the weight.
    """
    features_ND, targets_N = features_ND.double(), targets_N.double()
    weight_D = torch.zeros(features_ND.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS((weight_D, bias), max_iter=500, line_search_fn="strong_wolfe")

    def measure() -> Tensor:
        optimiser.zero_grad()
        logits_N = features_ND @ weight_D + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_N, targets_N)
        loss = loss + penalty * weight_D.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(measure)  # type: ignore[no-untyped-call]
    return weight_D.detach().float(), bias.detach().float()


@torch.no_grad()
def _encode(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> Tensor:
    """Return pooler features ``[N, D]`` in the order of ``texts``; batches are sorted by length."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    features_ND = torch.empty(len(texts), model.config.hidden_size)
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        batch = tokenizer(
            [texts[index] for index in chosen],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        features_ND[torch.tensor(chosen)] = model.bert(**batch).pooler_output
        _tell(done=begin + len(chosen), total=len(order) + 1)
    return features_ND


def _tell(*, done: int, total: int, facts: dict[str, Any] | None = None) -> None:
    line = {"done": done, "total": total, **({"facts": facts} if facts else {})}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
