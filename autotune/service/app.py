"""Serve the HTTP API under ``/v1`` to clients and agents, and check who may use it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal, cast

from fastapi import Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError, UnknownStudyError
from autotune.core.options import BY_NAME
from autotune.results.document import report_document
from autotune.results.export import FORMATS, Format, beside_lines, make_export, render
from autotune.results.html.page import html_page
from autotune.results.text import summary_lines
from autotune.service.bell import wait_for
from autotune.service.guard import Guard
from autotune.service.problems import MEDIA_TYPE, problem_document
from autotune.service.requests import OPTION_NAMES
from autotune.service.searches import Searches, describe_agent
from autotune.service.tokens import digest, may_write
from autotune.store import now
from autotune.store.queue import ENDED, JOB_STATES, JobState, LeaseLostError, TokenRecord

COOKIE = "autotune_token"
# A listener asks the database anew after so long, for what happened without a ring: another process's writes.
_POLL_SECONDS = 2.0
_MOST_LOG_BYTES = 64 * 1024
# So many wrong tokens from one address in a minute are refused without a look.
_MOST_GUESSES = 20
_GUESS_SECONDS = 60.0


@dataclass
class Access:
    """Who may use the service: tokens in the database, and those of this process, which are kept nowhere."""

    searches: Searches
    own: dict[str, TokenRecord] = field(default_factory=dict)
    """By digest."""
    _guesses: dict[str, list[float]] = field(default_factory=dict)

    def identify(self, request: Request) -> TokenRecord | None:
        """Return the token of a request, from its header or from the page's cookie."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
        return self.check(token, request.client.host if request.client else "")

    def check(self, token: str, address: str) -> TokenRecord | None:
        """Return the record of a token; ``ServiceError`` for an address that has guessed too often."""
        if not token:
            return None
        key = digest(token)
        found = self.own.get(key) or self.searches.store.queue.token(key)
        if found is None:
            self._count_guess(address)
        return found

    def _count_guess(self, address: str) -> None:
        moment = time.monotonic()
        recent = [then for then in self._guesses.get(address, []) if moment - then < _GUESS_SECONDS]
        if len(self._guesses) > 10_000:
            self._guesses.clear()
        self._guesses[address] = [*recent, moment]
        if len(recent) >= _MOST_GUESSES:
            raise ServiceError("too many wrong tokens came from this address", "wait a minute", status=429)


def access_of(request: Request) -> Access:
    """Return the access rules of the application that serves a request."""
    return cast(Access, request.app.state.access)


def searches_of(request: Request) -> Searches:
    """Return the searches of the application that serves a request."""
    return cast(Searches, request.app.state.searches)


def _reader(request: Request) -> TokenRecord:
    token = access_of(request).identify(request)
    if token is None:
        raise ServiceError(
            "this needs a token", "send it as Authorization: Bearer TOKEN, or set AUTOTUNE_TOKEN", status=401
        )
    return token


def _runner(token: Annotated[TokenRecord, Depends(_reader)]) -> TokenRecord:
    if not may_write(token):
        raise ServiceError(
            f"the token {token.name!r} may only read", "ask the operator for one with the role run", status=403
        )
    return token


Reader = Annotated[TokenRecord, Depends(_reader)]
Writer = Annotated[TokenRecord, Depends(_runner)]
Known = Annotated[Searches, Depends(searches_of)]


def _submission_schema() -> Document:
    """Return the JSON schema of a submission, made from the table of options."""
    properties: Document = {}
    for name in OPTION_NAMES:
        option = BY_NAME[name]
        told: Document = {"description": option.help}
        if option.kind.choices and option.kind.name == "choice":
            told["enum"] = list(option.kind.choices)
        properties[name] = told
    properties["device"]["description"] = "cpu, cuda, or a part of a GPU's name [default: any agent's]"
    properties["priority"] = {"type": "integer", "minimum": 0, "maximum": 10, "default": 0}
    properties["needs"] = {
        "type": "object",
        "properties": {
            "gpu": {"type": "string", "description": "A part of the GPU's name."},
            "memory_bytes": {"type": "integer"},
            "count": {"type": "integer"},
        },
        "additionalProperties": False,
    }
    return {"type": "object", "required": ["model"], "properties": properties, "additionalProperties": False}


