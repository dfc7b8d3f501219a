"""The tenant in whose name this task reads and writes: the last line between tenants.

Every query names its tenant. Should one not, the row that it found does not come out: what turns
rows into objects asks ``check_owner``, which compares them with the tenant that the task acts as.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from contract.errors import NotFoundError

__all__ = ["acting_as", "check_owner"]

_log = logging.getLogger(__name__)
_acting: ContextVar[str | None] = ContextVar("acting_tenant", default=None)


@contextmanager
def acting_as(tenant: str) -> Iterator[None]:
    """Act as ``tenant`` until the end, in this task and in those that it starts meanwhile."""
    token = _acting.set(tenant)
    try:
        yield
    finally:
        _acting.reset(token)


def check_owner(tenant: str) -> None:
    """Raise ``NotFoundError`` for a row of another tenant than the one that this task acts as.

    A task that serves nobody in particular (a sweep, a worker) sees all rows.
    """
    acting = _acting.get()
    if acting is not None and acting != tenant:
        _log.error("a row of another tenant was asked for", extra={"action": "tenant_refused"})
        message = "there is nothing under that name"
        raise NotFoundError(message)
