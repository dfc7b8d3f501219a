"""The statements that claim deliveries, once per dialect.

In words: find, by a loose scan of the partial index, which receivers have something due and are not
paused, longest due first, and lock each by its name; then, in a second statement, count what is on
its way to each and take what is due up to the places that are free. A receiver whose last attempts
failed has one place: a probe.

Two statements, because PostgreSQL's second one sees what was committed before the lock was had: so
the places hold for all processes together. A receiver that somebody else is claiming from is left
to them. SQLite has one writer and needs no lock.

The work is bounded by the number of receivers plus the rows taken, whatever the backlog.
"""

__all__ = ["READY", "TAKE"]

#: How many places of receiver ``c`` are free, as this statement sees it.
_FREE = """
CASE WHEN EXISTS (SELECT 1 FROM receivers f WHERE f.name = c.name AND f.failures > 0)
    THEN 1 ELSE :places END
- (SELECT count(*) FROM deliveries d WHERE d.state = 'pending' AND d.worker IS NOT NULL
   AND d.receiver = c.name AND d.due_at > {now})"""

_READY = f"""
WITH RECURSIVE names(name) AS (
    SELECT (SELECT d.receiver FROM deliveries d WHERE d.state = 'pending'
            ORDER BY d.receiver LIMIT 1)
    UNION ALL
    SELECT (SELECT d.receiver FROM deliveries d WHERE d.state = 'pending' AND d.receiver > n.name
            ORDER BY d.receiver LIMIT 1)
    FROM names n WHERE n.name IS NOT NULL),
heads AS MATERIALIZED (
    SELECT n.name, (SELECT d.due_at FROM deliveries d
            WHERE d.state = 'pending' AND d.receiver = n.name ORDER BY d.due_at LIMIT 1) AS head_at
    FROM names n LEFT JOIN receivers r ON r.name = n.name
    WHERE n.name IS NOT NULL AND coalesce(r.paused_until_at, 0) <= {{now}}),
ready AS MATERIALIZED (
    SELECT c.name, c.head_at, {_FREE} AS room FROM heads c WHERE c.head_at <= {{now}})
"""  # noqa: S608  # constants of ours

_ROOM = f"""
room AS MATERIALIZED (
    SELECT c.name, {_FREE} AS room
    FROM {{rows(name text)}} c LEFT JOIN receivers r ON r.name = c.name
    WHERE coalesce(r.paused_until_at, 0) <= {{now}}),"""  # noqa: S608  # constants of ours

_CHOOSE = """
SELECT name, {locked} AS is_locked FROM (
    SELECT name FROM ready WHERE room > 0 ORDER BY head_at LIMIT :limit) o
"""

_TAKE = """
UPDATE deliveries SET attempt = attempt + 1, worker = :worker, due_at = {now} + :lease_s
FROM due WHERE deliveries.id = due_id RETURNING id"""

_POSTGRESQL = f"""WITH {_ROOM}
due AS MATERIALIZED (
    SELECT x.id AS due_id FROM room o CROSS JOIN LATERAL (
        SELECT d.id, d.due_at FROM deliveries d
        WHERE d.state = 'pending' AND d.receiver = o.name AND d.due_at <= {{now}}
        ORDER BY d.due_at LIMIT greatest(o.room, 0) {{skip d}}) x
    ORDER BY x.due_at LIMIT :limit)
{_TAKE}"""  # noqa: S608  # constants of ours

_SQLITE = f"""WITH {_ROOM}
ranked AS MATERIALIZED (
    SELECT d.id, d.due_at, o.room,
           row_number() OVER (PARTITION BY o.name ORDER BY d.due_at, d.id) AS turn
    FROM room o JOIN deliveries d ON d.id IN (
        SELECT x.id FROM deliveries x
        WHERE x.state = 'pending' AND x.receiver = o.name AND x.due_at <= {{now}}
        ORDER BY x.due_at, x.id LIMIT :places)),
due AS MATERIALIZED (
    SELECT id AS due_id FROM ranked WHERE turn <= room ORDER BY due_at LIMIT :limit)
{_TAKE}"""  # noqa: S608  # constants of ours

#: Marks our advisory locks: the first of their two keys, the second is the receiver's hash.
_LOCK_CLASS = 0x5C0EE

#: By dialect; parameters: places, limit. Rows: name, is_locked (by us, until the transaction ends).
READY = {
    "postgresql": _READY
    + _CHOOSE.replace("{locked}", f"pg_try_advisory_xact_lock({_LOCK_CLASS}, hashtext(name))"),
    "sqlite": _READY + _CHOOSE.replace("{locked}", "1"),
}
#: By dialect; parameters: rows (JSON: name), places, limit, worker, lease_s.
TAKE = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}
