"""What moves bulks on: a reader that takes one at a time, and a sweep that sees what has ended.

Every API process runs both; leases and conditions in SQL keep them out of each other's way.
"""

import asyncio
import contextlib
import logging
from typing import Any

from api.bulk.indexing import index
from api.bulk.ingestion import LEASE_S, ingest, outcome_of, render_errors, validate
from api.bulk.inputs import BulkInput
from api.bulk.output import write_outputs, write_refusals
from api.bulk.retrying import retry_chunk
from api.catalog import Catalog
from contract.bulks import ENDED_BULKS, BulkState, LineError
from contract.errors import ScoreError, StoreUnavailableError
from storage.bulk_chunks import cancel_chunk_jobs, find_poisoned, has_open_chunks, read_chunks
from storage.bulk_counts import sum_chunks
from storage.bulk_events import add_progress
from storage.bulks import (
    BulkRow,
    change_bulk,
    claim_bulk,
    expire_bulks,
    has_work,
    open_bulks,
    park_jobs,
    release_bulk,
)
from storage.files import drop_file, purge_files
from storage.queue import Queue

__all__ = ["BulkRunner"]

_log = logging.getLogger(__name__)
_SWEEP_S = 0.5
_CANCEL_PAGE = 1000
_POISONED_PAGE = 100
#: A progress event for every so many per cent.
_PROGRESS_STEP = 5
_ABANDONED_S = 86400.0
_FILES_EVERY = 120
_FILES_PAGE = 50


