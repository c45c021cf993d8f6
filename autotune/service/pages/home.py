"""Show the form, the queue and the devices, and accept submitted forms."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.models import catalog
from autotune.service.access import Known, Reader, Submitter
from autotune.service.feeds import EventStream, feeds_of
from autotune.service.pages.form import FIELDS, FieldError, command_of, more_fields, read_form
from autotune.service.pages.frame import Visitor, form_fields, page, render, sign_in_page
from autotune.service.pages.listing import rows_of
from autotune.service.pages.rendered import rendered_of
from autotune.service.problems import problem_document
from autotune.service.searches import Searches, describe_devices
from autotune.store.queue import ENDED, TokenRecord

_MOST_SHOWN = 30
_MOST_RUNNING = 1000

router = APIRouter()


@router.get("/", include_in_schema=False)
async def home(request: Request, visitor: Visitor, searches: Known) -> Response:
    """Show the page, or ask for a token."""
    if visitor is None:
        return sign_in_page()
    parts = await _rendered_parts(request, searches)
    return await run_in_threadpool(_home_page, searches, visitor, request.query_params, parts)


@router.post("/searches", include_in_schema=False)
async def submit(request: Request, token: Submitter, searches: Known) -> Response:
    """Queue what the form asks for; show the form again with what is wrong."""
    form = await form_fields(request)
    try:
        job, _ = await run_in_threadpool(lambda: searches.submit(read_form(form), by=token))
    except AutotuneError as error:
        parts = await _rendered_parts(request, searches)
        return await run_in_threadpool(_home_page, searches, token, form, parts, error)
    return RedirectResponse(f"/searches/{job.id}", 303)


@router.get("/command", include_in_schema=False)
def command(request: Request, token: Reader, searches: Known) -> JSONResponse:
    """Return the form as a command, its error, and what the search would wait for."""
    form = request.query_params
    answer: Document = {
        "command": command_of(form, str(request.base_url)),
        "problem": None,
        "field": None,
        "note": None,
    }
    try:
        answer["note"] = searches.unmet(read_form(form))
    except FieldError as error:
        answer |= {"problem": error.message, "field": error.field}
    except AutotuneError as error:
        answer["problem"] = f"{error.message}. {error.hint}"
    return JSONResponse(answer)


@router.get("/parts/home", include_in_schema=False)
async def home_parts(request: Request, token: Reader, searches: Known) -> HTMLResponse:
    """Return the changing parts of the page."""
    return HTMLResponse(await _rendered_parts(request, searches))


@router.get("/v1/events", tags=["searches"], response_class=EventStream)
async def changes(request: Request, token: Reader) -> Response:
    """Stream an event ``changed`` whenever the queue or the devices changed."""
    return EventStream(feeds_of(request).changes(token))


async def _rendered_parts(request: Request, searches: Searches) -> Markup:
    return await rendered_of(request).get("home", lambda: _render_parts(searches))


def _home_page(
    searches: Searches,
    token: TokenRecord,
    asked: Mapping[str, str],
    parts: Markup,
    error: AutotuneError | None = None,
) -> HTMLResponse:
    every = [device for host in searches.engine.hosts() for device in host.devices]
    more = more_fields(asked, has_codes=bool(searches.codes))
    return page(
        "home.html",
        token=token,
        error=error,
        may_write=token.may_write,
        asked=asked,
        fields=FIELDS,
        more=more,
        is_more_open=any(asked.get(field.name) for field in more),
        lists={
            "models": [entry.name for entry in catalog.entries()],
            "gpus": sorted({"cpu" if device.kind == "cpu" else device.name for device in every}),
            "codes": sorted(searches.codes),
        },
        parts=parts,
        status=problem_document(error)[0] if error else 200,
    )


def _render_parts(searches: Searches) -> Markup:
    queue = searches.store.queue
    running = queue.jobs(states=["running"], most=_MOST_RUNNING)
    shown = [*running[:_MOST_SHOWN], *queue.next_jobs(_MOST_SHOWN)]
    ended = queue.jobs(states=ENDED, most=_MOST_SHOWN)
    counts = queue.counts()
    return render(
        "home_parts.html",
        queue=rows_of(searches, shown),
        more=counts.get("queued", 0) + counts.get("running", 0) - len(shown),
        devices=describe_devices(searches),
        problems=searches.runner.problems(),
        ended=rows_of(searches, ended),
    )
