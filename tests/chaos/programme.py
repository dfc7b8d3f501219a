"""The fault programme: jobs flow in over HTTP while processes and servers are killed under them.

What happened is judged by an account that the service does not keep: the ledger that the scorer
wrote, the event ids that the receiver saw, and scores computed here.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import struct
import sys
import time
from asyncio.subprocess import Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from storage.blobs import BlobStore
from storage.database import Database
from storage.doctor import examine
from storage.forgetting import drop_orphans
from tests.chaos.servers import PostgresServer, RedisServer, run_postgres, run_redis
from tests.e2e.stack import Receiver, Stack, receiving
from tests.services import list_lasting_keys
from tests.storage.factories import run_sql

__all__ = ["Plan", "Report", "run_programme"]

LEASE_S = 3.0
#: With 50 kills an innocent job may well be in the hands of three victims: that rule has its own
#: tests.
MAX_CRASHES = 12
SETTINGS = {
    "SCOREKEEP_LEASE_S": str(LEASE_S),
    "SCOREKEEP_HEARTBEAT_S": "1",
    "SCOREKEEP_SWEEP_S": "1",
    "SCOREKEEP_CLAIM_JOBS": "16",
    "SCOREKEEP_MAX_CRASHES": str(MAX_CRASHES),
    "SCOREKEEP_LOG_LEVEL": "WARNING",
}
_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """How many jobs, through how many faults of each kind."""

    jobs: int = 10_000
    tiny_jobs: int = 300
    worker_kills: int = 49
    dispatcher_kills: int = 10
    postgres_restarts: int = 4
    redis_kills: int = 4
    stalls: int = 3
    workers: int = 3
    dispatchers: int = 2
    timeout_s: float = 300.0
    seed: int = 4
    talks: bool = False
    measures: bool = True

    @property
    def faults(self) -> list[str]:
        """The kinds of faults, in the order in which they come."""
        kinds = ["worker kill -9"] * self.worker_kills
        kinds += ["dispatcher kill -9"] * self.dispatcher_kills
        kinds += ["PostgreSQL immediate restart"] * self.postgres_restarts
        kinds += ["Redis kill -9"] * self.redis_kills
        kinds += ["SIGSTOP beyond the lease"] * self.stalls
        random.Random(self.seed).shuffle(kinds)  # noqa: S311  # a seed, not a secret
        return kinds


@dataclass(slots=True)
class Report:
    """What came of it."""

    jobs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    unfinished: int = 0
    wrong: int = 0
    not_in_ledger: int = 0
    terminal_events: int = 0
    event_ids_received: int = 0
    webhook_calls: int = 0
    second_attempts: int = 0
    fenced_writes: int = 0
    leases_reaped: int = 0
    orphans_collected: int = 0
    orphans_left: int = 0
    doctor_findings: int = 0
    redis_keys: list[str] = field(default_factory=list)
    submit_answers: Counter[int] = field(default_factory=Counter)
    recovery_s: dict[str, float] = field(default_factory=dict)

    def is_good(self, plan: Plan) -> bool:
        """Whether nothing was lost, nothing was doubled, and nothing is left over."""
        wrongs = [self.unfinished, self.wrong, self.not_in_ledger, self.orphans_left]
        wrongs += [self.doctor_findings, len(self.redis_keys)]
        counts = {self.jobs, self.terminal_events, self.event_ids_received}
        return not any(wrongs) and counts == {plan.jobs}

    def render(self) -> str:
        """Return the table."""
        rows: list[tuple[str, object]] = [("jobs", self.jobs)]
        rows += [(f"fault: {kind}", count) for kind, count in sorted(self.faults.items())]
        rows += [
            ("faults in all", self.faults.total()),
            ("seconds", f"{self.seconds:.1f}"),
            ("unfinished", self.unfinished),
            ("wrong", self.wrong),
            ("finished attempts that the ledger lacks", self.not_in_ledger),
            ("distinct terminal events", self.terminal_events),
            ("distinct event ids received", self.event_ids_received),
            ("webhook calls", self.webhook_calls),
            ("jobs with a second attempt", self.second_attempts),
            ("leases reaped", self.leases_reaped),
            ("fenced writes", self.fenced_writes),
            ("orphan blobs collected", self.orphans_collected),
            ("orphan blobs after collection", self.orphans_left),
            ("findings of the doctor", self.doctor_findings),
            ("Redis keys at rest", f"{len(self.redis_keys)} {self.redis_keys[:5] or ''}"),
        ]
        answers = ", ".join(f"{status}: {n}" for status, n in sorted(self.submit_answers.items()))
        rows.append(("answers to submits (0: no answer)", answers))
        rows += [(f"recovery after {kind}, s", f"{s:.2f}") for kind, s in self.recovery_s.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass
class _Victim:
    """A process that may be killed, and how to start it again."""

    kind: str
    ledger: Path
    process: Process
    stalled: bool = False

    def size(self) -> int:
        """How much it has written down."""
        return self.ledger.stat().st_size if self.ledger.exists() else 0


class Programme:
    """One run on its own servers and processes."""

    def __init__(
        self,
        plan: Plan,
        stack: Stack,
        postgres: PostgresServer,
        redis_server: RedisServer,
        receiver: Receiver,
    ) -> None:
        self.plan = plan
        self.report = Report()
        self._stack = stack
        self._postgres = postgres
        self._redis = redis_server
        self._receiver = receiver
        self._victims: list[_Victim] = []
        self._number = 0
        self._started_at = 0.0
        self._background: list[asyncio.Task[None]] = []
        self._texts: dict[str, tuple[str, str]] = {}  # id -> model, text
        self._todo: deque[tuple[str, str]] = deque()
        self._random = random.Random(plan.seed)  # noqa: S311  # a seed, not a secret
        self._database = Database(stack.environment["SCOREKEEP_DATABASE_URL"])
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15))

    async def run(self) -> Report:
        """Run it all and return the report."""
        plan, report = self.plan, self.report
        for _ in range(plan.workers):
            await self._start("worker")
        for _ in range(plan.dispatchers):
            await self._start("dispatcher")
        if plan.tiny_jobs:
            await self._stack.start_worker("--model", "tiny")
        await self._stack.wait_for("/readyz")
        self._started_at = time.monotonic()
        faults = plan.faults
        per_fault = -(-plan.jobs // max(1, len(faults)))
        submitting = [self._submit(plan.jobs, plan.tiny_jobs, per_fault)]
        try:
            await asyncio.gather(*submitting, self._inflict(faults))
            await asyncio.gather(*self._background)
            with contextlib.suppress(TimeoutError):
                await self._wait_for_end(plan.timeout_s)
            report.seconds = time.monotonic() - self._started_at
            self._say("all jobs ended, all events arrived")
            if self.plan.measures:
                await self._measure_recovery()
            await self._judge()
        finally:
            await self._http.close()
        return report

    async def close(self) -> None:
        """Stop every process, collect what is left over, and look at the rest."""
        for victim in self._victims:
            await self._stack.stop(victim.process)
        await self._stack.stop_all()
        report = self.report
        store = BlobStore.open(f"file://{self._stack.folder}/data/blobs")
        report.redis_keys = list_lasting_keys(self._redis.url)
        report.orphans_collected = await drop_orphans(self._database, store, older_than_s=-1.0)
        await store.drop_temporary(older_than_s=-1.0)
        found = await examine(self._database, store, deep=True, young_s=-1.0)
        report.orphans_left = len(found.bytes_without_rows) + len(found.blobs_without_jobs)
        report.doctor_findings = sum(found.findings.values())
        await self._database.close()

    async def _start(self, kind: str) -> None:
        self._number += 1
        ledger = self._stack.folder / f"ledger-{self._number}"
        if kind == "worker":
            arguments = ["tests.chaos.worker", str(ledger), "--model", "cheap"]
        else:
            arguments = ["worker", "--deliveries-only"]
        process = await self._stack.start(arguments[0], *arguments[1:])
        self._victims.append(_Victim(kind, ledger, process))

    async def _submit(self, jobs: int, tiny_jobs: int, per_fault: int) -> None:
        """Submit everything, at the pace of the faults; a submit is repeated until it is taken."""
        self._gate = asyncio.Semaphore(per_fault)
        todo = [("cheap", f"text number {number}") for number in range(jobs - tiny_jobs)]
        todo += [("tiny", f"tiny text number {number}") for number in range(tiny_jobs)]
        self._random.shuffle(todo)
        self._todo.extend(todo)
        async with asyncio.TaskGroup() as group:
            for _ in range(_CONNECTIONS):
                group.create_task(self._submit_some())

    async def _submit_some(self) -> None:
        while self._todo:
            await self._gate.acquire()
            if self._todo:
                await self.submit_one(*self._todo.popleft(), webhook=self._receiver.url)

    async def submit_one(self, model: str, text: str, **extra: Any) -> str:
        """Submit until it is taken; the key makes the repetition harmless."""
        key = hashlib.sha256(f"{model} {text}".encode()).hexdigest()
        body = {"model": model, "items": [text], **extra}
        while True:
            status, job = await self._try_submit(key, body)
            self.report.submit_answers[status] += 1
            if status == 202:
                self._texts[job["id"]] = (model, text)
                return str(job["id"])
            if status not in {0, 503}:
                message = f"a submit was answered {status}: {job}"
                raise AssertionError(message)
            await asyncio.sleep(0.2)

    async def _try_submit(self, key: str, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"Idempotency-Key": f'"{key}"'}
        try:
            async with self._http.post(
                f"{self._stack.url}/v1/jobs", json=body, headers=headers
            ) as answer:
                return answer.status, await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError):
            return 0, None

    async def _inflict(self, faults: Sequence[str]) -> None:
        release = -(-self.plan.jobs // max(1, len(faults)))
        for kind in faults:
            if kind == "worker kill -9":
                await self._kill(await self._choose("worker"))
            elif kind == "dispatcher kill -9":
                await self._kill(await self._choose("dispatcher"))
            elif kind == "PostgreSQL immediate restart":
                await self._postgres.restart(signal.SIGQUIT)
            elif kind == "Redis kill -9":
                await self._redis.restart()
            else:
                victim = await self._choose("worker")
                self._background.append(asyncio.create_task(self._stall(victim)))
            self.report.faults[kind] += 1
            self._say(f"{kind}: {len(self._texts)} jobs taken")
            for _ in range(release):
                self._gate.release()
        for _ in range(self.plan.jobs):
            self._gate.release()

    def _say(self, line: str) -> None:
        """Show progress where somebody looks."""
        if self.plan.talks:
            print(f"{time.monotonic() - self._started_at:6.1f} s  {line}", file=sys.stderr)  # noqa: T201

    async def _choose(self, kind: str) -> _Victim:
        """Return a process that is at work this moment: its ledger has just grown."""
        running = [v for v in self._victims if v.kind == kind and not v.stalled]
        self._random.shuffle(running)
        if kind != "worker":
            return running[0]
        sizes = {id(victim): victim.size() for victim in running}
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for victim in running:
                if victim.size() > sizes[id(victim)]:
                    return victim
            await asyncio.sleep(0.005)
        return running[0]

    async def _kill(self, victim: _Victim) -> None:
        self._victims.remove(victim)
        await self._stack.kill(victim.process)
        await self._start(victim.kind)

    async def _stall(self, victim: _Victim) -> None:
        victim.stalled = True
        victim.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * 2)
        victim.process.send_signal(signal.SIGCONT)
        victim.stalled = False

    async def _wait_for_end(self, timeout_s: float) -> None:
        """Wait until nothing is open and every event id has arrived."""
        query = "SELECT count(*) AS n FROM jobs WHERE state IN ('queued', 'running')"
        async with asyncio.timeout(timeout_s):
            while (await run_sql(self._database, query))[0].n:  # noqa: ASYNC110  # SQL sends no signal
                await asyncio.sleep(0.1)
            await self._receiver.wait_for(self.plan.jobs, timeout_s)

    async def _measure_recovery(self) -> None:
        """Time from a fault to the first end of a job that was submitted after it."""
        recovery = self.report.recovery_s
        victim = next(v for v in self._victims if v.kind == "worker")
        held = asyncio.create_task(self._time_jobs("held", 60))
        victim = await self._choose("worker")
        killed_at = time.monotonic()
        await self._kill(victim)
        await held
        recovery[f"worker kill (lease {LEASE_S:g} s), last of 60 jobs"] = (
            time.monotonic() - killed_at
        )
        await self._redis.restart()
        recovery["Redis restart"] = await self._time_jobs("redis", 1)
        await self._postgres.restart(signal.SIGQUIT)
        recovery["PostgreSQL restart"] = await self._time_jobs("postgres", 1)

    async def _time_jobs(self, name: str, count: int) -> float:
        started_at = time.monotonic()
        ids = [await self.submit_one("cheap", f"{name} {number}") for number in range(count)]
        for job_id in ids:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
                    url = f"{self._stack.url}/v1/jobs/{job_id}?wait=10"
                    async with self._http.get(url) as answer:
                        job = await answer.json(content_type=None)
                    if job["state"] not in {"queued", "running"}:
                        break
                await asyncio.sleep(0.02)
        return time.monotonic() - started_at

    async def _judge(self) -> None:
        report = self.report
        rows = await run_sql(
            self._database,
            "SELECT id, state, attempt, blob_key, tensors, (SELECT count(*) FROM events e"
            " WHERE e.job_id = jobs.id) AS events FROM jobs",
        )
        attempts = self._read_ledgers()
        store = BlobStore.open(f"file://{self._stack.folder}/data/blobs")
        scores = await read_scores(store, rows)
        report.jobs = sum(row.id in self._texts for row in rows)
        report.unfinished = sum(row.state in {"queued", "running"} for row in rows)
        report.terminal_events = sum(row.events for row in rows) - self._extra_jobs(rows)
        expected = await asyncio.to_thread(self._expect)
        for row in rows:
            model, _ = self._texts[row.id]
            ok = row.state == "succeeded" and row.events == 1
            if not ok or not is_close(scores.get(row.id), expected[row.id]):
                report.wrong += 1
            if model == "cheap" and (row.id, row.attempt) not in attempts:
                report.not_in_ledger += 1
            report.second_attempts += row.attempt > 1
        report.jobs -= self._extra_jobs(rows)
        report.event_ids_received = len(self._receiver.ids)
        report.webhook_calls = len(self._receiver.received)
        counters = await run_sql(self._database, "SELECT name, value FROM counters")
        counts = {row.name: int(row.value) for row in counters}
        report.fenced_writes = counts.get("fenced_writes", 0)
        report.leases_reaped = counts.get("leases_reaped", 0)

    def _extra_jobs(self, rows: Sequence[Any]) -> int:
        """How many jobs only measured the recovery, without a webhook."""
        return len(rows) - self.plan.jobs

    def _expect(self) -> dict[str, list[float]]:
        tiny = [text for model, text in self._texts.values() if model == "tiny"]
        known = score_with_transformers(self._stack.folder / "m", tiny) if tiny else {}
        return {
            job_id: known[text] if model == "tiny" else expected_scores(text)
            for job_id, (model, text) in self._texts.items()
        }

    def _read_ledgers(self) -> set[tuple[str, int]]:
        entries: set[tuple[str, int]] = set()
        for path in self._stack.folder.glob("ledger-*"):
            for line in path.read_text().splitlines():
                job_id, _, attempt = line.partition(" ")
                entries.add((job_id, int(attempt)))
        return entries


def expected_scores(text: str) -> list[float]:
    """Return what ``builtin:deterministic`` must give: written down apart from its code."""
    raw = hashlib.shake_128(struct.pack(f"<{len(text)}i", *text.encode())).digest(64)
    return [number / 2**29 - 4.0 for number in struct.unpack("<16I", raw)[:2]]


def score_with_transformers(folder: Path, texts: Sequence[str]) -> dict[str, list[float]]:
    """Return the logits of a plain forward, by text."""
    import torch  # noqa: PLC0415  # seconds, and only where tiny jobs are planned
    from transformers import (  # noqa: PLC0415
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return {
            text: model(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts
        }


async def read_scores(store: BlobStore, rows: Sequence[Any]) -> dict[str, list[float]]:
    """Read every job's first row of scores from its blob."""
    blobs: dict[str, bytes] = {}
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.blob_key is None or row.tensors is None:
            continue
        if row.blob_key not in blobs:
            blobs[row.blob_key] = await store.get(row.blob_key)
        for name, _, shape, begin, end in json.loads(row.tensors):
            if name == "scores":
                data = blobs[row.blob_key][begin:end]
                scores[row.id] = list(struct.unpack(f"<{shape[1]}f", data[: 4 * shape[1]]))
    return scores


