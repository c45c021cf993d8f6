"""Show the form, the queue and the devices, accept submitted forms, and list searches, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.core.units import format_seconds
from autotune.models import catalog
from autotune.service.access import Known, Reader, Submitter
from autotune.service.feeds import EventStream, feeds_of
from autotune.service.pages.form import FIELDS, FieldError, command_of, more_fields, read_form
from autotune.service.pages.frame import Visitor, form_fields, page, render, rendered_of
from autotune.service.problems import problem_document
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches, describe_devices, waits_for
from autotune.store.queue import ENDED, JobOrder, JobRecord, JobState, TokenRecord

# The result of each ended search is looked up when it is first shown, which takes some milliseconds.
_ON_A_PAGE = 50
# What a request names as its training, in this order.
_WHAT = ("model", "code", VERIFIES)
Chosen = Literal["all", "queued", "running", "ended"]
_STATES: dict[Chosen, tuple[JobState, ...]] = {
    "all": (),
    "queued": ("queued",),
    "running": ("running",),
    "ended": ENDED,
}

router = APIRouter()


@dataclass(frozen=True)
class Row:
    """A search or verification as a row of a list."""

    job: JobRecord
    told: str
    """Its running trial, the reason why it waits, or its result."""

    @property
    def model(self) -> str:
        """The model or code of the search."""
        return str(next((self.job.request[name] for name in _WHAT if self.job.request.get(name)), ""))

    @property
    def batch(self) -> str:
        """The effective batch; empty for a verification."""
        return "" if VERIFIES in self.job.request else str(self.job.request.get("effective_batch") or "any")

    @property
    def device(self) -> str:
        """The name of the device, or the device that the search needs."""
        return str(self.job.device["name"]) if self.job.device else self.job.needs.describe()

    @property
    def took(self) -> str:
        """The duration of the search, or its start time while it runs."""
        if self.job.started_at is None:
            return ""
        if self.job.ended_at is None:
            return f"since {self.job.started_at:%H:%M}"
        return format_seconds((self.job.ended_at - self.job.started_at).total_seconds())


def rows_of(searches: Searches, jobs: Sequence[JobRecord]) -> list[Row]:
    """Return the rows of searches, in the same order."""
    hosts, results = searches.engine.hosts(), searches.result_lines([job for job in jobs if job.state in ENDED])
    ahead = searches.store.queue.ahead_of([job for job in jobs if job.state == "queued"])

    def told(job: JobRecord) -> str:
        """Return ``Row.told`` for a job."""
        match job.state:
            case "queued":
                return waits_for(job, hosts, ahead[job.id])
            case "running":
                host = (job.device or {}).get("host")
                return str((job.status or {}).get("running") or (f"starts on {host}" if host else "starts"))
        return str(job.problem.get("message") or "") if job.problem is not None else results.get(job.id, "")

    return [Row(job, told(job)) for job in jobs]


@router.get("/searches", include_in_schema=False)
def listing(
    visitor: Visitor, searches: Known, state: Chosen = "all",
    find: Annotated[str, Query(max_length=200)] = "", sort: JobOrder = "submitted", up: bool = False,
    page_number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> Response:  # fmt: skip
    """List the searches of a state whose name, owner, model or device contains the text ``find``."""
    asked = {"state": state, "find": find, "sort": sort, "up": up}
    found = searches.store.queue.listed(
        states=_STATES[state],
        containing=find.strip(),
        order=sort,
        is_ascending=up,
        skip=(page_number - 1) * _ON_A_PAGE,
        most=_ON_A_PAGE + 1,
    )

    def url(**changes: Any) -> str:
        return f"/searches?{urlencode({**asked, **changes})}"

    return page(
        "searches.html",
        token=visitor,
        rows=rows_of(searches, found[:_ON_A_PAGE]),
        asked=asked,
        states=list(_STATES),
        url=url,
        place=page_number,
        has_more=len(found) > _ON_A_PAGE,
    )


_MOST_SHOWN = 30
_MOST_RUNNING = 1000


@router.get("/", include_in_schema=False)
async def home(request: Request, visitor: Visitor, searches: Known) -> Response:
    """Show the first page: form, queue, devices and ended searches."""
    parts = await _rendered_parts(request, searches)
    return await run_in_threadpool(_home_page, searches, visitor, request.query_params, parts)


@router.post("/searches", include_in_schema=False)
async def submit(request: Request, token: Submitter, searches: Known) -> Response:
    """Queue the search that the form asks for; for an invalid request show the form again with the error."""
    form = await form_fields(request)
    try:
        job, _ = await run_in_threadpool(lambda: searches.submit(read_form(form), by=token))
    except AutotuneError as error:
        parts = await _rendered_parts(request, searches)
        return await run_in_threadpool(_home_page, searches, token, form, parts, error)
    return RedirectResponse(f"/searches/{job.id}", 303)


@router.get("/command", include_in_schema=False)
def command(request: Request, token: Reader, searches: Known) -> JSONResponse:
    """Return as JSON the filled-in form as a command, its error, and why its search could not run now."""
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
    """Return the changing parts of the first page."""
    return HTMLResponse(await _rendered_parts(request, searches))


@router.get("/v1/events", tags=["searches"], response_class=EventStream)
async def changes(request: Request, token: Reader) -> Response:
    """Stream an event ``changed`` whenever the queue or the devices changed."""
    return EventStream(feeds_of(request).changes(token))


async def _rendered_parts(request: Request, searches: Searches) -> Markup:
    return await rendered_of(request).get("home", lambda: _render_parts(searches))


def _home_page(
    searches: Searches, token: TokenRecord, asked: Mapping[str, str], parts: Markup, error: AutotuneError | None = None
) -> HTMLResponse:
    """Return the first page: the form, filled in with ``asked``, and the changing ``parts``, already rendered."""
    devices = [device for host in searches.engine.hosts() for device in host.devices]
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
            "gpus": sorted({"cpu" if device.kind == "cpu" else device.name for device in devices}),
            "codes": sorted(searches.codes),
        },
        parts=parts,
        status=problem_document(error)[0] if error else 200,
    )


def _render_parts(searches: Searches) -> Markup:
    """Render the changing parts of the first page: queue, devices, problems, ended searches."""
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
