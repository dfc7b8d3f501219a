"""Asking a compatible route until its answer is there: what is late is asked for by its key."""

import asyncio
import math
import uuid

import msgspec

from contract.scores import Job
from scorekeep.transport import Transport

__all__ = ["LONGEST_POLL_S", "ask"]

#: How long one request waits for the service's answer.
LONGEST_POLL_S = 30.0


async def ask(
    transport: Transport, path: str, body: bytes, *, key: str | None, timeout_s: float | None
) -> bytes:
    """Return the body of the route's answer.

    A wait that ends early is a job by then; the same body under the same idempotency key waits for
    that one. Raises ``TimeoutError`` after ``timeout_s``; the job itself goes on.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    key = key or uuid.uuid4().hex
    while True:
        left_s = LONGEST_POLL_S if deadline is None else deadline - loop.time()
        wait_s = max(0.0, min(left_s, LONGEST_POLL_S))
        headers = {"Idempotency-Key": f'"{key}"', "Prefer": f"wait={math.ceil(wait_s)}"}
        answer = await transport.send("POST", path, body=body, headers=headers, wait_s=wait_s)
        if answer.status == 200:
            return answer.body
        if deadline is not None and loop.time() >= deadline:
            job = msgspec.json.decode(answer.body, type=Job)
            message = f"job {job.id} is still {job.state} after {timeout_s:g} s"
            raise TimeoutError(message)
