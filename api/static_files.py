"""The dashboard's files, read once; one version names them all, so that each is kept for ever."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["StaticFile", "StaticFiles", "load_static_files"]

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
#: What the page writes where the version belongs.
_VERSION_MARK = b"{version}"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file as it is sent. ``etag`` is quoted."""

    body: bytes
    content_type: str
    etag: str


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """The page, and the files it loads, by their path."""

    version: str
    page: StaticFile
    files: dict[str, StaticFile]


def load_static_files() -> StaticFiles:
    """Read the files of the package."""
    found = dict(sorted(_walk(files("api") / "static", "")))
    version = hashlib.sha256(
        b"".join(name.encode() + b"\0" + body for name, body in found.items())
    ).hexdigest()[:16]
    page = found.pop(_PAGE).replace(_VERSION_MARK, version.encode())
    return StaticFiles(
        version=version,
        page=_make_file(_PAGE, page),
        files={name: _make_file(name, body) for name, body in found.items()},
    )


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        else:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found


def _make_file(name: str, body: bytes) -> StaticFile:
    suffix = "." + name.rpartition(".")[2]
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return StaticFile(body, _TYPES[suffix], etag)
