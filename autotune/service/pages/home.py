"""Show the form, the queue and the agents, and take in what the form asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.core.units import format_bytes
from autotune.results.html.markup import Child, Markup, element, joined
from autotune.service.access import Known, Reader, Writer
from autotune.service.bell import ANY_CHANGE, wait_for
from autotune.service.pages.form import FieldError, command_of, read_form, render_form
from autotune.service.pages.frame import Visitor, badge, error_box, form_fields, page, sign_in_page, table
from autotune.service.problems import problem_document
from autotune.service.searches import Searches, describe_agent
from autotune.service.tokens import may_write
from autotune.service.verifications import VERIFIES
from autotune.store.queue import ENDED, AgentRecord, JobRecord, TokenRecord

_POLL_SECONDS = 5.0
_PAUSE_SECONDS = 0.3
_MOST_SHOWN = 30
# What a request names as its training, in this order.
_WHAT = ("model", "code", VERIFIES)

router = APIRouter()


@router.get("/", include_in_schema=False)
def home(request: Request, visitor: Visitor, searches: Known) -> Response:
    """Show the page, or ask for a token."""
    if visitor is None:
        return sign_in_page()
    return _home(searches, visitor, request.query_params, None)


@router.post("/searches", include_in_schema=False)
async def submit(request: Request, token: Writer, searches: Known) -> Response:
    """Queue what the form asks for; show the form again with what is wrong."""
    form = await form_fields(request)
    try:
        job, _ = await run_in_threadpool(lambda: searches.submit(read_form(form), by=token.name))
    except AutotuneError as error:
        return await run_in_threadpool(_home, searches, token, form, error)
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
def home_parts(token: Reader, searches: Known) -> HTMLResponse:
    """Return what changes of the page."""
    return HTMLResponse(joined(_parts(searches)))


@router.get("/v1/events", tags=["searches"], response_class=EventSourceResponse)
async def changes(token: Reader, searches: Known) -> AsyncIterator[ServerSentEvent]:
    """Stream an event ``changed`` whenever the queue or the agents changed."""
    while not searches.is_closing:
        ticket = searches.bell.ticket(ANY_CHANGE)
        yield ServerSentEvent(event="changed", data={})
        # A busy queue changes more often than anybody wants to look.
        await asyncio.sleep(_PAUSE_SECONDS)
        await wait_for(ticket, _POLL_SECONDS)


def _home(
    searches: Searches, token: TokenRecord, asked: Mapping[str, str], error: AutotuneError | None
) -> HTMLResponse:
    told = "Your token may read; it starts no search. Ask the operator for one with the role run."
    return page(
        "Searches",
        element("h1", "Search for the fastest configuration"),
        error_box(error) if error else None,
        render_form(asked, searches.agents(), searches.codes)
        if may_write(token)
        else element("p", told, class_="empty"),
        element("div", _parts(searches), data_part="/parts/home", data_events="/v1/events"),
        token=token,
        current="/",
        status=problem_document(error)[0] if error else 200,
    )


def _parts(searches: Searches) -> list[Child]:
    queue = searches.store.queue
    agents = searches.agents()
    open_jobs = queue.jobs(states=["queued", "running"], most=_MOST_SHOWN)
    ended = queue.jobs(states=ENDED, most=_MOST_SHOWN)
    running = queue.jobs(states=["running"], most=1000)
    counts = queue.counts()
    more = counts.get("queued", 0) + counts.get("running", 0) - len(open_jobs)
    none = "No search waits or runs. Ask for one above, or with autotune search --server."
    return [
        _section(
            "Queue",
            _searches_table("searches that wait or run", "what it does, or waits for", searches, open_jobs, agents)
            if open_jobs
            else element("p", none, class_="empty"),
            element("p", f"and {more} more, submitted earlier", class_="soft") if more > 0 else None,
        ),
        _section("Agents", _agents_table([describe_agent(agent, running) for agent in agents], queue.clock())),
        _section(
            "Ended",
            _searches_table("searches that have ended", "result", searches, ended, agents)
            if ended
            else element("p", "No search has ended yet.", class_="empty"),
        ),
    ]


def _section(title: str, *children: Child) -> Markup:
    return element("section", element("h2", title), children)


def _searches_table(
    what: str, told: str, searches: Searches, jobs: Sequence[JobRecord], agents: Sequence[AgentRecord]
) -> Markup:
    rows = [
        element(
            "tr",
            element("td", element("a", job.study, href=f"/searches/{job.id}")),
            element("td", badge(job.state)),
            element("td", str(next((job.request[name] for name in _WHAT if job.request.get(name)), ""))),
            element("td", _what_it_does(searches, job, agents), class_="told"),
            element("td", f"{job.submitted_at:%Y-%m-%d %H:%M}", class_="nowrap"),
        )
        for job in jobs
    ]
    return table(what, ("search", "state", "model", told, "submitted (UTC)"), rows)


def _what_it_does(searches: Searches, job: JobRecord, agents: Sequence[AgentRecord]) -> str:
    if job.state == "queued":
        return searches.waits_for(job, agents)
    if job.state == "running":
        name = next((agent.name for agent in agents if agent.id == job.owner), None)
        return str((job.status or {}).get("running") or (f"starts on {name}" if name else "starts"))
    if job.problem is not None:
        return str(job.problem.get("message") or "")
    return searches.result_line(job) or ""


def _agents_table(agents: Sequence[Document], moment: datetime) -> Markup:
    if not agents:
        told = "No agent is connected, so nothing runs. On a GPU machine: "
        return element("p", told, element("code", "autotune agent --server URL"), class_="empty")
    rows = [
        element(
            "tr",
            element("td", agent["name"]),
            element("td", _device(agent["device"])),
            element("td", format_bytes(agent["device"]["memory_total_bytes"]), class_="nowrap"),
            element(
                "td", element("a", agent["study"], href=f"/searches/{agent['search']}") if agent["search"] else "idle"
            ),
            element("td", _ago(moment - datetime.fromisoformat(agent["heartbeat_at"])), class_="nowrap"),
        )
        for agent in agents
    ]
    return table("agents and what they run", ("agent", "device", "memory", "runs", "last heard of"), rows)


def _device(device: Document) -> str:
    count = int(device.get("count", 1))
    return f"{count} × {device['name']}" if count > 1 else str(device["name"])


def _ago(age: timedelta) -> str:
    """Return an age in words that seldom change: a page that is shown should not flicker."""
    seconds = age.total_seconds()
    return "just now" if seconds < 15 else f"{int(seconds // 15) * 15} s ago"
