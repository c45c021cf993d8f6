"""Answer requests under ``/v1``: searches, predictions, verifications, and what the service offers."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import ServiceError, UnknownStudyError
from autotune.results.forms import AnyForm
from autotune.results.html import html_page
from autotune.results.json_document import report_document
from autotune.results.recipes import exported_text
from autotune.results.text import summary_lines
from autotune.service.access import Known, Reader, Submitter, Writer
from autotune.service.feeds import EventStream, feeds_of
from autotune.service.openapi import SearchDocument, SearchesDocument, prediction_body, search_body, verification_body
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches, describe_devices
from autotune.store.queue import JOB_STATES, JobRecord, JobState
from autotune.tuning.run import trial_log_path

router = APIRouter()


_MOST_LOG_BYTES = 64 * 1024
_HEALTH_SECONDS = 1.0
_LEAST_FREE_BYTES = 4 * 2**20
# What has to be escaped in the value of a Prometheus label.
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Health:
    """Checks whether the database answers, at most once a second however many clients ask."""

    def __init__(self, searches: Searches) -> None:
        self._searches = searches
        self._query: asyncio.Task[int] | None = None
        self._queried_at = 0.0

    async def problem(self) -> str | None:
        """Return the problem with the database; ``None`` if it answers. Without details, as no token is needed."""
        if self._query is None or (self._query.done() and time.monotonic() - self._queried_at >= _HEALTH_SECONDS):
            self._queried_at = time.monotonic()
            self._query = asyncio.create_task(asyncio.to_thread(self._searches.store.queue.count_queued))
        await asyncio.wait({self._query}, timeout=_HEALTH_SECONDS)
        if not self._query.done() or self._query.exception() is not None:
            return "the database does not answer"
        path = self._searches.store.path
        if path is not None and shutil.disk_usage(path.parent).free < _LEAST_FREE_BYTES:
            return "the disk of the database is full"
        return None


@router.get("/healthz", tags=["health"])
async def health(request: Request, searches: Known) -> Document:
    """Say that the service and its database answer; needs no token. ``degraded``: a device cannot be used now."""
    problem = await cast("Health", request.app.state.health).problem()
    if problem is not None:
        raise ServiceError(problem, "the service's log says more", status=503)
    return {"status": "degraded" if searches.runner.problems() else "ok", "version": __version__}


@router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
def metrics(token: Reader, searches: Known) -> str:
    """Return figures for Prometheus."""
    queue = searches.store.queue
    counts, studies = queue.counts(), searches.store.studies()
    lines = [
        "# HELP autotune_searches Searches by state.",
        "# TYPE autotune_searches gauge",
        *(f'autotune_searches{{state="{state}"}} {counts.get(state, 0)}' for state in JOB_STATES),
        "# HELP autotune_trials Trials in the database by state.",
        "# TYPE autotune_trials gauge",
        *(
            f'autotune_trials{{state="{state}"}} {sum(getattr(summary, state) for summary in studies)}'
            for state in ("running", "completed", "out_of_memory", "failed")
        ),
        "# HELP autotune_attempts_lost_total Attempts at searches whose process or node was lost, since the start.",
        "# TYPE autotune_attempts_lost_total counter",
        f"autotune_attempts_lost_total {searches.runner.lost}",
        "# HELP autotune_problems What keeps devices from searching now.",
        "# TYPE autotune_problems gauge",
        f"autotune_problems {len(searches.runner.problems())}",
        "# HELP autotune_device_busy Whether a search runs on a device.",
        "# TYPE autotune_device_busy gauge",
    ]
    for device in describe_devices(searches):
        labels = ",".join(f'{name}="{str(device[name]).translate(_ESCAPED)}"' for name in ("host", "label", "name"))
        lines.append(f"autotune_device_busy{{{labels}}} {int(device['search'] is not None)}")
    return "\n".join(lines) + "\n"


@router.get("/openapi.json", include_in_schema=False)
def openapi(request: Request, token: Reader) -> JSONResponse:
    return JSONResponse(request.app.openapi())


@router.get("/v1/devices", tags=["devices"])
def list_devices(token: Reader, searches: Known) -> Document:
    """List the devices on which searches run, with what runs on them."""
    return {"devices": describe_devices(searches)}


@router.api_route("/v1/agents{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
def refuse_agent(rest: str) -> None:
    """Tell an agent of an earlier version that there are none any more."""
    raise ServiceError(
        "this service runs its searches itself; there are no agents any more",
        "end the agent; for more machines start the service with --executor ray://HOST:10001",
        status=410,
    )


@router.post("/v1/searches", tags=["searches"], status_code=202, response_model=None, openapi_extra=search_body())
def submit(
    document: Annotated[Any, Body()], response: Response, token: Submitter, searches: Known,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> SearchDocument:  # fmt: skip
    """Queue a search. 202 with its Location; 200 where the same request was answered or submitted before."""
    job, is_new = searches.submit(document, by=token, idempotency_key=idempotency_key)
    told = searches.describe(job)
    response.status_code = 202 if is_new else 200
    response.headers["Location"] = told["links"]["self"]
    return told


@router.get("/v1/searches", tags=["searches"], response_model=None)
def list_searches(
    token: Reader, searches: Known,
    state: Annotated[list[JobState] | None, Query(description="One or more of " + ", ".join(JOB_STATES))] = None,
    study: str | None = None,
    before: Annotated[int | None, Query(ge=0, lt=2**31, description="Only searches with a smaller number.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> SearchesDocument:  # fmt: skip
    """List searches, the newest first."""
    jobs = searches.store.queue.jobs(states=state or (), study=study, before=before, most=limit)
    return {"searches": searches.describe_all(jobs)}


@router.get("/v1/searches/{search}", tags=["searches"], response_model=None)
def show(search: str, token: Reader, searches: Known) -> SearchDocument:
    """Show a search, by its id or by the name of its study."""
    return searches.describe(searches.job(search))


@router.delete("/v1/searches/{search}", tags=["searches"], status_code=202, response_model=None)
def cancel(search: str, token: Writer, searches: Known) -> SearchDocument:
    """Cancel a search: at once where it waits, else soon. What was measured stays."""
    return searches.describe(searches.cancel(searches.job(search), token))


@router.get("/v1/searches/{search}/trials", tags=["searches"])
def trials(search: str, token: Reader, searches: Known) -> Document:
    """List the trials of a search, as ``--json`` has them."""
    return {"trials": searches.trials(searches.job(search))}


@router.get("/v1/searches/{search}/trials/{number}/log", tags=["searches"], response_class=PlainTextResponse)
def log(search: str, number: int, token: Reader, searches: Known) -> str:
    """Show the end of a trial's log."""
    loaded = searches.report(searches.job(search))
    trial = next((trial for trial in loaded.trials if trial.number == number), None)
    if trial is None or trial.log_path is None:
        raise UnknownStudyError(f"trial {number} has no log", "a trial that was reused from another search has none")
    try:
        with trial_log_path(searches.storage, loaded.study.name, number).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        raise UnknownStudyError(
            f"the log of trial {number} is not on this machine", "it was removed, or the trial ran elsewhere"
        ) from error


