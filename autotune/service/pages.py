"""Serve the pages that a browser shows: rendered here, kept current by events, with nothing from another host."""

from __future__ import annotations

import asyncio
import importlib.resources
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError
from autotune.core.options import BY_NAME
from autotune.core.units import format_bytes, format_rate
from autotune.models import catalog
from autotune.results.export import Format, make_export, render
from autotune.results.html.markup import Child, Markup, element
from autotune.results.html.page import report_sections
from autotune.results.html.style import STYLE
from autotune.results.report import Report
from autotune.service.access import COOKIE, Known, Reader, Writer, access_of, searches_of
from autotune.service.bell import ANY_CHANGE, wait_for
from autotune.service.problems import problem_document
from autotune.service.searches import Searches, describe_agent
from autotune.service.tokens import may_write
from autotune.store.queue import ENDED, JobRecord, TokenRecord

_POLL_SECONDS = 5.0
_PAUSE_SECONDS = 0.3
_MOST_SHOWN = 30
# The fields of the form, with what stands before each; the second half is folded away.
_FIELDS = (
    ("model", "Model", "a name of the catalog or the hub"),
    ("effective_batch", "Effective batch", "batch × accumulation × devices"),
    ("device", "GPU", "h200, say, or cpu"),
    ("memory_limit", "Memory limit", "24GiB, say"),
)
_MORE_FIELDS = (
    ("seq_len", "Tokens a sample", "512 or the model's most"),
    ("precision", "Precisions", "bf16,tf32"),
    ("dataset", "Dataset", "a name on the hub, or a path the operator allows"),
    ("trials", "At most trials", "as many as it takes"),
    ("time_budget", "Time budget", "5m, say"),
    ("study", "Name of the study", "made up by itself"),
    ("priority", "Priority", "0 to 10"),
)
_EXPORTS: tuple[tuple[Format, str], ...] = (("json", "JSON"), ("cli", "flags"), ("python", "Python"))


