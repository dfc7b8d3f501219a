"""Lists of what is rare do not read all of a tenant: looked up in the databases' own plans."""

from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection

from contract.jobs import JobState
from storage.database import Database
from storage.jobs import list_jobs
from tests.storage.factories import run_sql

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


async def _explain(database: Database, **filters: Any) -> tuple[list[str], str]:
    """Return the ids of a list, and the plan of the statement that found them."""
    seen: list[tuple[str, Any]] = []

    def keep(
        _connection: Connection, _cursor: Any, statement: str, parameters: Any, *_rest: Any
    ) -> None:
        seen.append((statement, parameters))

    async with database.snapshot() as tx:
        event.listen(tx.sync_connection, "before_cursor_execute", keep)
        rows = await list_jobs(tx, "t", **filters)
        event.remove(tx.sync_connection, "before_cursor_execute", keep)
        statement, parameters = seen[-1]
        verb = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
        plan = await tx.exec_driver_sql(f"{verb} {statement}", parameters)
        return [row.id for row in rows], "\n".join(str(tuple(line)) for line in plan)


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

    found, plan = await _explain(database, **filters)

    assert found == ["job_100005"]
    assert index in plan
    assert "ix_jobs_tenant_id" not in plan
