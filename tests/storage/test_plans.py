"""Lists of what is rare do not read all of a tenant: looked up in the databases' own plans."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection

from contract.jobs import JobState
from storage.database import Database, Transaction
from storage.jobs import list_jobs
from storage.score_cache import find_cached
from storage.sweeps import purge_events, purge_tombstones
from tests.storage.factories import run_sql

_T = TypeVar("_T")
_MANY = 20_000
_SERIES = {
    "sqlite": "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :many)"
    " SELECT n FROM s)",
    "postgresql": "generate_series(1, CAST(:many AS integer)) AS s(n)",
}
_FILL = """
INSERT INTO jobs (id, tenant, model, lane, state, attempt, generation, version, error_count,
    crash_count, created_at, available_at, item_count, scored_count, failed_count,
    estimated_tokens, metadata, error)
SELECT 'job_' || (100000 + n), 't', 'm', 1, CASE WHEN n = 5 THEN 'failed' ELSE 'succeeded' END,
    1, 0, 0, 0, 0, n, n, 1, 1, 0, 1, '{{}}',
    CASE WHEN n = 5 THEN '{{"code":"poisoned"}}' END
FROM {series}
"""


async def _explain(
    database: Database, run: Callable[[Transaction], Awaitable[_T]]
) -> tuple[_T, str]:
    """Return what ``run`` did, and the plan of its last statement."""
    seen: list[tuple[str, Any]] = []

    def keep(
        _connection: Connection, _cursor: Any, statement: str, parameters: Any, *_rest: Any
    ) -> None:
        seen.append((statement, parameters))

    async with database.transaction() as tx:
        event.listen(tx.sync_connection, "before_cursor_execute", keep)
        done = await run(tx)
        event.remove(tx.sync_connection, "before_cursor_execute", keep)
        statement, parameters = seen[-1]
        verb = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
        plan = await tx.exec_driver_sql(f"{verb} {statement}", parameters)
        return done, "\n".join(str(tuple(line)) for line in plan)


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ({"state": JobState.FAILED}, "ix_jobs_ended"),
        ({"state": JobState.FAILED, "error_code": "poisoned"}, "ix_jobs_"),
        ({"error_code": "poisoned"}, "ix_jobs_error"),
    ],
    ids=["state", "both", "error code"],
)
async def test_a_rare_job_is_found_by_an_index(
    filters: dict[str, Any], index: str, database: Database
) -> None:
    """One failed job among 20 000 of its tenant: a partial index that holds only such."""
    await run_sql(database, _FILL.format(series=_SERIES[database.dialect]), many=_MANY)
    await run_sql(database, "ANALYZE jobs")

    rows, plan = await _explain(database, lambda tx: list_jobs(tx, "t", **filters))

    assert [row.id for row in rows] == ["job_100005"]
    assert index in plan
    assert "ix_jobs_tenant_id" not in plan


async def test_old_events_about_no_job_are_found_by_an_index(database: Database) -> None:
    """Two among 20 000 of jobs and as many young ones: the sweep, again and again, reads those."""
    await run_sql(database, _FILL.format(series=_SERIES[database.dialect]), many=_MANY)
    await run_sql(
        database,
        "INSERT INTO events (id, job_id, generation, tenant, type, created_at)"
        " SELECT 'evt_' || id, id, 0, 't', 'job.succeeded', 1 FROM jobs",
    )
    await run_sql(
        database,
        "INSERT INTO events (id, generation, tenant, type, created_at)"
        " SELECT 'young_' || id, 0, 't', 'webhook.test', 1e12 FROM jobs",
    )
    await run_sql(
        database,
        "INSERT INTO events (id, generation, tenant, type, created_at)"
        " VALUES ('evt_a', 0, 't', 'webhook.test', 1), ('evt_b', 0, 't', 'webhook.test', 1)",
    )
    await run_sql(database, "ANALYZE events")

    purged, plan = await _explain(
        database, lambda tx: purge_events(tx, older_than_s=1.0, limit=500)
    )

    assert purged == 2
    assert "ix_events_no_job" in plan


async def test_old_tombstones_are_found_by_an_index(database: Database) -> None:
    """Two among 20 000 jobs and many young tombstones: no sweep reads the others."""
    await run_sql(database, _FILL.format(series=_SERIES[database.dialect]), many=_MANY)
    for change in (
        "deleted_at = 1e12 WHERE id LIKE '%7'",
        "deleted_at = 1 WHERE id IN ('job_100003', 'job_100008')",
        "deleted_at = 1, blob_key = 'b' WHERE id = 'job_100009'",
    ):
        await run_sql(database, f"UPDATE jobs SET {change}")  # noqa: S608
    await run_sql(database, "ANALYZE jobs")

    early, plan = await _explain(
        database, lambda tx: purge_tombstones(tx, older_than_s=1e10, limit=500)
    )
    async with database.transaction() as tx:
        purged = await purge_tombstones(tx, older_than_s=1.0, limit=500)

    left = await run_sql(database, "SELECT id FROM jobs WHERE deleted_at = 1")
    assert (early, purged, [row.id for row in left]) == (0, 2, ["job_100009"])
    assert "ix_jobs_tombstones" in plan


async def test_known_scores_are_found_by_their_keys(database: Database) -> None:
    """A hundred of 20 000 entries in one job: no other is read. SQLite is never analysed."""
    await run_sql(database, _FILL.format(series=_SERIES[database.dialect]), many=_MANY)
    await run_sql(
        database,
        "INSERT INTO score_cache (key, job_id, first_item, item_count, has_hidden, created_at)"
        " SELECT 'key_' || id, 'job_100001', 0, 1, 0, 1 FROM jobs",
    )
    if database.dialect == "postgresql":
        await run_sql(database, "ANALYZE score_cache")
    keys = [f"key_job_{100_001 + n}" for n in range(100)]

    found, plan = await _explain(database, lambda tx: find_cached(tx, "t", keys, hidden=False))

    assert found.keys() == set(keys)
    assert "ix_score_cache_job_id" not in plan
    assert "ix_jobs_tenant_id (tenant=?)" not in plan
