"""The statement that claims a batch, once per dialect: the hottest SQL of the service.

In words: find, by a loose scan of the partial index, which tenants wait in which lane of which
model, of many tenants a window that each claim moves on; take the model of the most urgent,
oldest head; of its tenants the first few jobs each;
order them by urgency, then turn (every tenant's first, every tenant's second, …), then age; lock
the first ``:max_jobs``, leaving what another worker is locking; keep those within the tokens.

The work is bounded by the window and a few hundred rows, whatever the backlog.
"""

__all__ = ["CLAIM"]

_READY = """state = 'queued' AND available_at <= {now}
    AND (queue_deadline_at IS NULL OR queue_deadline_at > {now})"""

#: Below every lane in an aged claim: what waited too long.
_URGENCY = """CASE WHEN :aged = 1 AND {alias}.created_at < {now} - :ageing_s
    THEN -1 ELSE {alias}.lane END"""

#: Candidates beyond ``:max_jobs``, for rows that others lock and tenants with few jobs.
_WIDE = 4

_NEXT_TENANT = """(SELECT j.tenant FROM jobs j
        WHERE j.state = 'queued' AND j.model = {model} AND j.lane = {lane}{beyond}
        ORDER BY j.tenant, j.available_at, j.id LIMIT 1)"""

#: Tenants that one claim looks at, on either side of ``:after_tenant``: 1000 would cost 58 ms.
_VISITED = 48


def _walk(name: str, beyond: str) -> str:
    """Return a loose scan of the tenants that wait, in the order of their names."""
    first = _NEXT_TENANT.format(model="m.value", lane="l.lane", beyond=f" AND {beyond}")
    onward = f" AND j.tenant > t.tenant AND {beyond}"
    following = _NEXT_TENANT.format(model="t.model", lane="t.lane", beyond=onward)
    return f"""
{name}(model, lane, tenant, visited) AS (
    SELECT m.value, l.lane, {first}, 1
    FROM MODELS m CROSS JOIN (SELECT 0 AS lane UNION ALL SELECT 1 UNION ALL SELECT 2) l
    WHERE l.lane <= :last_lane
    UNION ALL
    SELECT t.model, t.lane, {following}, t.visited + 1
    FROM {name} t WHERE t.tenant IS NOT NULL AND t.visited < {_VISITED})"""  # noqa: S608


_TAILS = f"""{_walk("later", "j.tenant > :after_tenant")}, {
    _walk("earlier", "j.tenant <= :after_tenant")
},
tails AS (
    SELECT model, lane, tenant FROM later UNION ALL SELECT model, lane, tenant FROM earlier)"""  # noqa: S608

#: Tenants that have as much running as they may. Counted only where there is such a limit.
_BUSY = """
busy AS MATERIALIZED (
    SELECT r.tenant FROM jobs r LEFT JOIN tenant_limits l ON l.tenant = r.tenant
    WHERE r.state = 'running' AND (:max_running > 0 OR EXISTS (SELECT 1 FROM tenant_limits))
    GROUP BY r.tenant, OWN
    HAVING sum(r.estimated_tokens) >= nullif(coalesce(OWN, :max_running), 0))"""

_SHARE = f"""
share AS MATERIALIZED (
    SELECT model, CAST(max(2, :max_jobs * {2 * _WIDE} / count(*)) AS integer) AS rows
    FROM heads WHERE model = (
        SELECT h.model FROM heads h ORDER BY h.urgency, h.available_at, h.id LIMIT 1)
    GROUP BY model)"""  # noqa: S608

_TAKEN = f"""
class AS MATERIALIZED (
    SELECT crashes FROM ranked ORDER BY urgency, turn, available_at, id LIMIT 1),
candidates AS MATERIALIZED (
    SELECT id, row_number() OVER (ORDER BY urgency, turn, available_at, id) AS place
    FROM ranked WHERE crashes = (SELECT crashes FROM class)
    ORDER BY place LIMIT :max_jobs * {_WIDE}),
locked AS MATERIALIZED (
    SELECT j.id, j.estimated_tokens, c.place
    FROM CANDIDATES
    WHERE j.state = 'queued'
    ORDER BY c.place
    LIMIT coalesce((SELECT CASE crashes WHEN 0 THEN :max_jobs WHEN 1 THEN min(8, :max_jobs)
                           ELSE 1 END FROM class), 0)
    {{skip j}}),
taken AS MATERIALIZED (
    SELECT s.id AS taken_id FROM (
        SELECT id, sum(estimated_tokens) OVER (ORDER BY place) AS running,
               row_number() OVER (ORDER BY place) AS place
        FROM locked) s
    WHERE s.running <= :max_tokens OR s.place = 1)
UPDATE jobs SET
    state = 'running', attempt = attempt + 1, version = version + 1, worker = :worker,
    lease_until_at = {{now}} + :lease_s, started_at = {{now}}, queue_deadline_at = NULL
FROM taken WHERE jobs.id = taken_id
RETURNING id, tenant, model, lane, attempt, crash_count, error_count, item_count,
          estimated_tokens, run_timeout_s, created_at, request, origin, generation, cache,
          {{now}} - available_at AS waited_s,
          CASE WHEN scored_count > 0 THEN blob_key END AS kept_key, usage AS kept_usage,
          result AS kept_result, tensors AS kept_tensors"""  # noqa: S608

