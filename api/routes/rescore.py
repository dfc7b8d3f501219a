"""``POST /v1/rescore``: what was scored before, scored again with something changed."""

from aiohttp import web

from api.bodies import check_plain_text, parse_body, read_body
from api.bulk.access import parse_bulk_id
from api.bulk.settings import BulkOptions, BulkSource
from api.limits import OWN_LIMITS
from api.routes.bulks import add_bulk, answer_replay
from api.state import DATABASE, SETTINGS, tenant_of
from contract.bulks import BulkState, RescoreRequest, RescoreSource
from contract.errors import ConflictError, InvalidRequestError
from contract.jobs import JobState
from storage import bulks, jobs

__all__ = ["FILTERED_JOBS", "add_routes"]

#: The most jobs that a filter may find.
FILTERED_JOBS = 10_000
_HIDDEN = "return_pooled_hidden_states"


def add_routes(app: web.Application) -> None:
    """Add the routes to the application."""
    app.router.add_post("/v1/rescore", post_rescore)


async def post_rescore(request: web.Request) -> web.StreamResponse:
    """Score a bulk, some jobs or what a filter finds again; only what is not known runs."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    if (replay := await answer_replay(request, body)) is not None:
        return replay
    wanted = parse_body(request, body, RescoreRequest)
    source = await _find_source(request, wanted.source)
    parameters = wanted.parameters
    hidden_states = parameters.pop(_HIDDEN, None)
    options = BulkOptions(
        model=wanted.model,
        parameters=parameters,
        hidden_states=hidden_states,
        on_invalid="skip",
        cache=wanted.cache,
        lane=wanted.priority,
        max_items=request[OWN_LIMITS].items,
        expires_after_s=wanted.expires_after_s or request.app[SETTINGS].result_ttl_s or None,
    )
    return await add_bulk(request, body, source, options, wanted)


async def _find_source(request: web.Request, wanted: RescoreSource) -> BulkSource:
    given = [wanted.bulk, wanted.batch, wanted.jobs, wanted.filter]
    if sum(each is not None for each in given) != 1:
        message = "give one of bulk, batch, jobs and filter"
        raise InvalidRequestError(message, param="source")
    bulk_id = wanted.batch if wanted.bulk is None else wanted.bulk
    if bulk_id is not None:
        return await _from_bulk(request, bulk_id)
    if wanted.jobs is not None:
        source = BulkSource(jobs=[check_plain_text(each, "source.jobs") for each in wanted.jobs])
    else:
        source = await _from_filter(request, wanted.filter or {})
    if not source.jobs:
        message = "there is no job to be scored again"
        param = "source.filter" if wanted.jobs is None else "source.jobs"
        raise InvalidRequestError(message, param=param)
    return source


async def _from_bulk(request: web.Request, bulk_id: str) -> BulkSource:
    async with request.app[DATABASE].snapshot() as tx:
        row = await bulks.get_bulk(tx, tenant_of(request), parse_bulk_id(bulk_id))
    if row.state is BulkState.VALIDATING or row.ingested_lines < row.total_lines:
        message = f"not every line of bulk {row.id} was stored; nothing whole can be scored again"
        raise ConflictError(message)
    if not row.total_lines:
        message = f"bulk {row.id} has no lines"
        raise ConflictError(message)
    return BulkSource(bulk=row.id)


async def _from_filter(request: web.Request, wanted: dict[str, str]) -> BulkSource:
    """Take the jobs there are now, newest first, those of bulks apart."""
    for name, value in wanted.items():
        check_plain_text(name + value, "source.filter")
    metadata = {
        name.removeprefix("metadata."): value
        for name, value in wanted.items()
        if name.startswith("metadata.")
    }
    unknown = [n for n in wanted if n not in {"model", "state"} and not n.startswith("metadata.")]
    if unknown:
        message = f"there is no filter {unknown[0][:100]!r}"
        raise InvalidRequestError(message, param="source.filter")
    try:
        state = JobState(wanted["state"]) if "state" in wanted else None
    except ValueError as error:
        message = f"there is no state {wanted['state'][:100]!r}"
        raise InvalidRequestError(message, param="source.filter.state") from error
    async with request.app[DATABASE].snapshot() as tx:
        rows = await jobs.list_jobs(
            tx,
            tenant_of(request),
            state=state,
            model=wanted.get("model"),
            metadata=metadata,
            limit=FILTERED_JOBS + 1,
        )
    if len(rows) > FILTERED_JOBS:
        message = f"the filter finds more than {FILTERED_JOBS} jobs; narrow it"
        raise InvalidRequestError(message, param="source.filter")
    return BulkSource(jobs=[row.id for row in reversed(rows) if row.bulk_id is None])