@router.get("/v1/searches/{search}/report", tags=["searches"])
def report(
    search: str, token: Reader, searches: Known,
    form: Annotated[Literal["json", "text", "html"], Query(alias="format")] = "json",
) -> Response:  # fmt: skip
    """Return the result: the document of ``--json``, the lines of the command line, or a page with charts."""
    loaded = searches.report(searches.job(search))
    if form == "text":
        return PlainTextResponse("\n".join(summary_lines(loaded)) + "\n")
    if form == "html":
        return Response(
            html_page(loaded),
            media_type="text/html",
            headers={"Content-Disposition": 'attachment; filename="report.html"'},
        )
    return JSONResponse(report_document(loaded))


@router.get("/v1/searches/{search}/export", tags=["searches"], response_class=PlainTextResponse)
def export(
    search: str, token: Reader, searches: Known,
    form: Annotated[AnyForm, Query(alias="format")] = "json",
    anyway: Annotated[bool, Query(description="Use the leader even if noise hides the fastest candidate.")] = False,
) -> Response:  # fmt: skip
    """Return the best trial as ``TrainingArguments``; what has to be said beside is in the header Autotune-Note."""
    report = searches.report(searches.job(search))
    if not anyway:
        report.check_is_told()
    text, notes = exported_text(report, form)
    return PlainTextResponse(text, headers={"Autotune-Note": " | ".join(notes).encode("ascii", "replace").decode()})


