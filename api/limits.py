"""What a tenant may have and do, and what all of them together may: the only place that says no.

Counts are read from SQL and kept; what this process lets in meanwhile is added to them. Several
processes may together let in a little more than a limit, for as long as a reading stands.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from aiohttp import web

from api.auth import IDENTITY, scope_of
from contract.config import Settings
from contract.errors import (
    NoCapacityError,
    OverloadedError,
    QuotaExceededError,
    RateLimitedError,
    ScoreError,
    StoreUnavailableError,
)
from contract.jobs import LANES, Lane
from contract.limits import TenantLimits
from contract.policies import RatePolicy
from storage.counters import read_counts
from storage.database import Database, Transaction
from storage.limits import read_limits
from storage.usage import Waiting, count_open_bulks, read_stored_bytes, read_waiting

__all__ = [
    "GATE",
    "OWN_LIMITS",
    "POLICIES",
    "Gate",
    "check_open_bulks",
    "find_bulk_fault",
    "limits_middleware",
    "refuse_bytes",
]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)

#: How long a reading stands, and how long where it decides that somebody is refused.
_KEPT_S = 1.0
_KEPT_REFUSING_S = 0.1
#: A reading that took long stands longer: reading takes at most a twentieth of the time.
_COST_FACTOR = 20
_BURST_S = 10
#: How far back the throughput is measured.
_MEASURED_S = 60.0
_UNMEASURED_RETRY_S = 30.0
_LONGEST_RETRY_S = 3600.0
#: A queue that is full is full until this share of it is free again.
_FREE_SHARE = 0.1
_QUOTA_RETRY_S = 60.0
_KEPT_TENANTS = 10_000

#: What the answer says of limits, beside its own error's.
POLICIES = web.RequestKey("policies", Sequence[RatePolicy])


@dataclass(slots=True)
class _Amount:
    """Jobs and their estimated tokens, by tenant and by lane."""

    of_tenants: dict[str, list[int]] = field(default_factory=dict)
    of_lanes: list[int] = field(default_factory=lambda: [0] * len(LANES))

    def add(self, tenant: str, lane: Lane, jobs: int, tokens: int) -> None:
        """Count jobs of a tenant's own; none take away what was counted."""
        counted = self.of_tenants.setdefault(tenant, [0, 0])
        counted[0] += jobs
        counted[1] += tokens
        if counted == [0, 0]:
            del self.of_tenants[tenant]
        self.of_lanes[LANES.index(lane)] += tokens

    def until(self, lane: Lane) -> int:
        """Return the tokens in the lanes up to this one: what is served before."""
        return sum(self.of_lanes[: LANES.index(lane) + 1])


@dataclass(slots=True)
class _Reading:
    """What SQL said, when, and how long it took to say so."""

    waiting: _Amount
    own_limits: dict[str, TenantLimits]
    read_at: float
    cost_s: float


class _Bucket:
    """Requests of one tenant: a rate, and a burst of some seconds of it."""

    def __init__(self, now: float, rate: float) -> None:
        self.filled_at = now
        self.rate = rate
        self.left = self.burst = max(1.0, rate * _BURST_S)

    def take(self, now: float, rate: float) -> bool:
        """Take one, where there is one."""
        self.burst = max(1.0, rate * _BURST_S)
        self.left = min(self.burst, self.left + (now - self.filled_at) * rate)
        self.filled_at, self.rate = now, rate
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True

    @property
    def policy(self) -> RatePolicy:
        """What the headers say of it."""
        missing = max(0.0, 1.0 - self.left)
        return RatePolicy(
            "requests", int(self.burst), int(self.left), missing / self.rate, window_s=_BURST_S
        )


