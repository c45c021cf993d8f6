"""Submit, list, show, follow, cancel and export searches over HTTP."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, UnknownStudyError
from autotune.results.html.page import html_page
from autotune.results.json_document import report_document
from autotune.results.recipes import AnyForm, exported_text
from autotune.results.text import summary_lines
from autotune.service.access import Known, Reader, Submitter, Writer
from autotune.service.documents import SearchDocument, SearchesDocument
from autotune.service.feeds import EventStream, feeds_of
from autotune.service.openapi import search_body
from autotune.store.queue import JOB_STATES, JobState
from autotune.tuning.run import trial_log_path

_MOST_LOG_BYTES = 64 * 1024

router = APIRouter(tags=["searches"])


@router.post("/v1/searches", status_code=202, response_model=None, openapi_extra=search_body())
async def submit(
    request: Request, response: Response, token: Submitter, searches: Known,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> SearchDocument:  # fmt: skip
    """Queue a search. 202 with its Location; 200 where the same request was answered or submitted before."""
    try:
        document = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the body is not JSON", "send the options of a search as a JSON object") from error

    def queue() -> tuple[SearchDocument, bool]:
        job, is_new = searches.submit(document, by=token, idempotency_key=idempotency_key)
        return searches.describe(job), is_new

    told, is_new = await run_in_threadpool(queue)
    response.status_code = 202 if is_new else 200
    response.headers["Location"] = told["links"]["self"]
    return told


@router.get("/v1/searches", response_model=None)
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


@router.get("/v1/searches/{search}", response_model=None)
def show(search: str, token: Reader, searches: Known) -> SearchDocument:
    """Show a search, by its id or by the name of its study."""
    return searches.describe(searches.job(search))


@router.delete("/v1/searches/{search}", status_code=202, response_model=None)
def cancel(search: str, token: Writer, searches: Known) -> SearchDocument:
    """Cancel a search: at once where it waits, else soon. What was measured stays."""
    return searches.describe(searches.cancel(searches.job(search), token))


@router.get("/v1/searches/{search}/trials")
def trials(search: str, token: Reader, searches: Known) -> Document:
    """List the trials of a search, as ``--json`` has them."""
    return {"trials": searches.trials(searches.job(search))}


@router.get("/v1/searches/{search}/trials/{number}/log", response_class=PlainTextResponse)
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


@router.get("/v1/searches/{search}/report")
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
            html_page(loaded, None),
            media_type="text/html",
            headers={"Content-Disposition": 'attachment; filename="report.html"'},
        )
    return JSONResponse(report_document(loaded))


@router.get("/v1/searches/{search}/export", response_class=PlainTextResponse)
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


@router.get("/v1/searches/{search}/events", response_class=EventStream)
async def events(
    request: Request, search: str, token: Reader, searches: Known,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
    after: Annotated[int, Query(ge=0, description="As Last-Event-ID, for clients that cannot set it.")] = 0,
) -> Response:  # fmt: skip
    """Stream what happens to a search, from the event after Last-Event-ID on, to its end.

    ``status`` events, of what runs now, have no id and are not kept.
    """
    job = await run_in_threadpool(searches.job, search)
    return EventStream(feeds_of(request).search(job.id, after if last_event_id is None else last_event_id, token))