class BulkRunner:
    """Reads inputs, writes outputs, fills the cache, ends bulks. Belongs to the event loop."""

    def __init__(self, given: BulkInput, catalog: Catalog, queue: Queue) -> None:
        self.given = given
        self._catalog = catalog
        self._queue = queue
        self._wakes = (asyncio.Event(), asyncio.Event())

    def wake(self) -> None:
        """Look for work now."""
        for event in self._wakes:
            event.set()

    async def read(self) -> None:
        """Take bulks that need their input read, their output written or the cache filled."""
        while True:
            try:
                took = await self.read_once()
            except StoreUnavailableError as error:
                _log.warning("bulks wait", extra={"reason": error.message})
                took = False
            if not took:
                await self._sleep(0)

    async def sweep(self) -> None:
        """End what has ended, stop what is to be stopped, for ever."""
        rounds = 0
        while True:
            try:
                await self.sweep_once()
                if rounds % _FILES_EVERY == 0:
                    await self.purge_files_once()
            except StoreUnavailableError as error:
                _log.warning("bulks wait", extra={"reason": error.message})
            rounds += 1
            await self._sleep(1)

    async def read_once(self) -> bool:
        """Take one bulk and do what it needs; return whether another look is worth it at once."""
        async with self.given.database.snapshot() as tx:
            if not await has_work(tx):
                return False
        async with self.given.database.transaction() as tx:
            bulk = await claim_bulk(tx, lease_s=LEASE_S)
        if bulk is None:
            return False
        more = True
        try:
            more = await self._advance(bulk)
        except StoreUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001  # the edge of a reader: the bulk says why
            _log.exception("bulk failed", extra={"bulk": bulk.id})
            await self._refuse(bulk, error)
        async with self.given.database.transaction() as tx:
            await release_bulk(tx, bulk)
        if more:
            self.wake()
        return more

    async def sweep_once(self) -> None:
        """Look at every open bulk once."""
        async with self.given.database.snapshot() as tx:
            if not await has_work(tx):
                return
        async with self.given.database.transaction() as tx:
            await expire_bulks(tx)
        async with self.given.database.snapshot() as tx:
            bulks = await open_bulks(tx)
        for bulk in bulks:
            try:
                if bulk.state is BulkState.CANCELLING:
                    await self._let_go(bulk)
                elif bulk.state is BulkState.RUNNING:
                    await self._look_at(bulk)
            except StoreUnavailableError:
                raise
            except Exception:  # noqa: BLE001  # the edge of a bulk: the others go on
                _log.exception("bulk not swept", extra={"bulk": bulk.id})

    async def purge_files_once(self) -> int:
        """Delete the bytes of files that were deleted, have expired, or never became whole."""
        given = self.given
        async with given.database.transaction() as tx:
            gone = await purge_files(tx, abandoned_after_s=_ABANDONED_S, limit=_FILES_PAGE)
        for file_id in gone:
            keys = [blob.key async for blob in given.blobs.list(f"files/{file_id}")]
            await given.blobs.delete(keys)
            async with given.database.transaction() as tx:
                await drop_file(tx, file_id)
        return len(gone)

    async def _advance(self, bulk: BulkRow) -> bool:
        if bulk.state is BulkState.VALIDATING:
            await self._validate(bulk)
        elif bulk.state is BulkState.FINALIZING:
            await self._finalize(bulk)
        elif bulk.state is BulkState.RUNNING and _is_being_read(bulk):
            await ingest(self.given, bulk, await self._catalog.statuses(), self._queue)
        else:
            return await index(self.given, bulk)
        return True

    async def _validate(self, bulk: BulkRow) -> None:
        found = await validate(self.given, bulk, await self._catalog.statuses())
        state = outcome_of(bulk, found)
        files: dict[str, Any] = {}
        if state is BulkState.FAILED and bulk.kind == "batch":
            files |= await write_refusals(self.given, bulk, found.errors)
        await self._enter(
            bulk,
            state,
            errors=render_errors(found.errors),
            total_lines=found.lines,
            refused_lines=found.refused,
            **files,
        )

    async def _finalize(self, bulk: BulkRow) -> None:
        files: dict[str, Any] = await write_outputs(self.given, bulk)
        final = BulkState(bulk.final_state or BulkState.COMPLETED)
        await self._enter(bulk, final, **files)

    async def _refuse(self, bulk: BulkRow, error: Exception) -> None:
        """A bulk whose reader raised: what runs of it goes on to its end, the rest will not."""
        message = error.message if isinstance(error, ScoreError) else type(error).__name__
        code = error.code if isinstance(error, ScoreError) else "internal"
        errors = render_errors([LineError(code=code, message=message)])
        if bulk.state in {BulkState.VALIDATING, BulkState.FINALIZING}:
            await self._enter(bulk, BulkState.FAILED, errors=errors)
        elif bulk.state is BulkState.RUNNING and _is_being_read(bulk):
            final = BulkState.FAILED.value
            await self._enter(bulk, BulkState.CANCELLING, errors=errors, final_state=final)
        else:
            async with self.given.database.transaction() as tx:
                await change_bulk(tx, bulk, indexed_lines=bulk.ingested_lines)

    async def _enter(
        self,
        bulk: BulkRow,
        state: BulkState,
        *,
        fenced: bool = True,
        **values: Any,  # noqa: ANN401  # columns of the row
    ) -> None:
        """Change the bulk's state; where that ends it, wake those that deliver the news."""
        async with self.given.database.transaction() as tx:
            changed = await change_bulk(tx, bulk, fenced=fenced, state=state, **values)
        if changed and state in ENDED_BULKS:
            await self._queue.publish_finished([bulk.id])

    async def _look_at(self, bulk: BulkRow) -> None:
        if bulk.paused_at is not None:
            async with self.given.database.transaction() as tx:
                await park_jobs(tx, bulk.id)
        async with self.given.database.snapshot() as tx:
            running = bulk.ingested_lines < bulk.total_lines or await has_open_chunks(tx, bulk.id)
            tally, _, _ = await sum_chunks(tx, bulk.id)
        if not running:
            await self._end(bulk)
            return
        ended = tally.lines_completed + tally.lines_failed + tally.lines_cancelled
        step = 100 * ended // max(1, bulk.total_lines) // _PROGRESS_STEP
        if step > bulk.progress_step:
            async with self.given.database.transaction() as tx:
                is_new = await add_progress(tx, bulk.id, step)
            if is_new:
                await self._queue.publish_finished([bulk.id])

    async def _end(self, bulk: BulkRow) -> None:
        if await self._split_poisoned(bulk):
            return
        state = BulkState.FINALIZING if bulk.kind == "batch" else BulkState.COMPLETED
        await self._enter(bulk, state, fenced=False)
        self.wake()

    async def _split_poisoned(self, bulk: BulkRow) -> bool:
        """Run the neighbours of a line that kills workers again, each apart; whether there are."""
        async with self.given.database.snapshot() as tx:
            poisoned = await find_poisoned(tx, bulk.id, limit=_POISONED_PAGE)
        split = False
        for first_line in sorted({first_line for _, first_line in poisoned}):
            async with self.given.database.snapshot() as tx:
                chunks = await read_chunks(tx, bulk.id, from_line=first_line, limit=1)
            only = frozenset(job_id for job_id, line in poisoned if line == first_line)
            for chunk in chunks:
                new = await retry_chunk(self.given, bulk, chunk, only=only)
                await self._queue.hint([job.hint for job in new[:1]])
                split = split or bool(new)
        return split

    async def _let_go(self, bulk: BulkRow) -> None:
        while True:
            async with self.given.database.transaction() as tx:
                told = await cancel_chunk_jobs(tx, bulk.id, limit=_CANCEL_PAGE)
            if not told:
                break
        async with self.given.database.snapshot() as tx:
            if await has_open_chunks(tx, bulk.id):
                return
        final = BulkState(bulk.final_state or BulkState.CANCELLED)
        state = BulkState.FINALIZING if bulk.kind == "batch" else final
        await self._enter(bulk, state, fenced=False)
        self.wake()

    async def _sleep(self, which: int) -> None:
        event = self._wakes[which]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SWEEP_S):
                await event.wait()
        event.clear()


def _is_being_read(bulk: BulkRow) -> bool:
    """Whether lines of a running bulk are still to be stored."""
    return bulk.ingested_lines < bulk.total_lines
