"""Show whether a stock ``Trainer`` kept what a search promised, and ask for such a run."""

from __future__ import annotations

from typing import Any

from autotune.core.errors import AutotuneError
from autotune.core.units import format_bytes, format_rate
from autotune.results.html.markup import Child, Markup, element
from autotune.results.json_document import report_document
from autotune.results.report import Report
from autotune.results.study_view import study_view
from autotune.service.pages.frame import badge, error_box, table
from autotune.service.searches import Searches
from autotune.service.tokens import may_write
from autotune.service.verifications import VERIFIES
from autotune.store.queue import ENDED, JobRecord, TokenRecord

_VERDICTS = {
    "kept": "Kept: a stock Trainer does what was promised.",
    "missed": "Missed: a stock Trainer does not do what was promised.",
    "faster": "Faster than promised: the search measured too low.",
    "cannot_tell": "Cannot tell: the run was too short or too uneven.",
}


def proof_section(searches: Searches, report: Report, job: JobRecord, token: TokenRecord) -> Markup:
    """Say what the figures rest on, what a verification has shown, and let one be asked for."""
    promised = report_document(study_view(report))["next_run"]
    count = promised["processes_measured"] if promised else 0
    processes = "a process of its own" if count == 1 else f"{count or 'several'} processes"
    told = (
        f"Measured on real optimizer steps of a Trainer, in {processes}; the interval contains what differs between "
        "processes."
    )
    # A search may bear the same name.
    named = searches.store.queue.jobs(study=f"verify {report.study.name}")
    latest = next((each for each in named if VERIFIES in each.request), None)
    parts: list[Child] = []
    if latest is not None:
        link = element("a", "The run of a stock Trainer", href=f"/searches/{latest.id}")
        parts = [element("p", link, ": ", badge(latest.state)), verification_result(searches, latest)]
    if may_write(token) and (latest is None or latest.state in ENDED):
        button = element("button", "Have a stock Trainer show the same", data_busy="Queueing …")
        parts.append(element("form", button, method="post", action=f"/searches/{job.id}/verify"))
    return element("section", element("h2", "Proof"), element("p", told), parts)


def verification_result(searches: Searches, job: JobRecord) -> Child:
    """Render what a verification has shown; nothing where it has shown nothing yet."""
    shown = searches.verification(job)
    if shown is None:
        return None
    document: dict[str, Any] = shown.get("verification") or {}
    verdict = str(document.get("verdict") or "")
    parts: list[Child] = [element("p", element("strong", _VERDICTS.get(verdict, verdict)))]
    if (missed := shown.get("problem")) is not None:
        parts.append(error_box(AutotuneError(str(missed.get("message")), str(missed.get("hint") or ""))))
    parts += [element("p", str(line), class_="soft") for line in document.get("why") or ()]
    promised, obtained = document.get("promised"), document.get("obtained")
    if promised and obtained:
        rows = [
            element("tr", element("th", name, scope="row"), element("td", _speed(one)), element("td", _peak(one)))
            for name, one in (("promised", promised), ("stock Trainer", obtained))
        ]
        parts.append(table("what was promised and what came", ("", "samples/s", "peak reserved"), rows))
    return parts


def _speed(told: dict[str, Any]) -> str:
    mean, low, high = (told.get(f"samples_per_second{name}") for name in ("", "_low", "_high"))
    if mean is None:
        return ""
    between = f" ({format_rate(low)} to {format_rate(high)})" if low is not None and high is not None else ""
    return format_rate(mean) + between


def _peak(told: dict[str, Any]) -> str:
    peak = told.get("peak_reserved_bytes")
    return format_bytes(peak) if peak is not None else ""
