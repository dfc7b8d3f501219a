"""Blobs: put, get a byte range, delete, list, on a local folder or an object store.

The only place that knows obstore. A blob is durable when ``put`` returns, whole or not there at
all, and never changed afterwards. See docs/decisions for why the local put is our own.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import from_url

from contract.errors import NotFoundError, SettingsError, StoreUnavailableError

__all__ = ["BlobInfo", "BlobStore", "StoredBlob"]

_SCHEMES = frozenset({"file", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
_TEMPORARY = ".tmp-"
_CHECK_KEY = "scorekeep-check"
_RETRY = {"max_retries": 3}


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What is known of a blob once it is durable; ``sha256`` is in hexadecimal."""

    key: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob as the store lists it; ``age_s`` is by the store's clock against ours."""

    key: str
    size_bytes: int
    age_s: float


class BlobStore:
    """One folder or bucket. May be shared by tasks, and by processes."""

    def __init__(self, store: Any, folder: Path | None) -> None:  # noqa: ANN401  # a union of five
        self._store = store
        self._folder = folder

    @classmethod
    def open(cls, url: str, **options: str) -> Self:
        """Open the store at ``url``; a local folder is made.

        ``file:///path``, ``s3://bucket/prefix``, ``gs://…`` or ``az://…``. Credentials come from
        the provider's own environment variables (``AWS_…``); ``options`` and the URL's query
        (``?endpoint=…&allow_http=true``) win. Raises ``SettingsError``.
        """
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            message = f"a blob URL starts with file://, s3://, gs:// or az://, not {parts.scheme!r}"
            raise SettingsError(message)
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            folder.mkdir(parents=True, exist_ok=True)
            return cls(from_url(folder.as_uri()), folder)
        given = dict(parse_qsl(parts.query)) | options
        client: dict[str, Any] = {"timeout": given.pop("timeout", "30s"), "connect_timeout": "5s"}
        if given.pop("allow_http", "false").lower() in {"1", "true"}:
            client["allow_http"] = True
        try:
            store: Any = from_url(  # type: ignore[call-overload]  # given by the user
                parts._replace(query="").geturl(),
                client_options=client,
                retry_config=_RETRY,
                **given,
            )
        except (BaseError, ValueError, TypeError) as error:
            message = f"the blob URL is wrong: {error}"
            raise SettingsError(message) from error
        return cls(store, None)

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> BlobInfo:
        """Write ``data`` under ``key``; durable on return. Raises ``StoreUnavailableError``."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        with _translated(key):
            if self._folder is not None:
                await asyncio.to_thread(_put_local, self._folder / _checked(key), data)
            else:
                await self._store.put_async(_checked(key), data)
        return BlobInfo(key, len(data), digest)

    async def get(self, key: str) -> bytes:
        """Return the whole blob. Raises ``NotFoundError``, ``StoreUnavailableError``."""
        with _translated(key):
            result = await self._store.get_async(_checked(key))
            return bytes(await result.bytes_async())

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield the blob in pieces of some megabytes at most. Raises as ``get`` does."""
        with _translated(key):
            result = await self._store.get_async(_checked(key))
            async for piece in result.stream(min_chunk_size=1024 * 1024):
                yield bytes(piece)

    async def get_range(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end``. Raises ``NotFoundError``."""
        if begin == end:
            return b""
        with _translated(key):
            return bytes(await self._store.get_range_async(_checked(key), start=begin, end=end))

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the blobs; one that is not there is no error."""
        for key in keys:
            with _translated(key), contextlib.suppress(FileNotFoundError):
                await self._store.delete_async(_checked(key))

    async def list(self, prefix: str = "") -> AsyncIterator[StoredBlob]:
        """Yield the blobs in the folder ``prefix``, without temporary ones."""
        with _translated(prefix):
            async for page in self._store.list(prefix or None):
                for entry in page:
                    if not Path(entry["path"]).name.startswith(_TEMPORARY):
                        age_s = time.time() - entry["last_modified"].timestamp()
                        yield StoredBlob(entry["path"], entry["size"], age_s)

    async def check(self) -> None:
        """Raise ``StoreUnavailableError`` unless the store answers."""
        with _translated(_CHECK_KEY):
            try:
                await self._store.head_async(_CHECK_KEY)
            except FileNotFoundError:
                if self._folder is not None and not os.access(self._folder, os.W_OK):
                    message = "the blob folder is missing or not writable"
                    raise StoreUnavailableError(message, retry_after_s=2.0) from None

    async def count_temporary(self, *, older_than_s: float) -> int:
        """Return how many files writers that died left behind. Local stores only."""
        if self._folder is None:
            return 0
        return len(await asyncio.to_thread(_find_temporary, self._folder, older_than_s))

    async def drop_temporary(self, *, older_than_s: float) -> int:
        """Delete what writers that died left behind; return how many. Local stores only."""
        if self._folder is None:
            return 0
        return await asyncio.to_thread(_drop_temporary, self._folder, older_than_s)


def _checked(key: str) -> str:
    if not key or key.startswith("/") or any(part in {"", ".", ".."} for part in key.split("/")):
        message = f"a blob key is a relative path without dots, not {key!r}"
        raise ValueError(message)
    return key


def _put_local(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write, fsync, rename, fsync the folder: a crash leaves the whole file or a temporary one."""
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}-{path.name}")
    try:
        with temporary.open("xb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    if made:
        _sync_folder(path.parent.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_temporary(folder: Path, older_than_s: float) -> list[Path]:
    limit = time.time() - older_than_s
    found: list[Path] = []
    for path in folder.rglob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < limit:
                found.append(path)
    return found


def _drop_temporary(folder: Path, older_than_s: float) -> int:
    found = _find_temporary(folder, older_than_s)
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        message = f"there is no blob {key}"
        raise NotFoundError(message) from error
    except (BaseError, OSError) as error:
        message = f"the blob store failed: {type(error).__name__}"
        raise StoreUnavailableError(message, retry_after_s=2.0) from error
