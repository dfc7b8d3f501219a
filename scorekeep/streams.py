"""A job's events as they happen: server-sent events, read again from where a connection broke."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from contract.errors import UnavailableError
from contract.jobs import TERMINAL
from contract.scores import Job
from contract.webhooks import EVENT_OF_STATE, Event
from scorekeep.transport import Transport

__all__ = ["EventReader", "read_events"]

_STATE = "job.state"
_ENDS = frozenset(EVENT_OF_STATE.values())
_FIRST_BACK_OFF_S = 0.25
_LONGEST_BACK_OFF_S = 8.0


class EventReader:
    """What was read so far: where to go on, and whether the job has ended."""

    def __init__(self, after: int) -> None:
        self.last_id = str(after) if after else ""
        self.ended = False
        self._kind = ""
        self._data: list[str] = []
        self._id = ""

    def take(self, line: str) -> Event | None:
        """Take one line; return the event that it completes."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
            elif name == "id":
                self._id = value
            return None
        kind, data, event_id = self._kind, "\n".join(self._data), self._id
        self._kind, self._data, self._id = "", [], ""
        if not data:
            return None
        if kind == _STATE:
            self.ended = msgspec.json.decode(data, type=Job).state in TERMINAL
            return None
        event = msgspec.json.decode(data, type=Event)
        self.last_id = event_id or self.last_id
        self.ended = self.ended or event.type in _ENDS
        return event


async def read_events(
    transport: Transport, path: str, *, after: int = 0, max_retries: int
) -> AsyncIterator[Event]:
    """Yield the events after the sequence number ``after``; end with the job.

    A connection that breaks is opened again after the last event; ``UnavailableError`` once that
    failed ``max_retries`` times without an event between.
    """
    reader, failures = EventReader(after), 0
    while True:
        headers = {"Last-Event-ID": reader.last_id} if reader.last_id else {}
        try:
            async with transport.stream(path, headers=headers) as lines:
                async for line in lines:
                    event = reader.take(line.decode().rstrip("\r\n"))
                    if event is not None:
                        failures = 0
                        yield event
            if reader.ended:
                return
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeError) as error:
            failures += 1
            if failures > max_retries:
                message = f"the events broke off: {error}"
                raise UnavailableError(message) from error
        # a server that stops ends its streams: another one goes on
        await asyncio.sleep(min(_FIRST_BACK_OFF_S * 2.0**failures, _LONGEST_BACK_OFF_S))
