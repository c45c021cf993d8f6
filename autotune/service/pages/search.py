"""Show one search: its running trial, its trials, the best so far or the result, and the exports."""

from __future__ import annotations

import dataclasses
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from autotune.core.errors import AutotuneError
from autotune.results.export import Format, beside_lines, make_export, render
from autotune.results.html.markup import Child, Markup, element
from autotune.results.html.page import report_sections
from autotune.results.report import Report
from autotune.service.access import Known, Reader, Submitter, Writer
from autotune.service.pages.frame import Visitor, badge, error_box, error_page, page, sign_in_page
from autotune.service.pages.proof import proof_section, verification_result
from autotune.service.pages.rendered import rendered_of
from autotune.service.searches import Searches, may_change
from autotune.service.verifications import VERIFIES
from autotune.store.queue import ENDED, JobRecord, TokenRecord
from autotune.store.records import TrialRecord

_EXPORTS: tuple[tuple[Format, str], ...] = (("json", "JSON"), ("cli", "flags"), ("python", "Python"))

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search}")
def show(search: str, visitor: Visitor, searches: Known) -> Response:
    """Show the page of a search, or ask for a token."""
    if visitor is None:
        return sign_in_page()
    try:
        return _search_page(searches, searches.job(search), visitor)
    except AutotuneError as error:
        return error_page(error, visitor)


@router.post("/searches/{search}/cancel")
def cancel(search: str, token: Writer, searches: Known) -> Response:
    """Cancel a search."""
    return RedirectResponse(f"/searches/{searches.cancel(searches.job(search), token).id}", 303)


@router.post("/searches/{search}/verify")
def verify(search: str, token: Submitter, searches: Known) -> Response:
    """Queue the run of a stock ``Trainer``."""
    job, _ = searches.submit_verification({"study": searches.job(search).study}, by=token.name)
    return RedirectResponse(f"/searches/{job.id}", 303)


@router.get("/parts/searches/{search}")
async def parts(request: Request, search: str, token: Reader, searches: Known) -> HTMLResponse:
    """Return what changes of the page."""
    # Whoever may start searches sees buttons that others do not.
    key = f"{token.role} {token.name} {search}"
    return HTMLResponse(await rendered_of(request).get(key, lambda: _parts(searches, searches.job(search), token)))


def _search_page(searches: Searches, job: JobRecord, token: TokenRecord) -> HTMLResponse:
    path = f"/searches/{job.id}"
    dialog = element(
        "dialog",
        element("h2", "Log", id="log-title"),
        element("pre", id="log", class_="lines", tabindex=0, role="region", aria_labelledby="log-title"),
        element("form", element("button", "Close", class_="main"), method="dialog"),
        id="log-dialog",
        aria_labelledby="log-title",
    )
    return page(
        job.study,
        element("h1", job.study),
        element("p", id="now", class_="now soft"),
        element("div", _parts(searches, job, token), data_part=f"/parts{path}", data_events=f"/v1{path}/events"),
        element(
            "section",
            element("h2", "What the search says", id="lines-title"),
            element("pre", id="lines", class_="lines", tabindex=0, role="region", aria_labelledby="lines-title"),
            id="told",
            hidden=True,
        ),
        dialog,
        token=token,
    )


def _parts(searches: Searches, job: JobRecord, token: TokenRecord) -> list[Child]:
    found: list[Child] = [element("div", _state(searches, job, token), class_="state")]
    if job.problem is not None:
        found.append(error_box(AutotuneError(str(job.problem.get("message")), str(job.problem.get("hint") or ""))))
    if (study := job.request.get(VERIFIES)) is not None:
        link = element("a", str(study), href=f"/searches/{quote(str(study), safe='')}")
        return [*found, element("p", "A stock Trainer trains as the search ", link, " exports it."),
                element("section", verification_result(searches, job))]  # fmt: skip
    if searches.store.study(job.study) is None:
        if job.state not in ENDED:
            found.append(element("p", "No trial has begun yet. This page shows each as it ends.", class_="empty"))
        return found
    report = searches.report(job)

    def log_link(trial: TrialRecord) -> Child:
        if trial.log_path is None:
            return None
        told = f"Log of trial {trial.number}"
        path = f"/v1/searches/{job.id}/trials/{trial.number}/log"
        return element("a", "Log", href=path, data_log=told, aria_label=told)

    sections = report_sections(_with_best_so_far(report), log_link)
    if job.state in ENDED and report.best is not None:
        # After the answer and the chart of the trials.
        sections[2:2] = [_exports(report, job), proof_section(searches, report, job, token)]
    return [*found, *sections]


def _state(searches: Searches, job: JobRecord, token: TokenRecord) -> list[Child]:
    state: list[Child] = [badge(job.state)]
    if job.state == "queued":
        state.append(f" {searches.waits_for(job)}")
    if job.is_cancel_asked and job.state == "running":
        state.append(" is being cancelled")
    elif job.state in ("queued", "running") and may_change(token, job):
        button = element("button", "Cancel", data_busy="Cancelling …")
        action = f"/searches/{job.id}/cancel"
        state += [" ", element("form", button, class_="inline", method="post", action=action)]
    return state


def _with_best_so_far(report: Report) -> Report:
    """Return the report of a study that runs with the trial that leads now as its best."""
    if report.best is not None or report.study.state != "running":
        return report
    searched = {trial.candidate for trial in report.trials if trial.stage != "baseline"}
    history = report.history
    tried = history.largest(searched) if report.study.request["objective"] == "max-batch" else history.winner(searched)
    tried = tried or history.winner()
    if tried is None:
        return report
    return dataclasses.replace(report, study=dataclasses.replace(report.study, best_trial_id=tried.trial_id))


def _exports(report: Report, job: JobRecord) -> Markup:
    made = make_export(report)
    buttons = [
        element("button", f"Copy as {name}", type="button", data_copy=f"export-{form}") for form, name in _EXPORTS
    ]
    shown = [
        element(
            "details",
            element("summary", f"Show as {name}"),
            element(
                "pre",
                element("code", render(made, form).rstrip(), id=f"export-{form}"),
                tabindex=0,
                role="region",
                aria_label=f"The configuration as {name}",
            ),
        )
        for form, name in _EXPORTS
    ]
    links = [
        element("a", "The report as a page", href=f"/v1/searches/{job.id}/report?format=html"),
        element("a", "as JSON", href=f"/v1/searches/{job.id}/report"),
        element("a", "compare with another search", href=f"/compare?a={quote(job.id)}"),
    ]
    notes = beside_lines(made)
    return element(
        "section",
        element("h2", "Take it away"),
        element("p", buttons, class_="buttons"),
        shown,
        element("ul", [element("li", line) for line in notes], class_="soft") if notes else None,
        element("p", [[", " if place else "", link] for place, link in enumerate(links)]),
    )