def _add_searches(app: FastAPI) -> None:
    tags: list[Any] = ["searches"]

    @app.post(
        "/v1/searches",
        status_code=202,
        tags=tags,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": _submission_schema()}}}
        },
    )
    async def submit(
        request: Request, response: Response, token: Writer, searches: Known,
        idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
    ) -> Document:  # fmt: skip
        """Queue a search. 202 with its Location; 200 where the same request was answered or submitted before."""
        try:
            document = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("the body is no JSON", "send the options of a search as a JSON object") from error
        job, is_new = await run_in_threadpool(searches.submit, document, by=token.name, idempotency_key=idempotency_key)
        response.status_code = 202 if is_new else 200
        response.headers["Location"] = f"/v1/searches/{job.id}"
        return await run_in_threadpool(searches.describe, job)

    @app.get("/v1/searches", tags=tags)
    def list_searches(
        token: Reader, searches: Known,
        state: Annotated[list[JobState] | None, Query(description="One or more of " + ", ".join(JOB_STATES))] = None,
        study: str | None = None,
        before: Annotated[int | None, Query(description="Only searches with a smaller number.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Document:  # fmt: skip
        """List searches, the newest first."""
        jobs = searches.store.queue.jobs(states=state or (), study=study, before=before, most=limit)
        agents = searches.agents()
        return {"searches": [searches.describe(job, agents) for job in jobs]}

    @app.get("/v1/searches/{search}", tags=tags)
    def show(search: str, token: Reader, searches: Known) -> Document:
        """Show a search, by its id or by the name of its study."""
        return searches.describe(searches.job(search))

    @app.delete("/v1/searches/{search}", status_code=202, tags=tags)
    def cancel(search: str, token: Writer, searches: Known) -> Document:
        """Cancel a search: at once where it waits, else through its agent. What was measured stays."""
        return searches.describe(searches.cancel(searches.job(search)))

    @app.get("/v1/searches/{search}/trials", tags=tags)
    def trials(search: str, token: Reader, searches: Known) -> Document:
        """List the trials of a search, as ``--json`` has them."""
        return {"trials": searches.trials(searches.job(search))}

    @app.get("/v1/searches/{search}/trials/{number}/log", tags=tags, response_class=PlainTextResponse)
    def log(search: str, number: int, token: Reader, searches: Known) -> str:
        """Show the end of a trial's log."""
        return trial_log(searches, search, number)

    @app.get("/v1/searches/{search}/report", tags=tags)
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

    @app.get("/v1/searches/{search}/export", tags=tags, response_class=PlainTextResponse)
    def export(
        search: str, token: Reader, searches: Known, form: Annotated[Format, Query(alias="format")] = "json"
    ) -> Response:
        """Return the best trial as ``TrainingArguments``; what has to be said beside is in the header Autotune-Note."""
        made = make_export(searches.report(searches.job(search)))
        assert form in FORMATS
        notes = {"Autotune-Note": " | ".join(beside_lines(made)).encode("ascii", "replace").decode()}
        return PlainTextResponse(render(made, form), headers=notes)

    @app.get("/v1/searches/{search}/events", tags=tags, response_class=EventSourceResponse)
    async def events(
        search: str, token: Reader, searches: Known,
        last_event_id: Annotated[int | None, Header(ge=0)] = None,
        after: Annotated[int, Query(ge=0, description="As Last-Event-ID, for clients that cannot set it.")] = 0,
    ) -> AsyncIterator[ServerSentEvent]:  # fmt: skip
        """Stream what happens to a search, from the event after Last-Event-ID on, to its end.

        ``status`` events, of what runs now, have no id and are not kept.
        """
        async for event in _events(searches, search, after if last_event_id is None else last_event_id):
            yield event


async def _events(searches: Searches, search: str, after: int) -> AsyncIterator[ServerSentEvent]:
    job = await run_in_threadpool(searches.job, search)
    queue, status = searches.store.queue, None
    while True:
        ticket = searches.bell.ticket(job.id)
        job = await run_in_threadpool(searches.job, job.id)
        found = await run_in_threadpool(queue.events, job.id, after)
        for event in found:
            after = event.number
            data = {**event.document, "at": event.created_at.isoformat()}
            yield ServerSentEvent(event=event.kind, id=str(event.number), data=data)
        if job.status is not None and job.status != status:
            status = job.status
            yield ServerSentEvent(event="status", data=status)
        if job.state in ENDED and after >= job.events:
            return
        if searches.is_closing:
            return
        if not found:
            await wait_for(ticket, _POLL_SECONDS)


def trial_log(searches: Searches, search: str, number: int) -> str:
    """Return the end of a trial's log; ``UnknownStudyError`` where there is none."""
    report = searches.report(searches.job(search))
    trial = next((trial for trial in report.trials if trial.number == number), None)
    if trial is None or trial.log_path is None:
        raise UnknownStudyError(f"trial {number} has no log", "a trial that was reused from another search has none")
    path = searches.log_path(report.study.name, number)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        raise UnknownStudyError(
            f"the log of trial {number} is not on this machine", f"its agent has it at {trial.log_path}"
        ) from error


def _add_agents(app: FastAPI) -> None:
    tags: list[Any] = ["agents"]

    @app.get("/v1/agents", tags=tags)
    def list_agents(token: Reader, searches: Known) -> Document:
        """List the agents that are connected, with their devices and what they run."""
        running = searches.store.queue.jobs(states=["running"], most=1000)
        return {"agents": [describe_agent(agent, running) for agent in searches.agents()]}

    @app.post("/v1/agents", status_code=201, tags=tags)
    def register(document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known) -> Document:
        """Connect an agent."""
        return searches.register_agent(document)

    @app.delete("/v1/agents/{agent}", status_code=204, tags=tags)
    def leave(agent: str, token: Writer, searches: Known) -> None:
        """Disconnect an agent."""
        searches.leave(agent)

    @app.post("/v1/agents/{agent}/claim", tags=tags)
    async def claim(
        agent: str, token: Writer, searches: Known,
        wait_seconds: Annotated[float, Query(ge=0, le=60)] = 0,
    ) -> Document:  # fmt: skip
        """Take the next search that fits, under a lease; waits for one. ``job`` is ``null`` where none came."""
        return await searches.claim(agent, wait_seconds)

    @app.post("/v1/agents/{agent}/jobs/{job}/heartbeat", tags=tags)
    def heartbeat(
        agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known
    ) -> Document:
        """Keep the lease of a search; says whether the search is to be cancelled."""
        return searches.heartbeat(agent, job, document)

    @app.post("/v1/agents/{agent}/jobs/{job}/events", tags=tags)
    def say(
        agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known
    ) -> Document:
        """Record what happened in a search."""
        return searches.say(agent, job, document)

    @app.get("/v1/agents/{agent}/jobs/{job}/records", tags=tags)
    def records(agent: str, job: str, lease_token: str, token: Writer, searches: Known) -> Document:
        """Return what is recorded of a claimed search, for an agent with a database of its own."""
        return searches.records(job, lease_token)

    @app.post("/v1/agents/{agent}/jobs/{job}/end", tags=tags)
    def end(
        agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known
    ) -> Document:
        """End a search, or put it back into the queue."""
        return searches.end(agent, job, document)


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["health"])
    def health(searches: Known) -> Document:
        """Say that the service and its database answer; needs no token."""
        searches.store.queue.counts()
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    def metrics(token: Reader, searches: Known) -> str:
        """Return figures for Prometheus."""
        return _metrics(searches)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi(token: Reader) -> JSONResponse:
        return JSONResponse(app.openapi())


def _metrics(searches: Searches) -> str:
    queue = searches.store.queue
    counts = queue.counts()
    lines = [
        "# HELP autotune_searches Searches by state.",
        "# TYPE autotune_searches gauge",
        *(f'autotune_searches{{state="{state}"}} {counts.get(state, 0)}' for state in JOB_STATES),
        "# HELP autotune_trials Trials in the database by state.",
        "# TYPE autotune_trials gauge",
        *(f'autotune_trials{{state="{state}"}} {count}' for state, count in searches.trial_counts().items()),
        "# HELP autotune_leases_lost_total Searches taken back from agents that fell silent, since the start.",
        "# TYPE autotune_leases_lost_total counter",
        f"autotune_leases_lost_total {searches.leases_lost}",
        "# HELP autotune_agent_heartbeat_age_seconds Seconds since an agent was heard of.",
        "# TYPE autotune_agent_heartbeat_age_seconds gauge",
    ]
    moment = queue.clock()
    for agent in searches.agents():
        age = max(timedelta(0), moment - agent.heartbeat_at).total_seconds()
        lines.append(f'autotune_agent_heartbeat_age_seconds{{agent="{agent.id}"}} {age:.1f}')
    return "\n".join(lines) + "\n"


def problem_response(error: AutotuneError) -> JSONResponse:
    """Return the answer for an error."""
    status, document = problem_document(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(document, status, headers=headers, media_type=MEDIA_TYPE)


def _on_error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case AutotuneError():
            return problem_response(error)
        case LeaseLostError():
            return problem_response(
                ServiceError("the lease of this search was lost", "stop it; another agent goes on with it", status=410)
            )
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
            return problem_response(
                InvalidRequestError(f"{where or 'the request'}: {first['msg']}"[:300], "see /openapi.json")
            )
        case HTTPException():
            return problem_response(ServiceError(str(error.detail), status=error.status_code))
    return problem_response(ServiceError("the service failed; its log says why", status=500))


def make_app(
    searches: Searches,
    *,
    names: Collection[str] = (),
    own_tokens: dict[str, TokenRecord] | None = None,
    extend: Callable[[FastAPI], None] | None = None,
    around: Callable[[FastAPI], ASGIApp] | None = None,
) -> Guard:
    """Return the application over these searches.

    ``names`` are host names it answers to besides those of this machine, ``own_tokens`` tokens of this process by
    their digest. ``extend`` adds routes, ``around`` wraps the application.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        searches.bell.attach()
        yield
        searches.is_closing = True

    app = FastAPI(
        title="autotune", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.searches = searches
    app.state.access = Access(searches, dict(own_tokens or {}))
    for kind in (AutotuneError, LeaseLostError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    _add_health(app)
    _add_searches(app)
    _add_agents(app)
    if extend is not None:
        extend(app)
    return Guard(app, names, around=around)


def token_of_process(name: str) -> TokenRecord:
    """Return the record of a token that lives as long as this process."""
    return TokenRecord(id=name, name=name, role="run", created_at=now())
