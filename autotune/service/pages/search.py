"""Show one search: what was asked, its running trial, its trials, the best so far or the result, and the exports."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.core.units import format_seconds
from autotune.results.export import beside_lines, make_export, render
from autotune.results.forms import Format
from autotune.results.html import study_page
from autotune.results.report import Report
from autotune.results.wording import rate_unit
from autotune.service.access import Known, Reader, Submitter, Writer
from autotune.service.pages import frame
from autotune.service.pages.form import command_of, fields_of, not_in_fields, on_command_line, request_again
from autotune.service.pages.frame import Visitor, error_page, rendered_of
from autotune.service.pages.home import Row
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches, may_change
from autotune.store.queue import ENDED, JobRecord, TokenRecord
from autotune.store.records import Repeats

_EXPORTS: tuple[tuple[Format, str], ...] = (("json", "JSON"), ("cli", "flags"), ("python", "Python"))

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search}")
def show(request: Request, search: str, visitor: Visitor, searches: Known) -> Response:
    """Show the page of a search."""
    try:
        job = searches.job(search)
        parts = _render_parts(searches, job, visitor, str(request.base_url))
    except AutotuneError as error:
        return error_page(error, visitor)
    return frame.page("search.html", token=visitor, job=job, parts=parts)


@router.post("/searches/{search}/cancel")
def cancel(search: str, token: Writer, searches: Known) -> Response:
    """Cancel a search."""
    return RedirectResponse(f"/searches/{searches.cancel(searches.job(search), token).id}", 303)


@router.post("/searches/{search}/again")
def again(search: str, token: Submitter, searches: Known) -> Response:
    """Queue the search again: measured anew after a result, or if it is another's; else continued."""
    job = searches.job(search)
    if VERIFIES in job.request:
        same = {"study": job.request[VERIFIES], "steps": job.request.get("steps"), "priority": job.priority}
        made, _ = searches.submit_verification(same, by=token.name)
    else:
        continues = job.state != "finished" and may_change(token, job)
        made, _ = searches.submit(request_again(job, continues=continues), by=token)
    return RedirectResponse(f"/searches/{made.id}", 303)


@router.post("/searches/{search}/verify")
def verify(search: str, token: Submitter, searches: Known) -> Response:
    """Queue the run of a stock ``Trainer``."""
    job, _ = searches.submit_verification({"study": searches.job(search).study}, by=token.name)
    return RedirectResponse(f"/searches/{job.id}", 303)


@router.get("/parts/searches/{search}")
async def parts(request: Request, search: str, token: Reader, searches: Known) -> HTMLResponse:
    """Return the changing parts of a search's page."""
    # The part depends on all of these: buttons on the token, and the shown command on the URL.
    url = str(request.base_url)
    key = f"{token.role} {token.name} {url} {search}"
    return HTMLResponse(
        await rendered_of(request).get(key, lambda: _render_parts(searches, searches.job(search), token, url))
    )


def _asked(job: JobRecord, url: str) -> dict[str, object]:
    """Return what is shown of a job's request: command, options, link to the filled-in form, needs that both lack."""
    fields = fields_of(job)
    told = {name: text for name, text in fields.items() if name not in ("model", "code", "study")}
    options = [on_command_line(name, text) for name, text in told.items()]
    fields.pop("study", None)
    clone = f"/?{urlencode(fields)}"
    return {"command": command_of(fields, url), "options": options, "clone": clone, "left_out": not_in_fields(job)}


def _render_parts(searches: Searches, job: JobRecord, token: TokenRecord, url: str) -> Markup:
    """Render the changing parts of a search's page, for the rights of a token and the service's ``url``."""
    is_verification = VERIFIES in job.request
    report = None if is_verification or searches.store.study(job.study) is None else searches.report(job)
    has_result = report is not None and job.state in ENDED and report.best is not None
    exported = make_export(report) if report is not None and has_result else None
    # The verification to show: this job, or the latest one of the study's winner.
    run = job if is_verification else None
    if has_result:
        run = latest_run(searches, job.study)
    return frame.render(
        "search_parts.html",
        job=job,
        row=Row(job, ""),
        waits_for=searches.describe(job)["waits_for"] if job.state == "queued" else None,
        may_change=may_change(token, job),
        may_write=token.may_write,
        has_ended=job.state in ENDED,
        verifies=job.request.get(VERIFIES),
        asked=None if is_verification else _asked(job, url),
        shown=None if report is None else study_page(_with_best_so_far(report)),
        to_come=_remaining_words(job, report),
        exports=[(form, name, render(exported, form).rstrip()) for form, name in _EXPORTS]
        if exported is not None
        else None,
        beside=beside_lines(exported) if exported is not None else (),
        run=run,
        run_ended=run is None or run.state in ENDED,
        proof=searches.verification(run) if run is not None else None,
        rate_unit=rate_unit(_workload(searches, run)) if run is not None else None,
    )


def _remaining_words(job: JobRecord, report: Report | None) -> str | None:
    """Return a sentence on the remaining trials and time of a running search; ``None`` for others."""
    if job.state != "running" or report is None:
        return None
    most, budget = job.request.get("trials"), job.request.get("time_budget")
    told = [f"{_trials_spent(report)} of at most {most} trials"] if most else []
    study = report.study
    if budget and job.attempts == 1 and job.started_at is not None and study.started_at >= job.started_at:
        told.append(f"no trial starts after {study.started_at + timedelta(seconds=budget):%Y-%m-%d %H:%M} UTC")
    elif budget:
        # The study was continued: time spent before counts, the pause between does not, so that no end can be told.
        told.append(f"at least {format_seconds(study.seconds)} of at most {format_seconds(budget)} are spent")
    if told:
        return f"{'; '.join(told)}. It ends earlier where nothing that is left can be faster."
    return f"{len(report.trials)} trials so far. It ends when nothing that is left can be faster."


def _trials_spent(report: Report) -> int:
    """Return the number of trials charged to the budget: without reused ones, and disturbed ones that were repeated."""
    trials, repeats = [trial for trial in report.trials if not report.is_elsewhere(trial)], Repeats()
    for trial in trials:
        if trial.outcome is not None:
            repeats.take(trial)
    return len(trials) - repeats.excused - sum(trial.stage == "reused" for trial in trials)


def _with_best_so_far(report: Report) -> Report:
    """Return the report; that of a running study gets its leading trial as the best, if it has one."""
    if report.best is not None or report.study.state != "running":
        return report
    searched = {trial.candidate for trial in report.trials if trial.stage != "baseline"}
    history = report.history
    tried = history.answer(report.study.request["objective"], searched) or history.winner()
    if tried is None:
        return report
    return dataclasses.replace(report, study=dataclasses.replace(report.study, best_trial_id=tried.trial_id))


def latest_run(searches: Searches, study: str) -> JobRecord | None:
    """Return the latest verification of a study; ``None`` without any."""
    # A search may have such a name, too.
    named = searches.store.queue.jobs(study=f"verify {study}")
    return next((job for job in named if VERIFIES in job.request), None)


def _workload(searches: Searches, run: JobRecord) -> Document:
    """Return the workload of a verified study; an empty dictionary where the study is gone."""
    study = searches.store.study(run.request[VERIFIES])
    return searches.store.workload_of(study) if study is not None else {}