class Gate:
    """Lets work in, or says why not and until when. Belongs to the event loop.

    While SQL is away the last reading stands: a submission then fails by itself. Redis has no say.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._defaults = settings.tenant_limits
        self._reading = _Reading(_Amount(), {}, -1.0, 0.0)
        self._lock = asyncio.Lock()
        self._in_flight = _Amount()  # let in, and not yet in SQL
        self._since = _Amount()  # in SQL, perhaps since the reading
        self._samples: deque[tuple[float, float]] = deque()
        self._buckets: dict[str, _Bucket] = {}
        self._stored: dict[str, tuple[float, int, float]] = {}
        self._was_asked = asyncio.Event()

    async def run(self) -> None:
        """Read again and again while there is anybody to be let in, for ever."""
        while True:
            await self._was_asked.wait()
            self._was_asked.clear()
            await self._read(_KEPT_S)
            await asyncio.sleep(max(_KEPT_S, self._reading.cost_s * _COST_FACTOR))

    async def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant: its own, and for what they do not say the settings'."""
        await self._read_first()
        self._was_asked.set()
        own = self._reading.own_limits.get(tenant)
        return self._defaults if own is None else own.over(self._defaults)

    async def count_request(self, tenant: str) -> list[RatePolicy]:
        """Count a request. Raises ``RateLimitedError`` where the tenant sends too many."""
        rate = (await self.limits_of(tenant)).requests_per_s
        if not rate:
            return []
        now = time.monotonic()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= _KEPT_TENANTS:
                self._buckets.clear()
            bucket = self._buckets[tenant] = _Bucket(now, rate)
        if bucket.take(now, rate):
            return [bucket.policy]
        message = f"more than {rate:g} requests a second; wait, then try again"
        raise RateLimitedError(message, retry_after_s=bucket.policy.reset_s, policy=bucket.policy)

    @contextlib.asynccontextmanager
    async def admitting(
        self, tenant: str, lane: Lane, tokens: int
    ) -> AsyncIterator[Callable[[], None]]:
        """Let a job in while the block adds it; call what is yielded once it is added.

        Raises ``OverloadedError`` for a limit of the tenant's, ``NoCapacityError`` where the queue
        is full.
        """
        await self._check(tenant, lane, tokens)
        self._in_flight.add(tenant, lane, 1, tokens)
        try:
            yield lambda: self._since.add(tenant, lane, 1, tokens)
        finally:
            self._in_flight.add(tenant, lane, -1, -tokens)

    async def check_capacity(self, lane: Lane, tokens: int = 0) -> None:
        """Raise ``NoCapacityError`` where what waits up to this lane is too much already."""
        await self._read_first()
        most = self._settings.queue_tokens
        if not most or self._depth(lane) + tokens <= most:
            return
        await self._read(_KEPT_REFUSING_S)
        depth = self._depth(lane)
        if depth + tokens <= most:
            return
        reset_s = self._time_for(depth + tokens - most * (1 - _FREE_SHARE))
        policy = RatePolicy("queue-tokens", most, most - depth, reset_s)
        message = f"about {depth} tokens wait, {most} may; try again in about {reset_s:.0f} s"
        raise NoCapacityError(message, retry_after_s=reset_s, policy=policy)

    async def free_bytes(self, tenant: str) -> int | None:
        """Return what a tenant may store yet, or None. Raises ``QuotaExceededError`` at nothing."""
        most = (await self.limits_of(tenant)).stored_bytes
        if not most:
            return None
        read_at, used, cost_s = self._stored.get(tenant, (-_LONGEST_RETRY_S, 0, 0.0))
        if time.monotonic() - read_at > max(_KEPT_S, cost_s * _COST_FACTOR):
            used = await self._read_stored(tenant)
        if used < most:
            return most - used
        message = f"{used} bytes are stored, {most} may be; delete files or jobs first"
        raise QuotaExceededError(
            message,
            retry_after_s=_QUOTA_RETRY_S,
            policy=RatePolicy("stored-bytes", most, 0, _QUOTA_RETRY_S),
        )

    def forget_bytes(self, tenant: str) -> None:
        """Read anew what a tenant stores when it is asked for next."""
        self._stored.pop(tenant, None)

    async def _check(self, tenant: str, lane: Lane, tokens: int) -> None:
        if any(self._over(await self.limits_of(tenant), tenant, tokens)):
            await self._read(_KEPT_REFUSING_S)
            for error in self._over(await self.limits_of(tenant), tenant, tokens):
                raise error
        await self.check_capacity(lane, tokens)
        await self.free_bytes(tenant)

    def _over(self, limits: TenantLimits, tenant: str, tokens: int) -> Iterable[OverloadedError]:
        amounts = (self._reading.waiting, self._since, self._in_flight)
        jobs, waiting = (
            sum(each.of_tenants.get(tenant, [0, 0])[which] for each in amounts) for which in (0, 1)
        )
        for name, used, wanted, most in (
            ("queued-jobs", jobs, 1, limits.queued_jobs or 0),
            ("queued-tokens", waiting, tokens, limits.queued_tokens or 0),
        ):
            if most and used + wanted > most:
                share = waiting / max(1, used)  # tokens that must go for one job to go
                reset_s = self._time_for((used + wanted - most) * share)
                policy = RatePolicy(name, most, most - used, reset_s)
                message = f"your {name} are {used} and may be {most}; wait, or cancel some"
                yield OverloadedError(message, retry_after_s=reset_s, policy=policy)

    def _depth(self, lane: Lane) -> int:
        amounts = (self._reading.waiting, self._since, self._in_flight)
        return sum(each.until(lane) for each in amounts)

    def _time_for(self, tokens: float) -> float:
        """Return how long the workers take for so many tokens, as fast as they were lately."""
        rate = self._throughput()
        if rate <= 0:
            return _UNMEASURED_RETRY_S
        return min(_LONGEST_RETRY_S, max(1.0, tokens / rate))

    def _throughput(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return max(0.0, last - first) / max(1e-3, last_at - first_at)

    async def _read_first(self) -> None:
        if self._reading.read_at < 0:
            await self._read(_KEPT_S)

    async def _read(self, kept_s: float) -> _Reading:
        """Return a reading that is not older, or the last one where somebody is reading just now.

        Before the first there is none to return: the limits of tenants are not known.
        """
        is_first = self._reading.read_at < 0
        if self._is_fresh(kept_s) or (self._lock.locked() and not is_first):
            return self._reading
        async with self._lock:
            if not self._is_fresh(kept_s):
                await self._read_now()
        return self._reading

    def _is_fresh(self, kept_s: float) -> bool:
        age_s = time.monotonic() - self._reading.read_at
        kept_s = max(kept_s, self._reading.cost_s * _COST_FACTOR)
        return self._reading.read_at >= 0 and age_s < kept_s

    async def _read_now(self) -> None:
        began_at = time.monotonic()
        before, self._since = self._since, _Amount()
        try:
            async with self._database.snapshot() as tx:
                own_limits, rows = await read_limits(tx), await read_waiting(tx)
                finished = (await read_counts(tx)).get("tokens_claimed", 0.0)
        except StoreUnavailableError:
            _log.warning("cannot read what waits", extra={"action": "usage_unread"})
            for tenant, (jobs, tokens) in before.of_tenants.items():
                self._since.of_tenants.setdefault(tenant, [0, 0])[0] += jobs
                self._since.of_tenants[tenant][1] += tokens
            self._since.of_lanes = [
                sum(both) for both in zip(self._since.of_lanes, before.of_lanes, strict=True)
            ]
            self._reading.read_at = began_at
            return
        now = time.monotonic()
        self._reading = _Reading(_count(rows), own_limits, now, now - began_at)
        self._samples.append((now, finished))
        while now - self._samples[0][0] > _MEASURED_S:
            self._samples.popleft()

    async def _read_stored(self, tenant: str) -> int:
        began_at = time.monotonic()
        async with self._database.snapshot() as tx:
            used = await read_stored_bytes(tx, tenant)
        now = time.monotonic()
        if len(self._stored) >= _KEPT_TENANTS:
            self._stored.clear()
        self._stored[tenant] = (now, used, now - began_at)
        return used


def refuse_bytes(free_bytes: int) -> NoReturn:
    """Raise ``QuotaExceededError`` for what does not fit into what a tenant may store yet."""
    message = f"only {free_bytes} bytes more may be stored; delete files or jobs first"
    policy = RatePolicy("stored-bytes", free_bytes, 0, _QUOTA_RETRY_S)
    raise QuotaExceededError(message, retry_after_s=_QUOTA_RETRY_S, policy=policy)


async def find_bulk_fault(request: web.Request, lane: Lane) -> ScoreError | None:
    """Return why no new bulk can be let in, or None: asked before a transaction is open."""
    gate = request.app[GATE]
    try:
        await gate.check_capacity(lane)
        await gate.free_bytes(request[IDENTITY].tenant)
    except (NoCapacityError, OverloadedError) as fault:
        return fault
    return None


async def check_open_bulks(request: web.Request, tx: Transaction, fault: ScoreError | None) -> None:
    """Raise ``fault``, or ``OverloadedError`` where the tenant now has too many open bulks.

    To be asked in the transaction that opens one, and after it was opened there.
    """
    if fault is not None:
        raise fault
    most = request[OWN_LIMITS].open_bulks
    if most and await count_open_bulks(tx, request[IDENTITY].tenant) > most:
        message = f"{most} bulks are open, as many as there may be; wait for one to end"
        policy = RatePolicy("open-bulks", most, 0, _QUOTA_RETRY_S)
        raise OverloadedError(message, retry_after_s=_QUOTA_RETRY_S, policy=policy)


GATE = web.AppKey("gate", Gate)
#: The limits of who asks.
OWN_LIMITS = web.RequestKey("own_limits", TenantLimits)


@web.middleware
async def limits_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Count the request, and let its handler know its tenant's limits. Open paths ask nobody."""
    tenant = request[IDENTITY].tenant
    if scope_of(request.method, request.path) is not None:
        gate = request.app[GATE]
        request[POLICIES] = await gate.count_request(tenant)
        request[OWN_LIMITS] = await gate.limits_of(tenant)
    return await handler(request)


def _count(rows: Iterable[Waiting]) -> _Amount:
    """A bulk's jobs fill their lane; its tenant is held to a number of bulks instead."""
    amount = _Amount()
    for row in rows:
        if row.in_bulks:
            amount.of_lanes[LANES.index(row.lane)] += row.tokens
        else:
            amount.add(row.tenant, row.lane, row.jobs, row.tokens)
    return amount