@router.get("/v1/searches/{search}/events", tags=["searches"], response_class=EventStream)
async def events(
    request: Request, search: str, token: Reader, searches: Known,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
    after: Annotated[int, Query(ge=0, description="As Last-Event-ID, for clients that cannot set it.")] = 0,
) -> Response:  # fmt: skip
    """Stream what happens to a search, from the event after Last-Event-ID on, to its end.

    ``status`` events, of what runs now, have no id and are not kept.
    """
    job = await run_in_threadpool(searches.job, search)
    return EventStream(feeds_of(request).events(job.id, token, after if last_event_id is None else last_event_id))


@router.post("/v1/predict", tags=["predict"], openapi_extra=prediction_body("predict"))
def predict(
    document: Annotated[
        dict[str, Any], Body(examples=[{"model": "bert-large-uncased", "effective_batch": 64, "gpu": ["rtx-3090"]}])
    ],
    token: Reader, searches: Known,
) -> Document:  # fmt: skip
    """Return the document of ``autotune predict --json``; takes the options of the command, runs nothing on a GPU."""
    return searches.predictions.answer(document, token.name)


@router.post("/v1/advise", tags=["predict"], openapi_extra=prediction_body("advise"))
def advise(
    document: Annotated[
        dict[str, Any], Body(examples=[{"model": "gpt2-medium", "effective_batch": 64, "price": ["l4=0.7"]}])
    ],
    token: Reader, searches: Known,
) -> Document:  # fmt: skip
    """Compare GPUs to rent as ``autotune advise`` does: its JSON document, and the lines of its text."""
    return searches.predictions.answer(document, token.name, "advise")


@router.post("/v1/verify", name="submit", tags=["verify"], status_code=202, openapi_extra=verification_body())
def submit_verification(
    document: Annotated[dict[str, Any], Body(examples=[{"study": "bert-large-uncased-64", "steps": 100}])],
    response: Response, token: Submitter, searches: Known,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> Document:  # fmt: skip
    """Queue a verification on a device like the one that the study was measured on. 202 with its Location."""
    job, is_new = searches.submit_verification(document, by=token.name, idempotency_key=idempotency_key)
    response.status_code = 202 if is_new else 200
    response.headers["Location"] = f"/v1/verify/{job.id}"
    return _describe(searches, job)


@router.get("/v1/verify/{verification}", name="show", tags=["verify"])
def show_verification(verification: str, token: Reader, searches: Known) -> Document:
    """Show a verification: its state, and once it has ended the document of ``autotune verify --json``.

    Its events are those of a search, under ``/v1/searches/ID/events``; it is cancelled as one.
    """
    job = searches.job(verification)
    if VERIFIES not in job.request:
        raise UnknownStudyError(f"{verification[:120]!r} is a search", "POST /v1/verify makes a verification")
    return _describe(searches, job)


def _describe(searches: Searches, job: JobRecord) -> Document:
    """Return the JSON of a verification: its job, its result as JSON and as text, and the error of a missed promise."""
    result = searches.verification(job) or {}
    fields = {"verification": result.get("verification"), "lines": result.get("lines"), "missed": result.get("problem")}
    return {**searches.describe(job), **fields}
