"""The statement that claims a batch, once per dialect: the hottest SQL of the service.

In words: find, by a loose scan of the partial index, which tenants wait in which lane of which
model; take the model of the most urgent, oldest head; of its tenants the first few jobs each;
order them by urgency, then turn (every tenant's first, every tenant's second, …), then age; lock
the first ``:max_jobs``, leaving what another worker is locking; keep those within the tokens.

The work is bounded by the number of tenants plus a few hundred rows, whatever the backlog.
"""

__all__ = ["CLAIM"]

_READY = """state = 'queued' AND available_at <= {now}
    AND (queue_deadline_at IS NULL OR queue_deadline_at > {now})"""

#: Below every lane in an aged claim: what waited too long.
_URGENCY = """CASE WHEN :aged = 1 AND {alias}.created_at < {now} - :ageing_s
    THEN -1 ELSE {alias}.lane END"""

#: Candidates beyond ``:max_jobs``, for rows that others lock and tenants with few jobs.
_WIDE = 4

_TAILS = """
tails(model, lane, tenant) AS (
    SELECT m.value, l.lane, (SELECT min(j.tenant) FROM jobs j
        WHERE j.state = 'queued' AND j.model = m.value AND j.lane = l.lane)
    FROM MODELS m CROSS JOIN (SELECT 0 AS lane UNION ALL SELECT 1 UNION ALL SELECT 2) l
    UNION ALL
    SELECT t.model, t.lane, (SELECT min(j.tenant) FROM jobs j WHERE j.state = 'queued'
        AND j.model = t.model AND j.lane = t.lane AND j.tenant > t.tenant)
    FROM tails t WHERE t.tenant IS NOT NULL)"""

_SHARE = f"""
share AS MATERIALIZED (
    SELECT model, CAST(max(2, :max_jobs * {2 * _WIDE} / count(*)) AS integer) AS rows
    FROM heads WHERE model = (SELECT h.model FROM heads h ORDER BY h.urgency, h.id LIMIT 1)
    GROUP BY model)"""  # noqa: S608

_TAKEN = """
class AS MATERIALIZED (
    SELECT crashes FROM ranked ORDER BY urgency, turn, id LIMIT 1),
locked AS MATERIALIZED (
    SELECT j.id, j.estimated_tokens, r.urgency, r.turn
    FROM ranked r JOIN jobs j ON j.id = r.id
    WHERE r.crashes = (SELECT crashes FROM class) AND j.state = 'queued'
    ORDER BY r.urgency, r.turn, r.id
    LIMIT (SELECT CASE crashes WHEN 0 THEN :max_jobs WHEN 1 THEN min(8, :max_jobs) ELSE 1 END
           FROM class)
    {skip j}),
taken AS MATERIALIZED (
    SELECT s.id AS taken_id FROM (
        SELECT id, sum(estimated_tokens) OVER (ORDER BY urgency, turn, id) AS running,
               row_number() OVER (ORDER BY urgency, turn, id) AS place
        FROM locked) s
    WHERE s.running <= :max_tokens OR s.place = 1)
UPDATE jobs SET
    state = 'running', attempt = attempt + 1, version = version + 1, worker = :worker,
    lease_until_at = {now} + :lease_s, started_at = {now}, queue_deadline_at = NULL
FROM taken WHERE jobs.id = taken_id
RETURNING id, tenant, model, lane, attempt, crash_count, error_count, item_count,
          estimated_tokens, run_timeout_s, created_at, request"""

_POSTGRESQL = f"""
WITH RECURSIVE {_TAILS.replace("MODELS", "json_array_elements_text(CAST(:models AS json))")},
heads AS MATERIALIZED (
    SELECT t.model, t.lane, t.tenant, h.id, h.urgency
    FROM tails t CROSS JOIN LATERAL (
        SELECT j.id, {_URGENCY.replace("{alias}", "j")} AS urgency FROM jobs j
        WHERE j.model = t.model AND j.lane = t.lane AND j.tenant = t.tenant AND {_READY}
        ORDER BY j.id LIMIT 1) h
    WHERE t.tenant IS NOT NULL),
{_SHARE.replace("max(2,", "greatest(2,")},
ranked AS MATERIALIZED (
    SELECT c.id, c.crashes, c.urgency,
           row_number() OVER (PARTITION BY h.lane, h.tenant ORDER BY c.id) AS turn
    FROM share s JOIN heads h ON h.model = s.model CROSS JOIN LATERAL (
        SELECT j.id, least(j.crash_count, 2) AS crashes,
               {_URGENCY.replace("{alias}", "j")} AS urgency FROM jobs j
        WHERE j.model = h.model AND j.lane = h.lane AND j.tenant = h.tenant AND {_READY}
        ORDER BY j.id LIMIT s.rows) c),
{_TAKEN.replace("min(8,", "least(8,")}
"""  # noqa: S608  # constants of ours

_SQLITE = f"""
WITH RECURSIVE {_TAILS.replace("MODELS", "json_each(:models)")},
heads AS MATERIALIZED (
    SELECT t.model, t.lane, t.tenant, h.id, {_URGENCY.replace("{alias}", "h")} AS urgency
    FROM tails t JOIN jobs h ON h.id = (
        SELECT j.id FROM jobs j
        WHERE j.model = t.model AND j.lane = t.lane AND j.tenant = t.tenant AND {_READY}
        ORDER BY j.id LIMIT 1)
    WHERE t.tenant IS NOT NULL),
{_SHARE},
ranked AS MATERIALIZED (
    SELECT c.id, min(c.crash_count, 2) AS crashes, {_URGENCY.replace("{alias}", "c")} AS urgency,
           row_number() OVER (PARTITION BY h.lane, h.tenant ORDER BY c.id) AS turn
    FROM share s JOIN heads h ON h.model = s.model JOIN jobs c ON c.id IN (
        SELECT j.id FROM jobs j
        WHERE j.model = h.model AND j.lane = h.lane AND j.tenant = h.tenant AND {_READY}
        ORDER BY j.id LIMIT (SELECT rows FROM share))),
{_TAKEN}
"""  # noqa: S608  # constants of ours

#: By dialect; parameters: models (JSON), worker, max_jobs, max_tokens, lease_s, aged, ageing_s.
CLAIM = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}
