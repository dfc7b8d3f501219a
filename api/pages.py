"""Opaque cursors and ``Link`` headers of lists: the only place that makes and reads them."""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar
from urllib.parse import urlencode

from aiohttp import web

from api.bodies import json_response
from contract.errors import InvalidRequestError

__all__ = [
    "MAX_PAGE",
    "answer_page",
    "parse_after",
    "parse_cursor",
    "parse_limit",
    "render_cursor",
    "render_next_link",
]

#: The most rows of a page.
MAX_PAGE = 1000
_DEFAULT_LIMIT = 50
_ID = re.compile(r"[a-z]{3}_[0-9a-f]{32}")


def parse_after(request: web.Request) -> int:
    """Return the line or sequence number that the query's ``after`` names; 0 by default."""
    text = request.query.get("after", "0")
    if not re.fullmatch(r"[0-9]{1,15}", text):
        message = "after is a whole number"
        raise InvalidRequestError(message, param="after")
    return int(text)


class _Row(Protocol):
    @property
    def id(self) -> str: ...


_AnyRow = TypeVar("_AnyRow", bound=_Row)


def answer_page(
    request: web.Request,
    rows: Sequence[_AnyRow],
    *,
    limit: int,
    render: Callable[[_AnyRow], object],
) -> web.Response:
    """Answer the first ``limit`` of ``rows``, of which one more says that there is a next page."""
    page, headers, cursor = rows[:limit], {}, None
    if len(rows) > limit:
        cursor = render_cursor(page[-1].id)
        headers["Link"] = render_next_link(request.path, list(request.query.items()), cursor)
    body = {
        "object": "list",
        "data": [render(row) for row in page],
        "has_more": cursor is not None,
        "next_cursor": cursor,
    }
    return json_response(body, headers=headers)


def render_cursor(last_id: str) -> str:
    """Return the cursor of the page after the row ``last_id``."""
    return base64.urlsafe_b64encode(last_id.encode()).decode().rstrip("=")


def parse_cursor(text: str | None) -> str | None:
    """Return the id in a cursor of ours. Raises ``InvalidRequestError`` for any other text."""
    if text is None:
        return None
    try:
        last_id = base64.b64decode(
            text + "=" * (-len(text) % 4), altchars=b"-_", validate=True
        ).decode()
    except (binascii.Error, ValueError):
        last_id = ""
    if not _ID.fullmatch(last_id):
        message = "the cursor is not one of ours; start again without it"
        raise InvalidRequestError(message, param="cursor")
    return last_id


def parse_limit(text: str | None) -> int:
    """Return how many rows a page has; 1 to 1000, by default 50."""
    if text is None:
        return _DEFAULT_LIMIT
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_PAGE:
        message = f"limit must be a whole number from 1 to {MAX_PAGE}"
        raise InvalidRequestError(message, param="limit")
    return int(text)


def render_next_link(path: str, query: list[tuple[str, str]], cursor: str) -> str:
    """Return the ``Link`` header to the next page: the same query with another cursor."""
    kept = [(name, value) for name, value in query if name != "cursor"]
    return f'<{path}?{urlencode([*kept, ("cursor", cursor)])}>; rel="next"'
