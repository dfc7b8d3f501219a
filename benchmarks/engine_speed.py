"""The engine against its peers: items and tokens per second, alternating in one run.

``python -m benchmarks.engine_speed`` scores the same texts with each engine in a process of its
own, in turn, several rounds, and prints medians beside the bound: the rate of this machine's
matrix product, measured in the same rounds by the faster of torch's two ways, and the model's
operations. Each has one thread, and what counts is its CPU time, which a busy neighbour changes
little; wall time is in the JSON file.
The encoder is the demo's MiniLM classifier, the decoder a Qwen3 classifier with random weights.
The peers are installed into ``--venvs`` at the first run; one that cannot be is named and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from benchmarks.peers import PEERS, Peer, find_preload, prepare_peer
from benchmarks.report import describe_machine, say
from scorekeep.demo_sources import default_cache, prepare_models

ROOT = Path(__file__).parent.parent
LENGTHS = ("skewed", "short", "long")
#: what ONNX graphs and pair models cannot be
ENCODERS_ONLY = ("cross-encoder", "onnxruntime", "openvino")
DECODER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(slots=True)
class Child:
    """One engine's process, and what it took in each round."""

    name: str
    process: "subprocess.Popen[str]"
    about: str = ""
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def score(self, lengths: str, texts: Path, *, counted: bool) -> dict[str, Any]:
        """Have it score a file of texts; remember how long it took."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{texts}\n")
        self.process.stdin.flush()
        found = self.read()
        if counted:
            self.runs.setdefault(lengths, []).append(found)
        return found

    def read(self) -> dict[str, Any]:
        """Return its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            message = f"{self.name} ended with {self.process.wait()}; its log says why"
            raise RuntimeError(message)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def median(self, lengths: str, clock: str) -> float:
        """Return the median over the rounds."""
        return float(statistics.median(run[clock] for run in self.runs[lengths]))


