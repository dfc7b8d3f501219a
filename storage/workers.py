"""The registry of workers: who is alive, and what the models on them say of themselves."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from contract.models import ModelState, ModelStatus
from storage.database import Transaction
from storage.statements import execute

__all__ = [
    "Memory",
    "WorkerRow",
    "drop_dead_workers",
    "drop_worker",
    "heartbeat",
    "list_workers",
    "models",
    "put_worker",
]

_RANK = {ModelState.READY: 0, ModelState.LOADING: 1, ModelState.FAILED: 2}
_decoder = msgspec.json.Decoder(list[ModelStatus])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a process holds: of the host, and of its device. None where the system does not say."""

    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    device_memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker process. ``age_s`` is the time since its last heartbeat, when it was read."""

    id: str
    host: str
    pid: int
    device: str
    models: list[ModelStatus] = field(default_factory=list)
    age_s: float = 0.0
    started_at: float = 0.0
    memory: Memory = field(default_factory=Memory)


async def put_worker(tx: Transaction, worker: WorkerRow) -> None:
    """Register ``worker``, or replace what it said of itself; counts as a heartbeat."""
    values: dict[str, Any] = {
        "id": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "device": worker.device,
        "models": _encode(worker.models),
    }
    await execute(tx, _PUT, values)


async def heartbeat(
    tx: Transaction,
    worker_id: str,
    models: Sequence[ModelStatus] | None = None,
    memory: Memory | None = None,
) -> bool:
    """Say that the worker is alive, and how its models are; false if it is not registered."""
    values = {"id": worker_id, "models": None if models is None else _encode(models)}
    values |= asdict(memory or Memory())
    return (await execute(tx, _BEAT, values)).one_or_none() is not None


async def drop_worker(tx: Transaction, worker_id: str) -> None:
    """Forget a worker that ends."""
    await execute(tx, "DELETE FROM workers WHERE id = :id", {"id": worker_id})


async def drop_dead_workers(tx: Transaction, *, older_than_s: float) -> int:
    """Forget workers without a heartbeat for that long; return how many."""
    return (await execute(tx, _DROP, {"older_than_s": older_than_s})).rowcount


async def list_workers(tx: Transaction, *, alive_within_s: float | None = None) -> list[WorkerRow]:
    """Return the workers, oldest first; ``alive_within_s`` leaves those whose heart still beats."""
    limit = 1e12 if alive_within_s is None else alive_within_s
    return [
        WorkerRow(
            id=row.id,
            host=row.host,
            pid=row.pid,
            device=row.device,
            models=_decoder.decode(row.models),
            age_s=float(row.age_s),
            started_at=row.started_at,
            memory=Memory(
                memory_bytes=row.memory_bytes,
                device_memory_bytes=row.device_memory_bytes,
                device_memory_total_bytes=row.device_memory_total_bytes,
            ),
        )
        for row in await execute(tx, _LIST, {"alive_within_s": limit})
    ]


async def models(tx: Transaction, *, alive_within_s: float) -> list[ModelStatus]:
    """Return each model once, by name: ready if it is on any live worker, else as good as it gets.

    A model that only dead workers knew is ``loading``: jobs wait for a worker. Its description is
    the newest that is known.
    """
    best: dict[str, ModelStatus] = {}
    for worker in await list_workers(tx):
        alive = worker.age_s <= alive_within_s
        for status in worker.models:
            if alive:
                seen = status
            elif status.state is ModelState.FAILED:
                continue
            else:
                seen = msgspec.structs.replace(status, state=ModelState.LOADING)
            best[status.name] = _better(best.get(status.name), seen)
    return [best[name] for name in sorted(best)]


def _better(old: ModelStatus | None, new: ModelStatus) -> ModelStatus:
    if old is None:
        return new
    first, second = (old, new) if _RANK[old.state] < _RANK[new.state] else (new, old)
    if first.description is None and second.description is not None:
        return msgspec.structs.replace(first, description=second.description)
    return first


def _encode(models_: Sequence[ModelStatus]) -> str:
    return msgspec.json.encode(list(models_)).decode()


_PUT = """
INSERT INTO workers (id, host, pid, device, models, started_at, heartbeat_at)
VALUES (:id, :host, :pid, :device, :models, {now}, {now})
ON CONFLICT (id) DO UPDATE SET host = excluded.host, pid = excluded.pid,
    device = excluded.device, models = excluded.models, heartbeat_at = excluded.heartbeat_at
"""

_BEAT = """
UPDATE workers SET heartbeat_at = {now}, models = coalesce(:models, models),
    memory_bytes = coalesce(:memory_bytes, memory_bytes),
    device_memory_bytes = coalesce(:device_memory_bytes, device_memory_bytes),
    device_memory_total_bytes = coalesce(:device_memory_total_bytes, device_memory_total_bytes)
WHERE id = :id RETURNING id
"""

_DROP = "DELETE FROM workers WHERE heartbeat_at < {now} - :older_than_s"

_LIST = """
SELECT id, host, pid, device, models, {now} - heartbeat_at AS age_s, started_at,
    memory_bytes, device_memory_bytes, device_memory_total_bytes
FROM workers
WHERE heartbeat_at >= {now} - :alive_within_s ORDER BY started_at, id
"""
