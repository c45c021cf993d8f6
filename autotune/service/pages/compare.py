"""Compare searches that have ended, ranked among those of the same workload and effective batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from markupsafe import Markup

from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.statistics import Estimate, difference
from autotune.core.units import format_next_run, format_rate
from autotune.results.html import IntervalRow, draw_intervals
from autotune.results.study_view import BestView, StudyView
from autotune.results.wording import rate_unit, searched_lines
from autotune.service.access import Known
from autotune.service.pages.frame import Visitor, page
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches
from autotune.store.queue import JobRecord

_MOST_KNOWN = 200
_MOST_COMPARED = 50

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Compared:
    """A search in a comparison, with its study and winner."""

    job: JobRecord
    study: StudyView
    best: BestView


@dataclass(frozen=True)
class Group:
    """Searches of one workload and one effective batch, the fastest first."""

    title: str
    members: tuple[Compared, ...]

    @property
    def rate_unit(self) -> str:
        """The unit of their speeds."""
        return rate_unit(self.members[0].study.report.workload)

    @property
    def log_ratio(self) -> Estimate | None:
        """The logarithm of the first speed over the second; ``None`` without a second search."""
        if len(self.members) < 2:
            return None
        first, second = (each.best.speed.log_sample_seconds for each in self.members[:2])
        return difference(second, first)

    @property
    def has_winner(self) -> bool:
        """Whether the first is significantly faster than the second."""
        ratio = self.log_ratio
        return ratio is not None and abs(ratio.mean) > ratio.half_width()

    @property
    def verdict(self) -> str:
        """A sentence on the fastest search, and whether the difference is significant."""
        log_ratio = self.log_ratio
        if log_ratio is None:
            return "No other search that was chosen has this workload and effective batch, so nothing is ranked."
        first, second = (each.job.study for each in self.members[:2])
        if not self.has_winner:
            return f"{first} and {second} cannot be told apart."
        ratio = math.exp(log_ratio.mean)
        return f"{first} is {ratio:.2f} ± {ratio * log_ratio.half_width():.2f} times as fast as {second}."

    @property
    def drawing(self) -> Markup:
        """The chart of the speeds."""
        return draw_intervals(self.rate_unit, [_interval_row(each, number) for number, each in enumerate(self.members)])


def _interval_row(each: Compared, number: int) -> IntervalRow:
    """Return a search's row in the chart: the interval of its speed; ``number`` selects its colour."""
    speed = each.best.speed
    low, high, unit = *speed.interval(), rate_unit(each.study.report.workload)
    value = f"{format_rate(speed.samples_per_second)}{format_next_run(speed.relative_half_width)}"
    told = f"{each.job.study}: {value} {unit}, next run {format_rate(low)} to {format_rate(high)} (95 %)"
    return IntervalRow(each.job.study, value, told, speed.samples_per_second, low, high, number)


@router.get("/compare")
def compare(
    visitor: Visitor, searches: Known,
    named: Annotated[list[str] | None, Query(alias="s", description="Ids of searches, or names of studies.")] = None,
    like: str = "",
) -> Response:  # fmt: skip
    """Compare the named searches, or all with the same training as ``like``; else let the visitor choose."""
    finished = searches.store.queue.jobs(states=["finished"], most=_MOST_KNOWN)
    known = [job for job in finished if VERIFIES not in job.request]
    error, jobs = None, []
    try:
        jobs = _chosen(searches, known, named or [], like)
        compared, without = _compared(searches, jobs)
    except AutotuneError as problem:
        error, compared, without = problem, [], []
    return page(
        "compare.html",
        token=visitor,
        error=error,
        jobs=jobs,
        known=known,
        groups=_groups(compared),
        without=without,
        most=_MOST_COMPARED,
    )


def _chosen(searches: Searches, known: Sequence[JobRecord], named: Sequence[str], like: str) -> list[JobRecord]:
    """Return the searches to compare, each study once: the named ones, and those of the same training as ``like``."""
    names = list(dict.fromkeys(filter(None, named)))
    if len(names) > _MOST_COMPARED:
        raise InvalidRequestError(f"{len(names)} searches are too many", f"name at most {_MOST_COMPARED}")
    jobs = [searches.job(name) for name in names]
    if like:
        one = searches.job(like)
        jobs += [one, *(job for job in known if _training_key(job) == _training_key(one))]
    # A study that was continued has several jobs, but one result.
    by_study: dict[str, JobRecord] = {}
    for job in jobs:
        by_study.setdefault(job.study, job)
    return list(by_study.values())[:_MOST_COMPARED]


def _training_key(job: JobRecord) -> tuple[object, object]:
    return job.request.get("model"), job.request.get("code")


def _compared(searches: Searches, jobs: Sequence[JobRecord]) -> tuple[list[Compared], list[JobRecord]]:
    """Return the searches with a result, and those without."""
    found, without = [], []
    for job in jobs:
        study = None if searches.store.study(job.study) is None else StudyView(searches.report(job))
        if study is None or study.best is None:
            without.append(job)
        else:
            found.append(Compared(job, study, study.best))
    return found, without


def _groups(compared: Sequence[Compared]) -> list[Group]:
    """Return searches grouped by workload and effective batch, the only ones that are ranked together."""
    groups: dict[tuple[str, int | None, int], list[Compared]] = {}
    for each in compared:
        study = each.study.report.study
        # Equal workloads have the same id. Without an effective batch, searches are grouped by their winners' batch,
        # which is the effective batch where there is one.
        key = study.workload_id, study.request["effective_batch"], each.best.candidate.samples_per_step
        groups.setdefault(key, []).append(each)
    made = [
        Group(
            # The model and its data.
            "; ".join(searched_lines(members[0].study.report)[:2])
            + ("" if effective_batch else f", best at {samples} samples a step"),
            tuple(sorted(members, key=lambda each: -each.best.speed.samples_per_second)),
        )
        for (_, effective_batch, samples), members in groups.items()
    ]
    return sorted(made, key=lambda group: group.title)