# The array is for PostgreSQL's planner, which otherwise expects so many candidates that it scans
# the whole table for them.
_POSTGRESQL = f"""
WITH RECURSIVE {_TAILS.replace("MODELS", "json_array_elements_text(CAST(:models AS json))")},
{_BUSY.replace("OWN", "CAST(CAST(l.limits AS json)->>'running_tokens' AS bigint)")},
heads AS MATERIALIZED (
    SELECT t.model, t.lane, t.tenant, h.id, h.available_at, h.urgency
    FROM tails t CROSS JOIN LATERAL (
        SELECT j.id, j.available_at, {_URGENCY.replace("{alias}", "j")} AS urgency FROM jobs j
        WHERE j.model = t.model AND j.lane = t.lane AND j.tenant = t.tenant AND {_READY}
        ORDER BY j.available_at, j.id LIMIT 1) h
    WHERE t.tenant IS NOT NULL AND t.tenant NOT IN (SELECT tenant FROM busy)),
{_SHARE.replace("max(2,", "greatest(2,")},
ranked AS MATERIALIZED (
    SELECT c.id, c.available_at, c.crashes, c.urgency,
           row_number() OVER (PARTITION BY h.lane, h.tenant ORDER BY c.available_at, c.id) AS turn
    FROM share s JOIN heads h ON h.model = s.model CROSS JOIN LATERAL (
        SELECT j.id, j.available_at, least(j.crash_count, 2) AS crashes,
               {_URGENCY.replace("{alias}", "j")} AS urgency FROM jobs j
        WHERE j.model = h.model AND j.lane = h.lane AND j.tenant = h.tenant AND {_READY}
        ORDER BY j.available_at, j.id LIMIT s.rows) c),
{
    _TAKEN.replace("min(8,", "least(8,").replace(
        "CANDIDATES",
        "jobs j JOIN candidates c ON c.id = j.id AND j.id = ANY(ARRAY(SELECT id FROM candidates))",
    )
}
"""  # noqa: S608  # constants of ours

_SQLITE = f"""
WITH RECURSIVE {_TAILS.replace("MODELS", "json_each(:models)")},
{_BUSY.replace("OWN", "json_extract(l.limits, '$.running_tokens')")},
heads AS MATERIALIZED (
    SELECT t.model, t.lane, t.tenant, h.id, h.available_at,
           {_URGENCY.replace("{alias}", "h")} AS urgency
    FROM tails t JOIN jobs h ON h.id = (
        SELECT j.id FROM jobs j
        WHERE j.model = t.model AND j.lane = t.lane AND j.tenant = t.tenant AND {_READY}
        ORDER BY j.available_at, j.id LIMIT 1)
    WHERE t.tenant IS NOT NULL AND t.tenant NOT IN (SELECT tenant FROM busy)),
{_SHARE},
ranked AS MATERIALIZED (
    SELECT c.id, c.available_at, min(c.crash_count, 2) AS crashes,
           {_URGENCY.replace("{alias}", "c")} AS urgency,
           row_number() OVER (PARTITION BY h.lane, h.tenant ORDER BY c.available_at, c.id) AS turn
    FROM share s JOIN heads h ON h.model = s.model JOIN jobs c ON c.id IN (
        SELECT j.id FROM jobs j
        WHERE j.model = h.model AND j.lane = h.lane AND j.tenant = h.tenant AND {_READY}
        ORDER BY j.available_at, j.id LIMIT coalesce((SELECT rows FROM share), 0))),
{_TAKEN.replace("CANDIDATES", "candidates c JOIN jobs j ON j.id = c.id")}
"""  # noqa: S608  # constants of ours

#: By dialect; parameters: models (JSON), worker, max_jobs, max_tokens, lease_s, aged, ageing_s,
#: last_lane, after_tenant, max_running.
CLAIM = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}
