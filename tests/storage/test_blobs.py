"""One conformance suite for every blob store, and what only local folders must do."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from contract.errors import NotFoundError, SettingsError, StoreUnavailableError
from storage import blobs
from storage.blobs import BlobStore
from tests.services import create_bucket, free_port, start_seaweedfs

DATA = bytes(range(256)) * 40


@pytest.fixture(params=["local", "moto"])
def store(request: pytest.FixtureRequest) -> BlobStore:
    """Each store of the fast lane."""
    name = {"local": "blob_url", "moto": "s3_url"}[request.param]
    return BlobStore.open(request.getfixturevalue(name))


async def check_conformance(store: BlobStore) -> None:
    """Put, read whole and in part, list, overwrite, delete; what is missing is not found."""
    await store.check()
    info = await store.put("a/one.safetensors", DATA)
    assert info.key == "a/one.safetensors"
    assert (info.size_bytes, info.sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert await store.get("a/one.safetensors") == DATA
    assert await store.get_range("a/one.safetensors", 10, 20) == DATA[10:20]
    assert await store.get_range("a/one.safetensors", 10, 10) == b""
    await store.put("b/two", memoryview(b"two"))
    await store.put("b/two", bytearray(b"three"))
    await store.put("empty", b"")
    assert await store.get("b/two") == b"three"
    assert await store.get("empty") == b""
    listed = {entry.key: entry.size_bytes async for entry in store.list()}
    assert listed == {"a/one.safetensors": len(DATA), "b/two": 5, "empty": 0}
    assert [entry.key async for entry in store.list("b")] == ["b/two"]
    assert all([abs(entry.age_s) < 60 async for entry in store.list()])
    await store.delete(["b/two", "never", "empty"])
    await store.delete([])
    for key in ("b/two", "never"):
        with pytest.raises(NotFoundError):
            await store.get(key)
        with pytest.raises(NotFoundError):
            await store.get_range(key, 0, 1)
    for key in ("", "/a", "../a", "a//b", "a/./b"):
        with pytest.raises(ValueError, match="relative path"):
            await store.put(key, b"")


async def test_stores_conform(store: BlobStore) -> None:
    """A local folder and S3 behave alike."""
    await check_conformance(store)


@pytest.mark.slow
async def test_seaweedfs_conforms() -> None:
    """So does another S3 server."""
    with start_seaweedfs() as endpoint:
        await check_conformance(BlobStore.open(create_bucket(endpoint)))


async def test_a_store_that_is_away_is_unavailable() -> None:
    """Retryable, for reads and writes, within seconds."""
    url = f"s3://x/y?endpoint=http://127.0.0.1:{free_port()}&allow_http=true&region=us-east-1"
    store = BlobStore.open(url, access_key_id="a", secret_access_key="b")  # noqa: S106
    with pytest.raises(StoreUnavailableError):
        await store.check()


@pytest.mark.parametrize("url", ["memory:///", "ftp://x", "/plain/path", "s3://b?nonsense=1"])
def test_a_wrong_url_is_a_wrong_setting(url: str) -> None:
    """Also the memory store: it forgets."""
    with pytest.raises(SettingsError):
        BlobStore.open(url)


def test_other_providers_open_by_url() -> None:
    """Google's and Azure's, without a network."""
    BlobStore.open("az://container/prefix", account_name="a", account_key="a2V5")
    BlobStore.open("gs://bucket/prefix", skip_signature="true")


async def test_a_local_put_is_synced_before_and_after_the_rename(
    blob_store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes first, then the name: a crash in between leaves the old state."""
    steps: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        steps.append(kind)
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    await blob_store.put("new/one", DATA)
    await blob_store.put("new/two", DATA)

    assert steps == ["file", "rename", "folder", "folder", "file", "rename", "folder"]


async def test_a_local_put_that_fails_leaves_nothing(
    blob_store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a retryable error, without a partial file."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailableError):
        await blob_store.put("one", DATA)

    assert list((tmp_path / "blobs").iterdir()) == []


async def test_what_dead_writers_left_is_swept(blob_store: BlobStore, tmp_path: Path) -> None:
    """Old temporary files go, fresh ones and blobs stay; none is listed."""
    await blob_store.put("kept", b"")
    left = tmp_path / "blobs" / f"{blobs._TEMPORARY}x"
    left.touch()

    assert await blob_store.drop_temporary(older_than_s=60) == 0
    assert [entry.key async for entry in blob_store.list()] == ["kept"]
    assert await blob_store.drop_temporary(older_than_s=-1) == 1
    assert not left.exists()


async def test_only_local_stores_have_temporary_files(s3_url: str) -> None:
    """Elsewhere there is nothing to sweep."""
    assert await BlobStore.open(s3_url).drop_temporary(older_than_s=0) == 0


async def test_a_folder_that_vanished_is_unavailable(blob_store: BlobStore, tmp_path: Path) -> None:
    """The check of a local store looks at the folder itself."""
    (tmp_path / "blobs").rmdir()
    with pytest.raises(StoreUnavailableError):
        await blob_store.check()