def main() -> None:
    """Print a table per model, write the JSON file."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="scorekeep-speed-") as name:
        folder = Path(name)
        models = {
            "encoder": lambda: _copy_encoder(folder / "encoder"),
            "decoder": lambda: _make_decoder(folder / "decoder"),
        }
        tables = {
            model: _measure(folder, models[model](), model, options) for model in options.models
        }
    report = {
        "machine": describe_machine(),
        "threads": options.threads,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tables": tables,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    say(f"written: {options.json}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", default=["encoder", "decoder"])
    parser.add_argument("--engines", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    cache = default_cache().parent / "bench"
    parser.add_argument("--venvs", type=Path, default=cache)
    parser.add_argument("--json", type=Path, default=cache / "engine_speed.json")
    return parser.parse_args()


def _measure(folder: Path, model: Path, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    files = {
        lengths: _write_texts(folder, model, lengths, options.texts) for lengths in options.lengths
    }
    config = json.loads((model / "config.json").read_text())
    with ExitStack() as stack:
        gemm = stack.enter_context(_start(PEERS["loop"], "gemm", model, options))
        children = [
            stack.enter_context(_start(PEERS[name], name, model, options))
            for name in options.engines
            if kind == "encoder" or name not in ENCODERS_ONLY
        ]
        children = [child for child in [gemm, *children] if _is_ready(child)]
        for round_ in range(options.rounds + 1):
            for lengths, (file, _) in files.items():
                for child in children:
                    child.score(lengths, file, counted=round_ > 0)
    table = {
        lengths: _compare(children, lengths, tokens, _count_weights(model, config))
        for lengths, (_, tokens) in files.items()
    }
    for lengths, rows in table.items():
        _render(kind, lengths, files[lengths][1], options, rows)
    return table


@contextmanager
def _start(peer: Peer, engine: str, model: Path, options: argparse.Namespace) -> Iterator[Child]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT) if not peer.folder else "",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "LD_PRELOAD": find_preload(peer, options.venvs),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    log = (options.json.parent / f"{engine}.log").open("w")
    process = subprocess.Popen(  # noqa: S603  # our own file
        [
            str(_find_python(peer, options.venvs)),
            str(ROOT / "benchmarks" / "speed_child.py"),
            engine,
            str(model),
            str(options.threads),
            options.dtype,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
    )
    try:
        yield Child(engine, process)
    finally:
        process.kill()
        process.wait()
        log.close()


def _find_python(peer: Peer, folder: Path) -> Path:
    try:
        return prepare_peer(peer, folder)
    except subprocess.CalledProcessError as error:
        say(f"{peer.name}: pip ended with {error.returncode}: left out")
        return Path("/bin/false")


def _is_ready(child: Child) -> bool:
    try:
        child.about = child.read()["about"]
    except RuntimeError as error:
        say(f"{child.name}: left out: {error}")
        return False
    return True


def _compare(
    children: Sequence[Child], lengths: str, tokens: int, weights: int
) -> dict[str, dict[str, Any]]:
    """Return one row per engine; the first child is the matrix product."""
    rate = statistics.median(run["scores"][0][0] for run in children[0].runs[lengths])
    ours = next((child for child in children if child.name == "scorekeep"), None)
    bound_s = 2 * weights * tokens / rate
    rows = {}
    for child in children[1:]:
        cpu_s = child.median(lengths, "cpu_s")
        scores = np.array(child.runs[lengths][-1]["scores"])
        expected = None if ours is None else np.array(ours.runs[lengths][-1]["scores"])
        rows[child.name] = {
            "about": child.about,
            "cpu_s": cpu_s,
            "wall_s": child.median(lengths, "wall_s"),
            "all_cpu_s": [run["cpu_s"] for run in child.runs[lengths]],
            "items_per_s": len(scores) / cpu_s,
            "tokens_per_s": tokens / cpu_s,
            "share_of_bound": bound_s / cpu_s,
            "gemm_gflops": rate / 1e9,
            "ratio": None if ours is None else cpu_s / ours.median(lengths, "cpu_s"),
            "difference": None if expected is None else float(np.abs(scores - expected).max()),
        }
    return rows


def _render(
    kind: str,
    lengths: str,
    tokens: int,
    options: argparse.Namespace,
    rows: dict[str, dict[str, Any]],
) -> None:
    rate = next(iter(rows.values()))["gemm_gflops"]
    say(
        f"\n{kind}, {options.dtype}, {lengths}: {options.texts} texts, {tokens} tokens, "
        f"{options.threads} thread(s), medians of {options.rounds}; product {rate:.0f} GFLOP/s"
    )
    say(
        f"{'engine':16}{'items/s':>9}{'tokens/s':>10}{'of bound':>10}{'ours is':>9}"
        f"{'difference':>12}  CPU s per run"
    )
    for name, row in rows.items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        difference = "" if row["difference"] is None else f"{row['difference']:.0e}"
        say(
            f"{name:16}{row['items_per_s']:>9.1f}{row['tokens_per_s']:>10.0f}"
            f"{row['share_of_bound']:>10.0%}{ratio:>9}{difference:>12}  "
            + " ".join(f"{one:.2f}" for one in row["all_cpu_s"])
            + f"  {row['about']}"
        )


def _write_texts(folder: Path, model: Path, lengths: str, count: int) -> tuple[Path, int]:
    """Write texts of words that are one token each; return the file and the tokens of all."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    draw = np.random.default_rng(len(lengths))
    drawn = {
        "skewed": draw.lognormal(np.log(60), 0.8, count),
        "short": draw.uniform(8, 32, count),
        "long": draw.uniform(256, 510, count),
    }[lengths]
    sizes = np.clip(drawn, 3, 510).astype(int)
    texts = [" ".join(draw.choice(words, size)) for size in sizes]
    file = folder / f"{model.name}-{lengths}.json"
    file.write_text(json.dumps(texts))
    return file, sum(len(ids) for ids in tokenizer(texts).input_ids)


def _copy_encoder(folder: Path) -> Path:
    """Copy the demo's classifier, whose tokenizer must not cut at less than 512."""
    source = prepare_models(default_cache(), lambda *_: None)["sentiment"]
    library: Any = transformers
    library.AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(folder)
    tokenizer = library.AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return folder


def _make_decoder(folder: Path) -> Path:
    """Write a random Qwen3 classifier with the encoder's words."""
    source = prepare_models(default_cache(), lambda *_: None)["sentiment"]
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = 512
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **DECODER)
    kind: Any = Qwen3ForSequenceClassification
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _count_weights(model: Path, config: dict[str, Any]) -> int:
    """Return the weights that every token meets: all matrices of the layers, none of the ends."""
    kind: Any = transformers.AutoModelForSequenceClassification
    loaded = kind.from_pretrained(model)
    count = config["num_hidden_layers"]
    (layers,) = [
        one
        for one in loaded.modules()
        if isinstance(one, torch.nn.ModuleList) and len(one) == count
    ]
    return sum(one.numel() for one in layers.parameters() if one.dim() == 2)


if __name__ == "__main__":
    main()
