"""``/openapi.json`` and ``/docs``: what the service can do, for programs and for people.

The page needs nothing from outside: it is made from the document by a script that is served here.
"""

from pathlib import Path

from aiohttp import web

from api.state import DOCUMENT
from contract.errors import NotFoundError

__all__ = ["add_routes"]

_FOLDER = Path(__file__).parent.parent / "static"
_TYPES = {"docs.css": "text/css", "docs.js": "text/javascript"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


def add_routes(app: web.Application) -> None:
    """Add the documentation to the application, which keeps the document under ``DOCUMENT``."""
    app.router.add_get("/openapi.json", get_document)
    app.router.add_get("/docs", get_page)
    app.router.add_get("/docs/{file}", get_part)


async def get_document(request: web.Request) -> web.StreamResponse:
    """Show the OpenAPI 3.1 document."""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


async def get_page(_request: web.Request) -> web.StreamResponse:
    """Show the documentation as a page."""
    return _send("docs.html", "text/html")


async def get_part(request: web.Request) -> web.StreamResponse:
    """Send the page's script or style."""
    name = request.match_info["file"]
    if name not in _TYPES:
        message = f"there is no file {name[:100]!r}"
        raise NotFoundError(message)
    return _send(name, _TYPES[name])


def _send(name: str, content_type: str) -> web.Response:
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    text = (_FOLDER / name).read_text()
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=headers)
