"""The state of the whole installation at one moment, as ``GET /v1/overview`` shows it."""

import msgspec

from contract.jobs import Lane
from contract.models import ModelState

__all__ = [
    "DeliveriesOverview",
    "LaneOverview",
    "ModelOverview",
    "Overview",
    "ThroughputOverview",
    "WorkerOverview",
]


class LaneOverview(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane of one model holds. ``oldest_age_s`` and ``tokens`` are of the waiting jobs."""

    lane: Lane
    waiting: int = 0
    tokens: int = 0
    oldest_age_s: float = 0.0
    running: int = 0


class ModelOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A model: how it is served, and its lanes in the order in which they are served.

    ``state`` is null for one that no worker and no registry names, though jobs wait for it.
    """

    id: str
    state: ModelState | None
    reason: str | None = None
    lanes: list[LaneOverview]


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that scores. Memory is null where its system does not say.

    ``device_memory_bytes`` is used on the device by whichever process.
    """

    id: str
    host: str
    pid: int
    device: str
    alive: bool
    heartbeat_age_s: float
    started_at: str | None
    memory_bytes: int | None
    device_memory_bytes: int | None
    device_memory_total_bytes: int | None
    running: int
    models: dict[str, ModelState]


class ThroughputOverview(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers did, oldest slot first. The last slot began at ``last_at`` and goes on."""

    slot_s: int
    last_at: str
    jobs: list[float]
    items: list[float]
    tokens: list[float]


class DeliveriesOverview(msgspec.Struct, frozen=True, kw_only=True):
    """Webhooks on their way. ``overdue_s`` is of the oldest, ``dead`` are those given up."""

    pending: int
    overdue_s: float
    dead: int


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an operator looks at first."""

    object: str = "overview"
    models: list[ModelOverview]
    workers: list[WorkerOverview]
    throughput: ThroughputOverview
    deliveries: DeliveriesOverview
