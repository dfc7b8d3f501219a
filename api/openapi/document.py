"""The OpenAPI 3.1 document, from the routes, the table of operations and the wire types."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from api.errors import ProblemDetails, family_of
from api.negotiation import JSON, PROBLEM
from api.openapi.operations import OPERATIONS, PATH_PATTERNS, Operation, Parameter
from contract.bulks import LONGEST_FILE_S
from contract.errors import ScoreError
from contract.shapes import OpenAIError, TeiError
from contract.webhooks import Event

__all__ = ["build_document", "list_routes"]

#: What any route may answer.
_ANYWHERE = (400, 401, 403, 405, 408, 429, 500, 503)
_REF = "#/components/schemas/{name}"
_FORMS: dict[str, tuple[Any, str]] = {
    "": (ProblemDetails, PROBLEM),
    "openai": (OpenAIError, JSON),
    "cohere": (OpenAIError, JSON),
    "tei": (TeiError, JSON),
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {
        "type": "string",
        "pattern": r'^("[ !#-\[\]-~]{1,255}"|[!#-~]([ !#-~]{0,253}[!#-~])?)$',
    },
    "description": "The same key with the same body gives the same answer for 24 h.",
}
_UPLOAD = {
    "type": "object",
    "properties": {
        "purpose": {"enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
        "expires_after[seconds]": {"type": "integer", "minimum": 1, "maximum": LONGEST_FILE_S},
    },
    "required": ["purpose", "file"],
}


def list_routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    """Yield method, path and handler of every route, but for the HEAD of a GET."""
    for route in app.router.routes():
        if route.method not in {"HEAD", "*"} and route.resource is not None:
            yield route.method, route.resource.canonical, route.handler


def build_document(app: web.Application, *, version: str, server: str = "") -> dict[str, Any]:
    """Return the document. A route that the table lacks is described by its docstring alone."""
    types = _Types()
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in list_routes(app):
        operation = OPERATIONS.get((method, path), Operation("service", {200: Any}))
        paths.setdefault(path, {})[method.lower()] = _describe(
            types, method, path, handler, operation
        )
    types.collect(Event)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Scorekeep",
            "version": version,
            "summary": "Scores text, and keeps what it found.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": server or "/"}],
        "security": [{}, {"key": []}],
        "paths": paths,
        "webhooks": {"event": _describe_webhook()},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": types.schemas(),
        },
    }


class _Types:
    """The types that were referred to; their schemas come in one piece at the end."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def collect(self, kind: Any) -> Any:  # noqa: ANN401  # a type
        """Return the schema of a type, by reference where it has a name."""
        self._found.append(kind)
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
        return schema

    def schemas(self) -> dict[str, Any]:
        """Return all schemas by name."""
        _, components = msgspec.json.schema_components(self._found, ref_template=_REF)
        return components


def _describe(
    types: _Types,
    method: str,
    path: str,
    handler: Callable[..., Any],
    operation: Operation,
) -> dict[str, Any]:
    summary, _, rest = inspect.cleandoc(handler.__doc__ or "").partition("\n")
    told: dict[str, Any] = {
        "operationId": _name(method, path),
        "tags": [operation.tag],
        "summary": operation.text or summary,
        "parameters": [*_path_parameters(path), *map(_render_parameter, operation.parameters)],
        "responses": {
            **{
                str(status): _describe_answer(types, status, answer)
                for status, answer in operation.answers.items()
            },
            **_describe_errors(types, path, operation),
        },
    }
    if rest.strip():
        told["description"] = " ".join(rest.split())
    if method == "POST" and not isinstance(operation.body, str):
        told["parameters"].append(_KEY)
    if operation.body is not None:
        told["requestBody"] = {
            "required": operation.needs_body,
            "content": _describe_body(types, operation.body),
        }
    return told


def _describe_body(types: _Types, body: Any) -> dict[str, Any]:  # noqa: ANN401  # types
    if isinstance(body, str):
        return {body: {"schema": _UPLOAD}}
    return {JSON: {"schema": _any_of(types, body)}}


def _describe_answer(types: _Types, status: int, answer: Any) -> dict[str, Any]:  # noqa: ANN401
    told: dict[str, Any] = {"description": _phrase(status)}
    content: dict[str, Any] = {}
    kinds = answer if isinstance(answer, tuple) else (answer,)
    json_kinds = tuple(kind for kind in kinds if kind is not None and not isinstance(kind, str))
    if json_kinds:
        content[JSON] = {"schema": _any_of(types, json_kinds)}
    for media in kinds:
        if isinstance(media, str):
            content[media] = {"schema": {"type": "string", "format": "binary"}}
    if content:
        told["content"] = content
    if status == 202:
        told["headers"] = {
            "Location": {"schema": {"type": "string"}, "description": "Where the job is."},
            "Retry-After": {"schema": {"type": "string"}, "description": "Ask again after it."},
        }
    return told


def _describe_errors(types: _Types, path: str, operation: Operation) -> dict[str, Any]:
    form, media = _FORMS[family_of(path)]
    codes = _codes_by_status()
    schema: Any = types.collect(form)
    if path.endswith("/rerank"):
        schema = {"anyOf": [schema, types.collect(TeiError)]}
    told = {*_ANYWHERE, *operation.errors}
    if "{" in path:  # what the path names may not be there, or no more
        told |= {404, 410}
    return {
        str(status): {
            "description": ", ".join(codes.get(status, [])) or _phrase(status),
            "content": {media: {"schema": schema}},
        }
        for status in sorted(told - set(operation.answers))
    }


def _codes_by_status() -> dict[int, list[str]]:
    """Return the codes that an answer of each status may carry."""
    found: dict[int, list[str]] = {405: ["method_not_allowed"], 408: ["bad_request"]}
    for kind in _descend(ScoreError):
        found.setdefault(kind.http_status, [])
        if kind.code not in found[kind.http_status]:
            found[kind.http_status].append(kind.code)
    return found


def _descend(kind: type[ScoreError]) -> Iterable[type[ScoreError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == ScoreError.__module__:
            yield from _descend(child)


def _any_of(types: _Types, kinds: Any) -> Any:  # noqa: ANN401  # types and a schema
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    schemas = [types.collect(kind) for kind in several]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    patterns = next((given for start, given in PATH_PATTERNS if path.startswith(start)), {})
    told = []
    for name in re.findall(r"\{(\w+)\}", path):
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if name in patterns:
            schema = {"type": "string", "pattern": patterns[name]}
        told.append({"name": name, "in": "path", "required": True, "schema": schema})
    return told


def _render_parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "schema": parameter.schema,
        "description": parameter.text,
    }


def _describe_webhook() -> dict[str, Any]:
    body = {"schema": {"$ref": _REF.format(name="Event")}}
    return {
        "post": {
            "summary": "What a job's webhook and a tenant's endpoints are sent.",
            "requestBody": {"required": True, "content": {JSON: body}},
            "responses": {"2XX": {"description": "The receiver took it."}},
        }
    }


def _name(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", path)
    return "_".join([method.lower(), *words])


def _phrase(status: int) -> str:
    return {200: "Done", 201: "Made", 202: "Accepted", 204: "Done", 206: "A part"}.get(
        status, {304: "Unchanged", 503: "Not ready"}.get(status, "Error")
    )