def _page(title: str, *children: Child, token: TokenRecord | None = None) -> HTMLResponse:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title}: autotune"),
        element("link", rel="icon", href="/assets/icon.svg"),
        element("link", rel="stylesheet", href="/assets/report.css"),
        element("link", rel="stylesheet", href="/assets/page.css"),
        element("script", src="/assets/page.js", defer=True),
    )
    leave = element("form", element("button", "Sign out"), method="post", action="/session/end") if token else None
    links: Child = [
        element("a", "autotune", href="/", class_="name"),
        [element("a", "Compare", href="/compare"), element("a", "Optuna dashboard", href="/dashboard")]
        if token
        else None,
        leave,
    ]
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element("nav", links, class_="top", aria_label="Pages"),
        element(
            "p",
            element("strong", "The connection is lost."),
            " What you see may be old; trying again.",
            id="lost",
            class_="error",
            role="status",
            hidden=True,
        ),
        element("main", children, id="main"),
        element("footer", element("p", f"autotune {__version__}", class_="soft")),
    )
    return HTMLResponse(f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n")


def _error(error: AutotuneError) -> Markup:
    hint = element("div", error.hint) if error.hint else None
    return element("div", element("strong", error.message), hint, class_="error", role="alert")


def _sign_in(error: AutotuneError | None = None) -> HTMLResponse:
    form = element(
        "form",
        element(
            "label",
            "Token",
            element("input", name_="token", type="password", required=True, autocomplete="current-password"),
        ),
        element("p", element("button", "Sign in", class_="main")),
        id="sign-in",
        method="post",
        action="/session",
    )
    told = "autotune serve printed a URL with a token when it first started; autotune token add NAME makes another."
    page = _page(
        "Sign in", element("h1", "Sign in"), _error(error) if error else None, form, element("p", told, class_="soft")
    )
    page.status_code = 401 if error else 200
    return page


# Home


def _home(
    searches: Searches, token: TokenRecord, asked: Mapping[str, str], error: AutotuneError | None
) -> HTMLResponse:
    page = _page(
        "Searches",
        element("h1", "Search for the fastest configuration"),
        _error(error) if error else None,
        _form(asked) if may_write(token) else element("p", "Your token may read; it starts no search.", class_="soft"),
        element("div", _home_parts(searches, token), data_part="/parts/home", data_events="/v1/events"),
        token=token,
    )
    page.status_code = problem_document(error)[0] if error else 200
    return page


def _form(asked: Mapping[str, str]) -> Markup:
    def fields(these: Sequence[tuple[str, str, str]]) -> list[Markup]:
        return [
            element(
                "label",
                title,
                element(
                    "input",
                    name_=name,
                    value=asked.get(name) or None,
                    placeholder=told,
                    autocomplete="off",
                    list="models" if name == "model" else None,
                    required=name == "model",
                    inputmode="numeric" if name in ("effective_batch", "seq_len", "trials", "priority") else None,
                ),
            )
            for name, title, told in these
        ]

    is_more_open = any(asked.get(name) for name, _, _ in _MORE_FIELDS)
    return element(
        "form",
        fields(_FIELDS),
        element(
            "details",
            element("summary", "More options"),
            element("div", fields(_MORE_FIELDS), class_="side"),
            class_="wide",
            open=is_more_open,
        ),
        element("datalist", [element("option", value=entry.name) for entry in catalog.entries()], id="models"),
        element(
            "div",
            element("div", "The same on a command line", class_="soft"),
            element("pre", element("code", id="command", aria_live="polite"), tabindex=0),
            element("button", "Search", class_="main"),
            " ",
            element("button", "Copy the command", type="button", data_copy="command"),
            class_="wide",
        ),
        class_="search",
        method="post",
        action="/searches",
    )


def _home_parts(searches: Searches, token: TokenRecord) -> list[Markup]:
    queue = searches.store.queue
    agents = searches.agents()
    waiting = queue.jobs(states=["queued", "running"], most=_MOST_SHOWN)
    ended = queue.jobs(states=ENDED, most=_MOST_SHOWN)
    running = queue.jobs(states=["running"], most=1000)
    names = {agent.id: agent.name for agent in agents}

    def rows(jobs: Sequence[JobRecord]) -> list[Markup]:
        return [
            element(
                "tr",
                element("td", element("a", job.study, href=f"/searches/{job.id}")),
                element("td", _badge(job.state)),
                element("td", str(job.request.get("model", ""))),
                element("td", _where(searches, job, names)),
                element("td", f"{job.submitted_at:%Y-%m-%d %H:%M}", class_="nowrap"),
            )
            for job in jobs
        ]

    head = ("search", "state", "model", "what it does, or waits for", "submitted (UTC)")
    none = "No search waits or runs. Ask for one above, or with autotune search --server."
    parts = [
        element("h2", "Queue"),
        _table(head, rows(waiting)) if waiting else element("p", none, class_="empty"),
        element("h2", "Agents"),
        _agents_table([describe_agent(agent, running) for agent in agents]),
        element("h2", "Ended"),
        _table(head, rows(ended)) if ended else element("p", "No search has ended yet.", class_="empty"),
    ]
    counts = queue.counts()
    shown = len(waiting)
    if (more := counts.get("queued", 0) + counts.get("running", 0) - shown) > 0:
        parts.insert(2, element("p", f"and {more} more, submitted earlier", class_="soft"))
    return parts


def _where(searches: Searches, job: JobRecord, names: Mapping[str, str]) -> str:
    if job.state == "queued":
        return searches.waits_for(job)
    if job.state == "running":
        return str((job.status or {}).get("running") or names.get(job.owner or "", "starting"))
    return str((job.problem or {}).get("message") or "")


def _agents_table(agents: Sequence[Document]) -> Markup:
    if not agents:
        told = "No agent is connected, so nothing runs. On a GPU machine: "
        return element("p", told, element("code", "autotune agent --server URL"), class_="empty")
    rows = [
        element(
            "tr",
            element("td", agent["name"]),
            element("td", agent["device"]["name"]),
            element("td", format_bytes(agent["device"]["memory_total_bytes"])),
            element(
                "td", element("a", agent["study"], href=f"/searches/{agent['search']}") if agent["search"] else "idle"
            ),
        )
        for agent in agents
    ]
    return _table(("agent", "device", "memory", "runs"), rows)


def _table(head: Sequence[str], rows: Sequence[Markup]) -> Markup:
    cells = [element("th", name, scope="col") for name in head]
    table = element("table", element("thead", element("tr", cells)), element("tbody", rows))
    return element("div", table, class_="scroll", tabindex=0)


def _badge(state: str) -> Markup:
    return element("span", state, class_=f"badge {state}")


# A search


def _search_page(searches: Searches, job: JobRecord, token: TokenRecord) -> HTMLResponse:
    path = f"/searches/{job.id}"
    events = f"/v1{path}/events"
    log = element(
        "form",
        element(
            "label", "Log of trial", element("input", name_="number", type="number", min=0, value="0", required=True)
        ),
        element("p", element("button", "Show the log")),
        data_log=f"/v1{path}/trials/",
    )
    return _page(
        job.study,
        element("h1", job.study),
        element("p", id="now", class_="now soft", role="status", aria_live="off"),
        element("div", _search_parts(searches, job, token), data_part=f"/parts{path}", data_events=events),
        element("h2", "What the agent says"),
        element("pre", id="lines", class_="lines", tabindex=0, aria_label="Lines of the search"),
        element("h2", "Logs"),
        log,
        element("pre", id="log", class_="lines", tabindex=0, hidden=True),
        token=token,
    )


def _search_parts(searches: Searches, job: JobRecord, token: TokenRecord) -> list[Child]:
    told = searches.describe(job)
    state: list[Child] = [_badge(job.state)]
    if told["waits_for"]:
        state.append(f" waits for {told['waits_for']}")
    if job.is_cancel_asked and job.state == "running":
        state.append(" is being cancelled")
    elif job.state in ("queued", "running") and may_write(token):
        form = element(
            "form", element("button", "Cancel"), class_="inline", method="post", action=f"/searches/{job.id}/cancel"
        )
        state += [" ", form]
    parts: list[Child] = [element("div", state)]
    if job.problem is not None:
        parts.append(_error(AutotuneError(str(job.problem.get("message")), str(job.problem.get("hint") or ""))))
    if searches.store.study(job.study) is None:
        parts.append(element("p", "No trial has begun yet. This page shows each as it ends.", class_="empty"))
        return parts
    report = searches.report(job)
    parts += report_sections(report)
    if job.state in ENDED and report.best is not None:
        parts.append(_exports(report, job))
    return parts


def _exports(report: Report, job: JobRecord) -> Markup:
    made = make_export(report)
    shown = [
        element(
            "details",
            element("summary", f"As {name}"),
            element("pre", element("code", render(made, form).rstrip(), id=f"export-{form}"), tabindex=0),
            element("button", f"Copy as {name}", type="button", data_copy=f"export-{form}"),
        )
        for form, name in _EXPORTS
    ]
    links = [
        element("a", "the report as a page", href=f"/v1/searches/{job.id}/report?format=html"),
        ", ",
        element("a", "as JSON", href=f"/v1/searches/{job.id}/report"),
        ", ",
        element("a", "compare with another", href=f"/compare?a={quote(job.id)}"),
    ]
    return element("section", element("h2", "Take it away"), shown, element("p", links))


# Comparing


def _compare_page(searches: Searches, token: TokenRecord, a: str, b: str) -> HTMLResponse:
    known = searches.store.queue.jobs(states=["finished"], most=200)
    options = [element("option", value=job.study) for job in known]
    fields = [
        element("label", name, element("input", name_=key, value=value or None, list="studies", required=True))
        for key, name, value in (("a", "One search", a), ("b", "Another", b))
    ]
    form = element(
        "form",
        fields,
        element("datalist", options, id="studies"),
        element("div", element("button", "Compare", class_="main"), class_="wide"),
        class_="search",
    )
    shown: Child = element("p", "Name two searches that have ended.", class_="empty")
    if a and b:
        try:
            shown = _comparison([searches.report(searches.job(name)) for name in (a, b)])
        except AutotuneError as error:
            shown = _error(error)
    return _page("Compare", element("h1", "Compare two searches"), form, shown, token=token)


def _comparison(reports: Sequence[Report]) -> Markup:
    def cells(report: Report) -> list[str]:
        best, speed, measured = report.best, report.speed(report.best), report.pooled(report.best)
        speedup = report.speedup()
        return [
            str(report.workload["model"]),
            str(report.environment["device_name"]),
            format_bytes(report.ceiling.cap_bytes),
            best.candidate.describe() if best else "none",
            f"{format_rate(speed.samples_per_second)} samples/s" if speed else "",
            f"{speedup:.2f} ×" if speedup else "",
            format_bytes(measured.peak_reserved_bytes) if measured else "",
            str(len(report.trials)),
        ]

    names = ("model", "device", "ceiling", "best", "speed", "against the baseline", "peak reserved", "trials")
    columns = [cells(report) for report in reports]
    rows = [
        element("tr", element("th", name, scope="row"), [element("td", column[place]) for column in columns])
        for place, name in enumerate(names)
    ]
    return _table(("", *(report.study.name for report in reports)), rows)


# Requests


def _asked(form: Mapping[str, Any]) -> Document:
    """Return a form's fields as a request, each read as the command line reads it."""
    found: Document = {}
    for name, _, _ in (*_FIELDS, *_MORE_FIELDS):
        text = str(form.get(name) or "").strip()
        if text:
            try:
                value = BY_NAME[name].kind.read(text)
            except ValueError as error:
                raise InvalidRequestError(f"{name.replace('_', ' ')}: {error}", "correct it in the form") from error
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _command(form: Mapping[str, Any]) -> str:
    """Return the command that asks for the same as a form."""
    words = ["autotune", "search"]
    for name, _, _ in (*_FIELDS, *_MORE_FIELDS):
        text = str(form.get(name) or "").strip()
        if text and name != "priority":
            words += [BY_NAME[name].parameter, text]
    return shlex.join(words)


def _asset(name: str) -> str:
    return importlib.resources.files("autotune.service").joinpath("assets", name).read_text(encoding="utf-8")


_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#1f5fc4"/>'
    '<path d="M3 12 7 6l3 3 3-5" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)
_ASSETS: dict[str, tuple[str, Callable[[], str]]] = {
    "report.css": ("text/css", lambda: STYLE),
    "page.css": ("text/css", lambda: _asset("page.css")),
    "page.js": ("text/javascript", lambda: _asset("page.js")),
    "icon.svg": ("image/svg+xml", lambda: _ICON),
}


def _visitor(request: Request) -> TokenRecord | None:
    return access_of(request).identify(request)


Visitor = Annotated[TokenRecord | None, Depends(_visitor)]


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form that was posted, without a further library for it."""
    from urllib.parse import parse_qsl

    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True))


def add_pages(app: FastAPI) -> None:
    """Add the pages to the application."""

    @app.get("/assets/{name}", include_in_schema=False)
    def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise ServiceError("there is no such file", "see the page", status=404)
        kind, read = _ASSETS[name]
        return Response(read(), media_type=kind, headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    def home(request: Request, visitor: Visitor) -> Response:
        if visitor is None:
            return _sign_in()
        return _home(searches_of(request), visitor, request.query_params, None)

    @app.post("/session", include_in_schema=False)
    async def begin_session(request: Request) -> Response:
        token = (await _fields(request)).get("token", "").strip()
        address = request.client.host if request.client else ""
        found = await run_in_threadpool(access_of(request).check, token, address)
        if found is None:
            return _sign_in(ServiceError("this token is not known", "see what autotune serve printed", status=401))
        answer = RedirectResponse("/", 303)
        is_tls = request.url.scheme == "https"
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_tls, max_age=30 * 24 * 3600)
        return answer

    @app.post("/session/end", include_in_schema=False)
    def end_session() -> Response:
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @app.get("/command", include_in_schema=False)
    def command(request: Request, token: Reader) -> Response:
        try:
            _asked(request.query_params)
        except AutotuneError as error:
            return PlainTextResponse(f"{error.message}; {error.hint}")
        return PlainTextResponse(_command(request.query_params))

    @app.post("/searches", include_in_schema=False)
    async def submit(request: Request, token: Writer, searches: Known) -> Response:
        form = await _fields(request)
        try:
            job, _ = await run_in_threadpool(searches.submit, _asked(form), by=token.name)
        except AutotuneError as error:
            return await run_in_threadpool(_home, searches, token, form, error)
        return RedirectResponse(f"/searches/{job.id}", 303)

    @app.get("/searches/{search}", include_in_schema=False)
    def show(search: str, visitor: Visitor, searches: Known) -> Response:
        if visitor is None:
            return _sign_in()
        try:
            return _search_page(searches, searches.job(search), visitor)
        except AutotuneError as error:
            page = _page("Not found", element("h1", "There is nothing here"), _error(error), token=visitor)
            page.status_code = problem_document(error)[0]
            return page

    @app.post("/searches/{search}/cancel", include_in_schema=False)
    def cancel(search: str, token: Writer, searches: Known) -> Response:
        return RedirectResponse(f"/searches/{searches.cancel(searches.job(search)).id}", 303)

    @app.get("/compare", include_in_schema=False)
    def compare(visitor: Visitor, searches: Known, a: str = "", b: str = "") -> Response:
        return _sign_in() if visitor is None else _compare_page(searches, visitor, a, b)

    @app.get("/parts/home", include_in_schema=False)
    def home_parts(token: Reader, searches: Known) -> HTMLResponse:
        return HTMLResponse("".join(_home_parts(searches, token)))

    @app.get("/parts/searches/{search}", include_in_schema=False)
    def search_parts(search: str, token: Reader, searches: Known) -> HTMLResponse:
        return HTMLResponse(element("div", _search_parts(searches, searches.job(search), token)))

    @app.get("/v1/events", tags=["searches"], response_class=EventSourceResponse)
    async def changes(token: Reader, searches: Known) -> AsyncIterator[ServerSentEvent]:
        """Stream an event ``changed`` whenever the queue or the agents changed."""
        while not searches.is_closing:
            ticket = searches.bell.ticket(ANY_CHANGE)
            yield ServerSentEvent(event="changed", data={})
            # A busy queue changes more often than anybody wants to look.
            await asyncio.sleep(_PAUSE_SECONDS)
            await wait_for(ticket, _POLL_SECONDS)
