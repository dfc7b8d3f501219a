"""``/``: the dashboard, a page of plain HTML, CSS and ES modules that speaks to our own routes."""

from aiohttp import web

from api.ranges import is_match
from api.static_files import StaticFile, StaticFiles, load_static_files
from contract.errors import NotFoundError

__all__ = ["CONTENT_SECURITY_POLICY", "FILES", "add_routes"]

FILES = web.AppKey("static_files", StaticFiles)

#: Nothing from elsewhere, nothing inline, no markup made from text.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FOR_EVER = "public, max-age=31536000, immutable"


def add_routes(app: web.Application) -> None:
    """Add the dashboard to the application."""
    app[FILES] = load_static_files()
    app.router.add_get("/", get_page)
    app.router.add_get("/dashboard/{version}/{name:.+}", get_file)


async def get_page(request: web.Request) -> web.StreamResponse:
    """Show the dashboard's page, which names the version of everything that it loads."""
    return _answer(request, request.app[FILES].page, _PAGE_HEADERS)


async def get_file(request: web.Request) -> web.StreamResponse:
    """Send a file of the dashboard, to be kept for ever.

    While two releases serve side by side a page may ask for the other's: it gets ours, unkept.
    """
    static, name = request.app[FILES], request.match_info["name"]
    file = static.files.get(name)
    if file is None:
        message = f"there is no file {name[:100]!r}"
        raise NotFoundError(message)
    own = request.match_info["version"] == static.version
    return _answer(request, file, {"Cache-Control": _FOR_EVER if own else "no-cache"})


def _answer(request: web.Request, file: StaticFile, headers: dict[str, str]) -> web.Response:
    headers = {**headers, "ETag": file.etag}
    if is_match(request.headers.get("If-None-Match"), file.etag):
        return web.Response(status=304, headers=headers)
    return web.Response(
        body=file.body, content_type=file.content_type, charset="utf-8", headers=headers
    )
