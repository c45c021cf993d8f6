"""List searches: those of a state, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from autotune.results.html.markup import Markup, element
from autotune.service.access import Known
from autotune.service.pages.frame import Visitor, badge, page, sign_in_page, table
from autotune.service.searches import Searches, waits_for
from autotune.service.verifications import VERIFIES
from autotune.store.queue import ENDED, JobRecord, JobState, TokenRecord

# Each that has ended is looked up when it is shown first, some milliseconds each.
_MOST_SHOWN = 50
# What a request names as its training, in this order.
_WHAT = ("model", "code", VERIFIES)
Chosen = Literal["all", "queued", "running", "ended"]
_STATES: dict[Chosen, tuple[JobState, ...]] = {
    "all": (),
    "queued": ("queued",),
    "running": ("running",),
    "ended": ENDED,
}

router = APIRouter(include_in_schema=False)


@router.get("/searches")
def listing(
    visitor: Visitor, searches: Known, state: Chosen = "all",
    before: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> Response:  # fmt: skip
    """Show the newest searches of a state, or those before one."""
    return sign_in_page() if visitor is None else _listing_page(searches, visitor, state, before)


def _listing_page(searches: Searches, token: TokenRecord, state: Chosen, before: int | None) -> HTMLResponse:
    queue, hosts = searches.store.queue, searches.runner.hosts()
    found = queue.jobs(states=_STATES[state], before=before, most=_MOST_SHOWN + 1)
    jobs = found[:_MOST_SHOWN]
    ahead = queue.ahead_of([job for job in jobs if job.state == "queued"])
    told = how_they_ended(searches, [job for job in jobs if job.state in ENDED])
    for job in jobs:
        if job.state == "queued":
            told[job.id] = waits_for(job, hosts, ahead[job.id])
        elif job.state == "running":
            told[job.id] = what_runs(job)
    links = [
        element("a", name, href=f"/searches?state={name}", aria_current="page" if name == state else None)
        for name in _STATES
    ]
    older = urlencode({"state": state, "before": jobs[-1].number}) if len(found) > len(jobs) else None
    return page(
        "All searches",
        element("h1", "All searches"),
        element("nav", [[" ", link] for link in links], aria_label="States"),
        searches_table("searches, the newest first", "what it does, waits for, or came to", jobs, told)
        if jobs
        else element("p", "There is no such search.", class_="empty"),
        element("p", element("a", "Older searches", href=f"/searches?{older}")) if older else None,
        token=token,
    )


def searches_table(what: str, last: str, jobs: Sequence[JobRecord], told: Mapping[str, str]) -> Markup:
    """Render searches; ``what`` names the table, ``last`` the column of what is told of each, by its id."""
    rows = [
        element(
            "tr",
            element("td", element("a", job.study, href=f"/searches/{job.id}"), class_="search-name"),
            element("td", badge(job.state)),
            element("td", str(next((job.request[name] for name in _WHAT if job.request.get(name)), ""))),
            element("td", told[job.id], class_="told"),
            element("td", f"{job.submitted_at:%Y-%m-%d %H:%M}", class_="nowrap"),
        )
        for job in jobs
    ]
    return table(what, ("search", "state", "model", last, "submitted (UTC)"), rows)


def what_runs(job: JobRecord) -> str:
    """Say what a running search does."""
    host = (job.device or {}).get("host")
    return str((job.status or {}).get("running") or (f"starts on {host}" if host else "starts"))


def how_they_ended(searches: Searches, jobs: Sequence[JobRecord]) -> dict[str, str]:
    """Say what searches that have ended came to, by their ids."""
    results = searches.result_lines(jobs)
    return {
        job.id: str(job.problem.get("message") or "") if job.problem is not None else results.get(job.id, "")
        for job in jobs
    }
