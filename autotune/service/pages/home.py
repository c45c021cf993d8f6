"""Show the form, the queue and the devices, and accept submitted forms."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.core.units import format_bytes
from autotune.results.html.markup import Child, Markup, element
from autotune.service.access import Known, Reader, Submitter
from autotune.service.feeds import EventStream, feeds_of
from autotune.service.pages.form import FieldError, command_of, read_form, render_form
from autotune.service.pages.frame import Visitor, error_box, form_fields, page, sign_in_page, table
from autotune.service.pages.listing import how_they_ended, searches_table, what_runs
from autotune.service.pages.rendered import rendered_of
from autotune.service.problems import problem_document
from autotune.service.searches import Searches, describe_devices, waits_for
from autotune.service.tokens import may_write
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
    return await run_in_threadpool(_home, searches, visitor, request.query_params, parts)


@router.post("/searches", include_in_schema=False)
async def submit(request: Request, token: Submitter, searches: Known) -> Response:
    """Queue what the form asks for; show the form again with what is wrong."""
    form = await form_fields(request)
    try:
        job, _ = await run_in_threadpool(lambda: searches.submit(read_form(form), by=token))
    except AutotuneError as error:
        parts = await _rendered_parts(request, searches)
        return await run_in_threadpool(_home, searches, token, form, parts, error)
    return RedirectResponse(f"/searches/{job.id}", 303)


@router.get("/command", include_in_schema=False)
def command(request: Request, token: Reader, searches: Known) -> JSONResponse:
    """Return the command that asks for the same as the form, what is wrong with it, and what it would wait for."""
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
    """Return what changes of the page."""
    return HTMLResponse(await _rendered_parts(request, searches))


@router.get("/v1/events", tags=["searches"], response_class=EventStream)
async def changes(request: Request, token: Reader) -> Response:
    """Stream an event ``changed`` whenever the queue or the devices changed."""
    return EventStream(feeds_of(request).changes(token))


async def _rendered_parts(request: Request, searches: Searches) -> Markup:
    return await rendered_of(request).get("home", lambda: _parts(searches))


def _home(
    searches: Searches,
    token: TokenRecord,
    asked: Mapping[str, str],
    parts: Markup,
    error: AutotuneError | None = None,
) -> HTMLResponse:
    told = "Your token may read; it starts no search. Ask the operator for one with the role run."
    return page(
        "Searches",
        element("h1", "Search for the fastest configuration"),
        error_box(error) if error else None,
        render_form(asked, _device_names(searches), searches.codes)
        if may_write(token)
        else element("p", told, class_="empty"),
        element("div", parts, data_part="/parts/home", data_events="/v1/events"),
        token=token,
        current="/",
        status=problem_document(error)[0] if error else 200,
    )


def _parts(searches: Searches) -> list[Child]:
    queue = searches.store.queue
    hosts = searches.runner.hosts()
    running = queue.jobs(states=["running"], most=_MOST_RUNNING)
    waiting = queue.next_jobs(_MOST_SHOWN)
    ended = queue.jobs(states=ENDED, most=_MOST_SHOWN)
    told = {job.id: waits_for(job, hosts, ahead) for ahead, job in enumerate(waiting)}
    told |= {job.id: what_runs(job) for job in running}
    shown = [*running[:_MOST_SHOWN], *waiting]
    counts = queue.counts()
    more = counts.get("queued", 0) + counts.get("running", 0) - len(shown)
    command = element("code", "autotune search --server", class_="whole")
    none = ["No search waits or runs. Ask for one above, or with ", command, "."]
    return [
        _section(
            "Queue",
            searches_table("searches that run or wait, in their turns", "what it does, or waits for", shown, told)
            if shown
            else element("p", none, class_="empty"),
            element("p", "and ", element("a", f"{more} more", href="/searches")) if more > 0 else None,
        ),
        _section(
            "Devices",
            _devices_table(searches),
            [element("p", problem, class_="soft") for problem in searches.runner.problems()],
        ),
        _section(
            "Ended",
            searches_table("searches that have ended", "result", ended, how_they_ended(searches, ended))
            if ended
            else element("p", "No search has ended yet.", class_="empty"),
            element("p", element("a", "All that have ended", href="/searches?state=ended"))
            if len(ended) == _MOST_SHOWN
            else None,
        ),
    ]


def _section(title: str, *children: Child) -> Markup:
    return element("section", element("h2", title), children)


def _devices_table(searches: Searches) -> Markup:
    devices = describe_devices(searches)
    if not devices:
        return element("p", "No device is ready, so nothing runs.", class_="empty")
    rows = [
        element(
            "tr",
            element("td", device["host"]),
            element("td", device["label"]),
            element("td", device["name"]),
            element("td", format_bytes(device["memory_total_bytes"]), class_="nowrap"),
            element(
                "td",
                element("a", device["study"], href=f"/searches/{device['search']}") if device["search"] else "idle",
            ),
        )
        for device in devices
    ]
    return table("devices and what runs on them", ("machine", "device", "name", "memory", "runs"), rows)


def _device_names(searches: Searches) -> set[str]:
    """Return what can be asked for as a device."""
    every = [device for host in searches.runner.hosts() for device in host.devices]
    return {"cpu" if device.kind == "cpu" else device.name for device in every}
