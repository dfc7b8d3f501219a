"""The statement that claims deliveries, once per dialect.

In words: find, by a loose scan of the partial index, which receivers have something pending; leave
out those that are paused or have no place free; of the others, longest due first, take what is due
up to the places that each has free. A receiver whose last attempts failed has one place: a probe.

The work is bounded by the number of receivers plus the rows taken, whatever the backlog.
"""

__all__ = ["CLAIM"]

_READY = """
WITH RECURSIVE names(name) AS (
    SELECT (SELECT d.receiver FROM deliveries d WHERE d.state = 'pending'
            ORDER BY d.receiver LIMIT 1)
    UNION ALL
    SELECT (SELECT d.receiver FROM deliveries d WHERE d.state = 'pending' AND d.receiver > n.name
            ORDER BY d.receiver LIMIT 1)
    FROM names n WHERE n.name IS NOT NULL),
heads AS MATERIALIZED (
    SELECT n.name,
           CASE WHEN coalesce(r.failures, 0) > 0 THEN 1 ELSE :places END - coalesce(b.busy, 0)
               AS room,
           (SELECT d.due_at FROM deliveries d WHERE d.state = 'pending' AND d.receiver = n.name
            ORDER BY d.due_at LIMIT 1) AS head_at
    FROM names n LEFT JOIN receivers r ON r.name = n.name
    LEFT JOIN {rows(name text, busy integer)} b ON b.name = n.name
    WHERE n.name IS NOT NULL AND coalesce(r.paused_until_at, 0) <= {now}),
ready AS MATERIALIZED (
    SELECT name, room FROM heads WHERE room > 0 AND head_at <= {now}
    ORDER BY head_at LIMIT :limit),"""

_TAKE = """
UPDATE deliveries SET attempt = attempt + 1, worker = :worker, due_at = {now} + :lease_s
FROM due WHERE deliveries.id = due_id RETURNING id"""

_POSTGRESQL = f"""{_READY}
due AS MATERIALIZED (
    SELECT x.id AS due_id FROM ready o CROSS JOIN LATERAL (
        SELECT d.id, d.due_at FROM deliveries d
        WHERE d.state = 'pending' AND d.receiver = o.name AND d.due_at <= {{now}}
        ORDER BY d.due_at LIMIT o.room {{skip d}}) x
    ORDER BY x.due_at LIMIT :limit)
{_TAKE}"""  # noqa: S608  # constants of ours

_SQLITE = f"""{_READY}
ranked AS MATERIALIZED (
    SELECT d.id, d.due_at, o.room,
           row_number() OVER (PARTITION BY o.name ORDER BY d.due_at, d.id) AS turn
    FROM ready o JOIN deliveries d ON d.id IN (
        SELECT x.id FROM deliveries x
        WHERE x.state = 'pending' AND x.receiver = o.name AND x.due_at <= {{now}}
        ORDER BY x.due_at, x.id LIMIT :places)),
due AS MATERIALIZED (
    SELECT id AS due_id FROM ranked WHERE turn <= room ORDER BY due_at LIMIT :limit)
{_TAKE}"""  # noqa: S608  # constants of ours

#: By dialect; parameters: rows (JSON: name, busy), places, limit, worker, lease_s.
CLAIM = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}
