"""One engine in a process of its own: what ``benchmarks.engine_speed`` starts, one per engine.

``python speed_child.py ENGINE MODEL THREADS DTYPE`` prints a JSON line when it is ready, then reads
the name of a JSON file with texts per line of its input, scores them, and answers with a JSON line:
CPU and wall seconds and the scores. It runs in the virtual environment of its engine: it imports
nothing of scorekeep, except as the engine ``scorekeep`` itself.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Score = Callable[[list[str]], list[list[float]]]

#: what people deploy, and what sorted batches of the others hold
_BATCH = 32
_BUDGET_TOKENS = 4096


def main() -> None:
    """Load, then score on demand until the input ends."""
    engine, model, threads, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    began_at = time.monotonic()
    score, about = _ENGINES[engine](model, threads, dtype)
    _answer(answers, {"about": about, "load_s": time.monotonic() - began_at})
    for line in sys.stdin:
        texts = json.loads(Path(line.strip()).read_text())
        wall_s, cpu_s = time.monotonic(), time.process_time()
        rows = score(texts)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        _answer(answers, {"cpu_s": cpu_s, "wall_s": wall_s, "scores": rows})


def _answer(file: Any, given: dict[str, Any]) -> None:  # noqa: ANN401  # a text file
    file.write(json.dumps(given) + "\n")
    file.flush()


def _load_scorekeep(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    from contract.models import ModelConfig
    from contract.scores import ScoreRequest
    from worker.engine.loader import load_model, set_up_threads

    set_up_threads(threads)
    scorer = load_model("m", ModelConfig(source=model, dtype=dtype))

    def score(texts: list[str]) -> list[list[float]]:
        prepared = scorer.prepare(ScoreRequest(items=[*texts], apply_softmax=True))
        sequences = prepared.sequences
        # as the batcher: longest first, up to the budget
        order = sorted(range(len(texts)), key=lambda index: -sequences[index].cost_tokens)
        readings: list[Any] = [None] * len(texts)
        begin = 0
        while begin < len(order):
            end, tokens = begin, 0
            while end < len(order):
                tokens += sequences[order[end]].cost_tokens
                if tokens > _BUDGET_TOKENS and end > begin:
                    break
                end += 1
            batch = order[begin:end]
            found = scorer.forward([sequences[index] for index in batch])
            for index, reading in zip(batch, found, strict=True):
                readings[index] = reading
            begin = end
        rows: list[list[float]] = scorer.finish(prepared, readings).tensors["scores"].tolist()
        return rows

    return score, f"scorekeep, packed, {_BUDGET_TOKENS} tokens a batch, {dtype}"


def _load_gemm(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    """Not an engine: the product of the model's MLP, by whichever way of torch's is faster."""
    import torch

    torch.set_num_threads(threads)
    config = json.loads((Path(model) / "config.json").read_text())
    size, width = config["hidden_size"], config["intermediate_size"]
    weight, rows = (
        torch.randn(*shape).to(getattr(torch, dtype)) for shape in ((width, size), (2048, size))
    )
    onednn: Any = torch.ops.mkldnn
    packed = onednn._reorder_linear_weight(weight, len(rows))  # noqa: SLF001
    ways: dict[str, Callable[[], Any]] = {
        "linear": lambda: torch.nn.functional.linear(rows, weight),
        "packed": lambda: onednn._linear_pointwise(rows, packed, None, "none", [], ""),  # noqa: SLF001
    }
    flops = 2 * rows.numel() * width

    def score(texts: list[str]) -> list[list[float]]:
        del texts
        best = dict.fromkeys(ways, float("inf"))
        with torch.inference_mode():
            for _ in range(12):
                for name, way in ways.items():
                    began_at = time.process_time()
                    way()
                    best[name] = min(best[name], time.process_time() - began_at)
        return [[flops / min(best.values())]]

    return score, f"torch {torch.__version__}: {width} x {size}, 2048 rows, {dtype}"


def _load_torch(model: str, threads: int, dtype: str) -> tuple[Any, Any, str]:
    import torch
    import transformers

    torch.set_num_threads(threads)
    library: Any = transformers
    loaded = library.AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(model)
    return loaded, tokenizer, f"transformers {transformers.__version__}"


def _load_loop(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    import torch

    loaded, tokenizer, version = _load_torch(model, threads, dtype)

    def score(texts: list[str]) -> list[list[float]]:
        with torch.inference_mode():
            rows = [loaded(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
            return [row.softmax(-1).tolist() for row in rows]

    return score, f"{version}, one by one"


def _load_pipeline(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    import transformers

    loaded, tokenizer, version = _load_torch(model, threads, dtype)
    library: Any = transformers
    pipeline = library.pipeline("text-classification", model=loaded, tokenizer=tokenizer)
    names = [loaded.config.id2label[index] for index in range(loaded.config.num_labels)]

    def score(texts: list[str]) -> list[list[float]]:
        found = pipeline(texts, batch_size=_BATCH, top_k=None, function_to_apply="softmax")
        rows = [{one["label"]: one["score"] for one in row} for row in found]
        return [[row[name] for name in names] for row in rows]

    return score, f"{version}, pipeline, batches of {_BATCH} in arrival order"


def _load_cross_encoder(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    loaded: Any = sentence_transformers.CrossEncoder(
        model, device="cpu", model_kwargs={"dtype": dtype}
    )

    def score(texts: list[str]) -> list[list[float]]:
        pairs = [text.split(" ", 1) if " " in text else [text, text] for text in texts]
        found = loaded.predict(
            pairs, batch_size=_BATCH, apply_softmax=True, show_progress_bar=False
        )
        rows: list[list[float]] = found.tolist()
        return rows

    return score, f"sentence-transformers {sentence_transformers.__version__}, pairs (other scores)"


def _load_vllm(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    del threads  # bound by the environment, before torch is imported
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    loaded: Any = vllm.LLM(
        model=model, runner="pooling", dtype=dtype, max_model_len=512, enable_prefix_caching=False
    )

    def score(texts: list[str]) -> list[list[float]]:
        return [one.outputs.probs for one in loaded.classify(texts, use_tqdm=False)]

    return score, f"vllm {vllm.__version__}, {dtype}"


def _export(model: str, threads: int) -> tuple[Path, Any]:
    """Write the checkpoint as ONNX beside it, whole: two engines may do so at the same time."""
    import torch

    loaded, tokenizer, _ = _load_torch(model, threads, "float32")
    target = Path(model) / "model.onnx"
    if not target.exists():
        loaded.set_attn_implementation("eager")
        names = ["input_ids", "attention_mask", "token_type_ids"]
        ids = torch.ones(2, 16, dtype=torch.long)
        axes = {0: "batch", 1: "length"}
        unfinished = target.with_suffix(f".{os.getpid()}")
        torch.onnx.export(
            loaded,
            (ids, torch.ones_like(ids), torch.zeros_like(ids)),
            unfinished,
            input_names=names,
            output_names=["logits"],
            dynamic_axes=dict.fromkeys(names, axes) | {"logits": {0: "batch"}},
            dynamo=False,
        )
        unfinished.replace(target)
    return target, tokenizer


def _score_sorted(
    texts: list[str],
    tokenizer: Any,  # noqa: ANN401  # transformers'
    run: Callable[[dict[str, Any]], Any],
) -> list[list[float]]:
    """Length-sorted batches, the best that a padded graph can be given."""
    import numpy as np

    encoded = tokenizer(texts).input_ids
    order = sorted(range(len(texts)), key=lambda index: -len(encoded[index]))
    rows: list[Any] = [None] * len(texts)
    for begin in range(0, len(order), _BATCH):
        batch = order[begin : begin + _BATCH]
        longest = len(encoded[batch[0]])
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, : len(encoded[index])] = encoded[index]
            mask[row, : len(encoded[index])] = 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        logits = np.asarray(run(given), np.float64)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        for index, row in zip(batch, weights / weights.sum(1, keepdims=True), strict=True):
            rows[index] = row.tolist()
    return rows


def _load_onnx(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    import onnxruntime

    if dtype != "float32":
        message = "the exported graph is fp32"
        raise ValueError(message)
    target, tokenizer = _export(model, threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(target, options, providers=["CPUExecutionProvider"])

    def run(given: dict[str, Any]) -> Any:  # noqa: ANN401  # an array
        return session.run(["logits"], given)[0]

    about = f"onnxruntime {onnxruntime.__version__}, sorted batches of {_BATCH}"
    return (lambda texts: _score_sorted(texts, tokenizer, run)), about


def _load_openvino(model: str, threads: int, dtype: str) -> tuple[Score, str]:
    import openvino

    target, tokenizer = _export(model, threads)
    hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    compiled = openvino.compile_model(target, "CPU", settings)

    def run(given: dict[str, Any]) -> Any:  # noqa: ANN401  # an array
        return compiled(given)[0]

    about = f"openvino {openvino.__version__.split('-')[0]}, sorted batches of {_BATCH}"
    return (lambda texts: _score_sorted(texts, tokenizer, run)), about


_ENGINES: dict[str, Callable[[str, int, str], tuple[Score, str]]] = {
    "scorekeep": _load_scorekeep,
    "gemm": _load_gemm,
    "loop": _load_loop,
    "pipeline": _load_pipeline,
    "cross-encoder": _load_cross_encoder,
    "onnxruntime": _load_onnx,
    "openvino": _load_openvino,
    "vllm-cpu": _load_vllm,
}
ENGINES: Sequence[str] = tuple(_ENGINES)


if __name__ == "__main__":
    main()