def is_close(ours: list[float] | None, theirs: list[float]) -> bool:
    """Tell whether two rows of scores are the same number for number, within 1e-5."""
    return (
        ours is not None
        and len(ours) == len(theirs)
        and all(abs(a - b) <= 1e-5 for a, b in zip(ours, theirs, strict=True))
    )


@contextlib.asynccontextmanager
async def _open_stack(plan: Plan, folder: Path) -> AsyncIterator[Programme]:
    models: dict[str, dict[str, Any]] = {"cheap": {"source": "builtin:deterministic"}}
    if plan.tiny_jobs:
        from tests.tiny_models import make_tiny  # noqa: PLC0415  # loads torch

        make_tiny(folder / "m", "BertForSequenceClassification", num_labels=2)
        models["tiny"] = {"source": str(folder / "m")}
    with run_postgres() as postgres, run_redis() as redis_server:
        stack = Stack(folder, redis_server.url, models, postgres.url, SETTINGS)
        async with stack, receiving() as receiver:
            yield Programme(plan, stack, postgres, redis_server, receiver)


async def run_programme(plan: Plan, folder: Path) -> Report:
    """Run ``plan`` in ``folder`` and return what came of it."""
    async with _open_stack(plan, folder) as programme:
        report = await programme.run()
        await programme.close()
    return report
