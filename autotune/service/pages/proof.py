"""Collect whether a stock ``Trainer`` kept what a search promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError
from autotune.results.wording import rate_unit
from autotune.service.searches import Searches
from autotune.service.verifications import VERIFIES
from autotune.store.queue import JobRecord

_VERDICTS = {
    "kept": "Kept: a stock Trainer does what was promised.",
    "missed": "Missed: a stock Trainer does not do what was promised.",
    "faster": "Faster than promised: the search measured too low.",
    "cannot_tell": "Cannot tell: the run was too short or too uneven.",
}

_SPEED = "samples_per_second"


@dataclass(frozen=True)
class Shown:
    """What the run of a stock ``Trainer`` has shown."""

    verdict: str
    missed: AutotuneError | None
    why: tuple[str, ...]
    compared: tuple[tuple[str, Document], ...]
    """What was promised and what came, with their names."""
    rate_unit: str
    """Of both speeds."""


def latest_run(searches: Searches, study: str) -> JobRecord | None:
    """Return the latest run of a stock ``Trainer`` as a study exports it."""
    # A search may bear the same name.
    named = searches.store.queue.jobs(study=f"verify {study}")
    return next((job for job in named if VERIFIES in job.request), None)


def shown_by(searches: Searches, job: JobRecord) -> Shown | None:
    """Return what a verification has shown; ``None`` where it has shown nothing yet."""
    told = searches.verification(job)
    if told is None:
        return None
    study = searches.store.study(job.request[VERIFIES])
    unit = rate_unit(searches.store.workload_of(study) if study is not None else {})
    document: dict[str, Any] = told.get("verification") or {}
    verdict, missed = str(document.get("verdict") or ""), told.get("problem")
    both = [(name, document.get(key)) for name, key in (("promised", "promised"), ("stock Trainer", "obtained"))]
    return Shown(
        _VERDICTS.get(verdict, verdict),
        None if missed is None else AutotuneError(str(missed.get("message")), str(missed.get("hint") or "")),
        tuple(map(str, document.get("why") or ())),
        tuple((name, one) for name, one in both if one) if all(one and _SPEED in one for _, one in both) else (),
        unit,
    )
