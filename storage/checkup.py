"""Do the stores that the settings name answer, and is their schema this version's?

``python -m storage.checkup`` prints its findings as JSON. No row and no byte is changed.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.engine import make_url

from contract.config import Settings, load_settings
from contract.errors import ScoreError
from contract.findings import Finding
from storage.blobs import BlobStore
from storage.database import Database
from storage.migrating import create_config
from storage.queue import Queue

__all__ = ["check_stores"]

_TIMEOUT_S = 10.0


async def check_stores(settings: Settings) -> list[Finding]:
    """Return a finding for SQL, its schema, the blobs and Redis."""
    return [
        *await _check_database(settings),
        await _check_blobs(settings),
        await _check_redis(settings),
    ]


async def _check_database(settings: Settings) -> list[Finding]:
    told = make_url(settings.database).render_as_string(hide_password=True)
    if not _is_there(settings.database):  # SQLite would make one, which a restore then refuses
        detail = f"{told}: no database yet"
        advice = "run scorekeep migrate, or scorekeep restore (scorekeep up makes one by itself)"
        return [Finding(part="sql", ok=False, detail=detail, advice=advice)]
    database = Database(settings.database)
    try:
        async with asyncio.timeout(_TIMEOUT_S), database.snapshot() as tx:
            await tx.execute(text("SELECT 1"))
        revision = await _read_revision(database)
    except (ScoreError, TimeoutError) as error:
        advice = "start the database, or correct SCOREKEEP_DATABASE_URL; SQLite needs its folder"
        return [Finding(part="sql", ok=False, detail=f"{told}: {_say(error)}", advice=advice)]
    finally:
        await database.close()
    answers = Finding(part="sql", ok=True, detail=f"{told} answers")
    head = ScriptDirectory.from_config(create_config(settings.database)).get_current_head()
    if revision == head:
        return [answers, Finding(part="schema", ok=True, detail=f"revision {revision}")]
    detail = f"revision {revision or 'none'}, this version's is {head}"
    advice = "run scorekeep migrate (scorekeep up does it by itself)"
    return [answers, Finding(part="schema", ok=False, detail=detail, advice=advice)]


def _is_there(database: str) -> bool:
    """Tell whether there is a file to be opened, where it is one."""
    url = make_url(database)
    is_file = url.get_backend_name() == "sqlite" and url.database not in {None, "", ":memory:"}
    return not is_file or Path(str(url.database)).exists()


async def _read_revision(database: Database) -> str | None:
    try:
        async with database.snapshot() as tx:
            found = (await tx.execute(text("SELECT version_num FROM alembic_version"))).first()
    except ScoreError:
        raise
    except Exception:  # noqa: BLE001  # whatever a dialect raises for a table that is not there
        return None
    return None if found is None else str(found[0])


async def _check_blobs(settings: Settings) -> Finding:
    told = settings.blobs.partition("?")[0]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await BlobStore.open(settings.blobs).check()
    except (ScoreError, TimeoutError) as error:
        advice = "make the folder or bucket, or correct SCOREKEEP_BLOB_URL and its credentials"
        return Finding(part="blobs", ok=False, detail=f"{told}: {_say(error)}", advice=advice)
    return Finding(part="blobs", ok=True, detail=f"{told} answers")


async def _check_redis(settings: Settings) -> Finding:
    told = settings.redis_url.rpartition("@")[2].removeprefix("redis://")
    queue = Queue(settings.redis_url)
    try:
        await queue.check()
    except ScoreError as error:
        advice = "start Redis or Valkey, or correct SCOREKEEP_REDIS_URL; jobs wait for the sweep"
        return Finding(part="redis", ok=False, detail=f"{told}: {_say(error)}", advice=advice)
    finally:
        await queue.close()
    return Finding(part="redis", ok=True, detail=f"{told} answers")


def _say(error: Exception) -> str:
    return str(error) or f"no answer within {_TIMEOUT_S:g} s"


def main() -> None:
    """Check what the environment names; print JSON; end.

    Without the interpreter's own end: obstore's threads still hand a result back when the last
    call has just returned, and one of five such processes was aborted for it (code 134).
    """
    findings = asyncio.run(check_stores(load_settings()))
    sys.stdout.write(msgspec.json.encode(findings).decode())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
