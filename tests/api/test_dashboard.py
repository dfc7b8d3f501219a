"""The dashboard's files as they are served: types, caching, the policy that guards the page."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from api.routes.dashboard import CONTENT_SECURITY_POLICY
from api.static_files import load_static_files
from tests.api.service import Service

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "api" / "static"
LOADED = re.compile(r'(?:src|href)="(dashboard/[^"]+)"')


async def test_the_page_is_guarded_and_asked_for_again(sqlite_service: Service) -> None:
    """A strict policy; revalidated at each visit, for it names the version of all else."""
    page = await sqlite_service.get("/")
    again = await sqlite_service.get("/", headers={"If-None-Match": page.headers["ETag"]})

    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert page.headers["Cache-Control"] == "no-cache"
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert (again.status, again.body) == (304, b"")


async def test_what_the_page_loads_is_kept_for_ever(sqlite_service: Service) -> None:
    """Each file under the page's version, immutable, with its type and its ETag."""
    page = await sqlite_service.get("/")
    paths = sorted(set(LOADED.findall(page.body.decode())))

    answers = [await sqlite_service.get(f"/{path}") for path in paths]
    again = await sqlite_service.get(
        f"/{paths[0]}", headers={"If-None-Match": answers[0].headers["ETag"]}
    )

    assert len(paths) == 5
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["Cache-Control"] for answer in answers} == {
        "public, max-age=31536000, immutable"
    }
    types = {answer.headers["Content-Type"].partition(";")[0] for answer in answers}
    assert types == {"text/javascript", "text/css", "image/svg+xml"}
    assert again.status == 304


async def test_another_release_asks_for_its_own_version(sqlite_service: Service) -> None:
    """It gets what there is, and must not keep it; what is no file is not found."""
    other = await sqlite_service.get("/dashboard/0123456789abcdef/main.js")
    missing = await sqlite_service.get("/dashboard/0123456789abcdef/../secrets")
    unknown = await sqlite_service.get("/dashboard/0123456789abcdef/nothing.js")

    assert (other.status, other.headers["Cache-Control"]) == (200, "no-cache")
    assert (missing.status, unknown.status) == (404, 404)


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    """No inline script, style or handler, no foreign address, no markup made from text."""
    page = (STATIC / "index.html").read_text()
    code = "\n".join(path.read_text() for path in STATIC.rglob("*.js"))
    styles = "\n".join(path.read_text() for path in STATIC.rglob("*.css"))

    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page + code + styles) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code) == []


def test_every_module_is_reached_and_short() -> None:
    """No file that nothing imports, and none over 300 lines."""
    modules = {path.resolve(): path.read_text() for path in STATIC.rglob("*.js")}
    reached = {(STATIC / name).resolve() for name in ("main.js", "docs.js")}
    for path, text in modules.items():
        for name in re.findall(r'from "(\.[^"]+)"', text):
            reached.add((path.parent / name).resolve())

    assert reached == set(modules)
    assert [path.name for path, text in modules.items() if len(text.splitlines()) > 300] == []


def test_a_wheel_holds_every_file() -> None:
    """The patterns of package data fit each of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    names = ["index.html", *load_static_files().files]

    assert [name for name in names if not any(fnmatch(name, one) for one in patterns)] == []
