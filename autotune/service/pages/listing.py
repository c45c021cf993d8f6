"""List searches: filtered, sorted, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from autotune.core.units import format_seconds
from autotune.service.access import Known
from autotune.service.pages.frame import Visitor, page, sign_in_page
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches, waits_for
from autotune.store.queue import ENDED, JobOrder, JobRecord, JobState, TokenRecord

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


@dataclass(frozen=True)
class Row:
    """A search in a list."""

    job: JobRecord
    told: str
    """What it does, waits for, or came to."""

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
        match job.state:
            case "queued":
                return waits_for(job, hosts, ahead[job.id])
            case "running":
                host = (job.device or {}).get("host")
                return str((job.status or {}).get("running") or (f"starts on {host}" if host else "starts"))
        return str(job.problem.get("message") or "") if job.problem is not None else results.get(job.id, "")

    return [Row(job, told(job)) for job in jobs]


@router.get("/searches")
def listing(
    visitor: Visitor, searches: Known, state: Chosen = "all",
    find: Annotated[str, Query(max_length=200)] = "", sort: JobOrder = "submitted", up: bool = False,
    place: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> Response:  # fmt: skip
    """Show searches of a state whose name, owner, model or device contains a text, in an order."""
    asked: dict[str, Any] = {"state": state, "find": find, "sort": sort, "up": up}
    return sign_in_page() if visitor is None else _listing_page(searches, visitor, asked, place)


def _listing_page(searches: Searches, token: TokenRecord, asked: dict[str, Any], place: int) -> HTMLResponse:
    found = searches.store.queue.listed(
        states=_STATES[asked["state"]],
        containing=asked["find"].strip(),
        order=asked["sort"],
        is_ascending=asked["up"],
        skip=(place - 1) * _MOST_SHOWN,
        most=_MOST_SHOWN + 1,
    )

    def url(**changes: Any) -> str:
        return f"/searches?{urlencode({**asked, **changes})}"

    return page(
        "searches.html",
        token=token,
        rows=rows_of(searches, found[:_MOST_SHOWN]),
        asked=asked,
        states=list(_STATES),
        url=url,
        place=place,
        has_more=len(found) > _MOST_SHOWN,
    )
