"""``/openapi.json`` and ``/docs``."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate

from api.app import create_app
from api.openapi.document import build_document, list_routes
from api.openapi.operations import OPERATIONS
from contract.bulks import LONGEST_FILE_S
from contract.config import Settings
from contract.errors import ScoreError
from tests.api.service import Service
from tests.storage.factories import run_sql

APP = create_app(Settings(), {})
DOCUMENT: dict[str, Any] = msgspec.json.decode(
    msgspec.json.encode(build_document(APP, version="1", server="https://example.org"))
)


def test_every_route_is_described() -> None:
    """The table and the application agree: a new route needs a line in openapi/operations.py."""
    routes = {(method, path) for method, path, _ in list_routes(APP)}

    assert routes == set(OPERATIONS)


def test_the_document_is_openapi() -> None:
    """It is valid OpenAPI 3.1, with each type by its name."""
    validate(DOCUMENT)

    assert DOCUMENT["openapi"] == "3.1.0"
    assert {"JobRequest", "RerankRequest", "Event"} <= set(DOCUMENT["components"]["schemas"])


@pytest.mark.parametrize("path", sorted(DOCUMENT["paths"]))
def test_an_operation_says_what_it_does(path: str) -> None:
    """A summary, the errors any route may give, and for a POST its idempotency key."""
    for method, operation in DOCUMENT["paths"][path].items():
        names = {parameter["name"] for parameter in operation["parameters"]}

        assert operation["summary"], (method, path)
        assert {"400", "401", "403", "429", "500", "503"} <= set(operation["responses"])
        if method == "post" and path != "/v1/files":
            assert "Idempotency-Key" in names


def test_an_upload_says_how_long_it_is_kept() -> None:
    """The field is told with the limit that is checked."""
    content = DOCUMENT["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    field = content["multipart/form-data"]["schema"]["properties"]["expires_after[seconds]"]

    assert field == {"type": "integer", "minimum": 1, "maximum": LONGEST_FILE_S}


async def test_rescoring_what_was_deleted_is_described(sqlite_service: Service) -> None:
    """What the route answers for a deleted bulk is among its answers."""
    await run_sql(sqlite_service.database, _DELETED_BULK)
    source = {"bulk": f"blk_{'0' * 32}"}

    answer = await sqlite_service.post("/v1/rescore", {"source": source})

    assert answer.status == 410
    assert str(answer.status) in DOCUMENT["paths"]["/v1/rescore"]["post"]["responses"]


def test_every_error_is_named() -> None:
    """Each code of the tree that an answer may carry is in some answer's description."""
    told = {
        code
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for answer in operation["responses"].values()
        for code in answer["description"].split(", ")
    }

    assert {kind.code for kind in _descend(ScoreError)} <= told


async def test_it_is_served_with_a_page(sqlite_service: Service) -> None:
    """The document, and a page of our own: nothing of it points outside, and its policy forbids."""
    document = await sqlite_service.get("/openapi.json")
    page = await sqlite_service.get("/docs")
    script = await sqlite_service.get("/docs/docs.js")
    style = await sqlite_service.get("/docs/docs.css")
    nothing = await sqlite_service.get("/docs/docs.html")

    assert document.json["openapi"] == "3.1.0"
    assert b'src="docs/docs.js"' in page.body
    assert script.headers["Content-Type"].startswith("text/javascript")
    assert style.status == 200
    assert nothing.status == 404
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for part in (page, script, style):
        assert b"http://" not in part.body
        assert b"https://" not in part.body


def _descend(kind: type[ScoreError]) -> list[type[ScoreError]]:
    ours = [each for each in kind.__subclasses__() if each.__module__ == "contract.errors"]
    return [kind, *(each for child in ours for each in _descend(child))]


def test_the_static_files_are_there() -> None:
    """What the wheel must hold beside the code."""
    folder = Path(__file__).parent.parent.parent / "api" / "static"

    assert {"docs.html", "docs.css", "docs.js"} <= {each.name for each in folder.iterdir()}


_DELETED_BULK = """
INSERT INTO bulks (id, tenant, kind, state, endpoint, source, options, metadata, total_lines,
    refused_lines, ingested_lines, ingested_items, indexed_lines, attempt, created_at, finished_at,
    deleted_at)
VALUES ('blk_00000000000000000000000000000000', 'default', 'bulk', 'completed', '', '{}', '{}',
    '{}', 0, 0, 0, 0, 0, 0, 0, 1, 1)
"""
