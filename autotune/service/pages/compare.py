"""Compare two searches that have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from autotune.core.errors import AutotuneError
from autotune.core.outcome import Measurement
from autotune.core.units import format_bytes, format_rate, format_seconds
from autotune.estimate.bottleneck import describe_limit
from autotune.results.expert import expert_of
from autotune.results.html.markup import Child, Markup, element
from autotune.results.json_document import report_document
from autotune.results.report import Report
from autotune.results.study_view import study_view
from autotune.results.wording import times
from autotune.service.access import Known
from autotune.service.pages.frame import Visitor, error_box, page, sign_in_page, table
from autotune.service.searches import Searches
from autotune.service.verifications import VERIFIES
from autotune.store.queue import TokenRecord

router = APIRouter(include_in_schema=False)


@router.get("/compare")
def compare(visitor: Visitor, searches: Known, a: str = "", b: str = "") -> Response:
    """Show two searches side by side, or ask which."""
    return sign_in_page() if visitor is None else _compare_page(searches, visitor, a, b)


def _compare_page(searches: Searches, token: TokenRecord, a: str, b: str) -> HTMLResponse:
    finished = searches.store.queue.jobs(states=["finished"], most=200)
    known = [job for job in finished if VERIFIES not in job.request]
    names = {job.id: job.study for job in known}
    fields = [
        element(
            "label",
            name,
            element("input", name_=key, value=names.get(value, value) or None, list="studies", required=True),
        )
        for key, name, value in (("a", "One search", a), ("b", "Another", b))
    ]
    form = element(
        "form",
        fields,
        element("datalist", [element("option", value=job.study) for job in known], id="studies"),
        element("div", element("button", "Compare", class_="main"), class_="wide"),
        class_="search",
    )
    none = "Name two searches that have ended." if known else "No search has ended yet; there is nothing to compare."
    shown: Child = element("p", none, class_="empty")
    if a and b:
        try:
            shown = _comparison([searches.report(searches.job(name)) for name in (a, b)])
        except AutotuneError as error:
            shown = error_box(error)
    return page("Compare", element("h1", "Compare two searches"), form, shown, token=token, current="/compare")


_ROWS: tuple[tuple[str, Callable[[Report], str | None]], ...] = (
    ("model", lambda report: str(report.workload["model"])),
    ("device", lambda report: str(report.environment["device_name"])),
    ("ceiling", lambda report: format_bytes(report.ceiling.cap_bytes)),
    ("best", lambda report: report.best.candidate.describe() if report.best else "none"),
    ("speed", lambda report: _speed(report)),
    ("next run, 95 %", lambda report: _next_run(report)),
    ("optimizer step", lambda report: _measured(report, lambda m: format_seconds(m.step_seconds))),
    ("against the baseline", lambda report: _speedup(report)),
    ("against an expert", lambda report: _over_expert(report)),
    ("peak reserved", lambda report: _measured(report, lambda m: format_bytes(m.peak_reserved_bytes))),
    ("what limits a step", lambda report: _limit(report)),
    ("trials", lambda report: str(len(report.trials))),
)


def _speed(report: Report) -> str | None:
    speed = report.speed(report.best)
    return f"{format_rate(speed.samples_per_second)} samples/s" if speed else None


def _speedup(report: Report) -> str | None:
    speedup = report.speedup()
    return times(speedup) if speedup is not None else None


def _over_expert(report: Report) -> str | None:
    expert = expert_of(report)
    return times(expert.speedup) if expert is not None and expert.speedup is not None else None


def _measured(report: Report, tell: Callable[[Measurement], str]) -> str | None:
    measured = report.pooled(report.best)
    return tell(measured) if measured is not None else None


def _next_run(report: Report) -> str | None:
    promised = report_document(study_view(report))["next_run"]
    if promised is None:
        return None
    low, high = promised["samples_per_second_low"], promised["samples_per_second_high"]
    return f"{format_rate(low)} to {format_rate(high)} samples/s"


def _limit(report: Report) -> str | None:
    best, measured = report.best, report.pooled(report.best)
    return describe_limit(best.candidate, measured) if best is not None and measured is not None else None


def _comparison(reports: Sequence[Report]) -> list[Markup]:
    rows = []
    for name, cell in _ROWS:
        told = [cell(report) or "" for report in reports]
        if not any(told):
            continue
        cells = [element("td", text) for text in told]
        rows.append(
            element("tr", element("th", name, scope="row"), cells, class_="differs" if len(set(told)) > 1 else None)
        )
    head = ("", *(report.study.name for report in reports))
    return [_verdict(reports), table("the two searches", head, rows)]


def _verdict(reports: Sequence[Report]) -> Markup:
    one, other = (report.speed(report.best) for report in reports)
    names = [report.study.name for report in reports]
    if one is None or other is None:
        told = "At least one of them has no result."
    elif one.samples_per_second == other.samples_per_second:
        told = "Both are as fast."
    else:
        if one.samples_per_second < other.samples_per_second:
            one, other, names = other, one, names[::-1]
        told = f"{names[0]} is {times(one.samples_per_second / other.samples_per_second)} as fast as {names[1]}."
    return element("p", element("strong", told), class_="verdict")
