"""Queue, describe, cancel and delete searches; answer a request that was searched before with the earlier result."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, ServiceError, StorageError, UnknownStudyError
from autotune.core.schema import encode
from autotune.core.units import format_rate
from autotune.engine.work import Engine, Host
from autotune.results.json_document import trial_document
from autotune.results.report import Report, load_report
from autotune.results.study_view import trial_view
from autotune.results.wording import rate_unit
from autotune.service.change_events import ChangeEvents
from autotune.service.openapi import SearchDocument
from autotune.service.predictions import Predictions
from autotune.service.requests import (
    VERIFIES,
    Listed,
    Submission,
    canonical,
    check_against,
    choose_study,
    needs_of_study,
    read_needs,
    read_submission,
    read_verification,
)
from autotune.service.runner import Runner, offers_of, unmet
from autotune.store.queue import ENDED, JobRecord, TokenRecord
from autotune.store.repository import Store
from autotune.tuning.run import log_folder
from autotune.verify.target import verifiable_export

log = logging.getLogger("autotune.service")

MOST_QUEUED = 10_000
"""More are refused, so that a client that submits in a loop does not fill the disk."""
_MOST_COMPARED = 20
_SECONDS_BETWEEN_FORGETTING = 3600.0


@dataclass
class Searches:
    """The searches and verifications of one service, which are jobs of its queue."""

    store: Store
    storage: str
    """Where the store is, as ``open_store`` takes it."""
    engine: Engine
    changes: ChangeEvents = field(default_factory=ChangeEvents)
    data_folders: tuple[Path, ...] = ()
    codes: Listed = field(default_factory=dict)
    """The listed code, which requests may name."""
    is_closing: bool = False
    runner: Runner = field(init=False)
    predictions: Predictions = field(init=False)
    _naming: threading.Lock = field(default_factory=threading.Lock)
    """Held while a study's name is chosen and the job is added: one thread at a time."""
    _result_lines: dict[str, str] = field(default_factory=dict)
    """A line for the result of each finished job, by id; kept, since long lists are shown often."""

    def __post_init__(self) -> None:
        self.runner = Runner(self.store, self.storage, self.engine, self.changes, self.codes, self.data_folders)
        self.predictions = Predictions(self.storage, self.data_folders)

    def close(self) -> None:
        """End the predictions and the local searches, and record that these have ended."""
        self.predictions.close()
        self.runner.close()

    # Submitting

    def submit(self, document: Any, *, by: TokenRecord, idempotency_key: str | None = None) -> tuple[JobRecord, bool]:
        """Queue a search; return its job and whether it is new.

        A finished job that answers the same request is returned in place of a new one. With an ``idempotency_key``, the
        job that was submitted with this key is, in any state. Raises an error for a request that cannot be queued.
        """
        submission = read_submission(document, self.data_folders, self.codes)
        if idempotency_key is None:
            known = self._earlier_answer(submission)
        elif (known := self.store.queue.job_with_key(idempotency_key)) is not None:
            # It was accepted before, so the checks below, as of the queue's length, are not made again.
            _check_same(known, submission, idempotency_key)
        if known is not None:
            return known, False
        # One device of each group of equal devices is checked.
        offers = [each for host in self.engine.hosts() for each in offers_of(host)]
        fitting = [alike[0] for offer, alike in offers if offer.meets(submission.needs)]
        check_against(submission, fitting, self.codes)
        self._check_queue_length()
        with self._naming:
            study = choose_study(
                submission, lambda name: bool(self.store.study(name) or self.store.queue.jobs(study=name, most=1))
            )
            if latest := self.store.queue.jobs(study=study, most=1):
                check_may_change(by, latest[0])
            elif by.role != "admin" and self.store.study(study) is not None:
                raise ServiceError(
                    f"the study {study!r} was made on the command line, and belongs to the admins",
                    "use another --study, or ask an admin",
                    status=403,
                )
            return self._add(study, submission, by.name, idempotency_key)

    def submit_verification(
        self, document: Any, *, by: str, idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
        """Queue a verification of a study's speed with a stock ``Trainer``; return its job and whether it is new."""
        submission = read_verification(document)
        study = submission.options[VERIFIES]
        report = load_report(self.store, study)
        # Raises an error where the winner cannot be verified.
        verifiable_export(report)
        self._check_queue_length()
        submission = replace(submission, needs=needs_of_study(report.environment))
        return self._add(f"verify {study}", submission, by, idempotency_key)

    def _add(self, study: str, submission: Submission, by: str, key: str | None) -> tuple[JobRecord, bool]:
        """Add a job to the queue; return it and whether it is new. A known idempotency ``key`` returns its job."""
        options, priority = submission.options, submission.priority
        job, is_new = self.store.queue.submit(
            study, options, submission.needs, priority=priority, submitted_by=by, idempotency_key=key
        )
        if not is_new:
            _check_same(job, submission, key)
            return job, False
        # An accepted request must survive a power failure.
        self.store.sync()
        self.changes.notify(job.id)
        self.runner.wake()
        kind = "verification" if VERIFIES in options else "search"
        _note(f"{kind} submitted", search=job.id, study=options.get(VERIFIES, study), by=by, priority=priority)
        return job, True

    def _check_queue_length(self) -> None:
        """Raise ``ServiceError`` where the queue is full."""
        if self.store.queue.count_queued() >= MOST_QUEUED:
            raise ServiceError(
                f"{MOST_QUEUED} searches wait already", "cancel some of them, or try again later", status=429
            )

    def verification(self, job: JobRecord) -> Document | None:
        """Return the result of a verification, its document and a missed promise's problem; ``None`` before its end."""
        found = [event for event in self.store.queue.events(job.id) if event.kind == "verification"]
        return found[-1].document if found else None

    def _earlier_answer(self, submission: Submission) -> JobRecord | None:
        """Return the finished job with the same request and version of autotune; ``None`` without one.

        Also ``None`` for ``fresh``, and for own code and datasets, which may have changed.
        """
        asked = submission.options
        if asked.get("fresh") or asked.get("code") is not None or asked.get("dataset") is not None:
            return None
        # Options are recorded in one order, so that the database finds the same request as text.
        for job in self.store.queue.jobs(states=["finished"], request=asked, most=_MOST_COMPARED):
            if job.needs == submission.needs:
                study = self.store.study(job.study)
                if study is not None and study.state == "finished" and study.autotune_version == __version__:
                    return job
        return None

    # Reading

    def job(self, job_id: str) -> JobRecord:
        """Return a job by its id, or the latest job of a study. Raises ``UnknownStudyError`` for others."""
        job = self.store.queue.job(job_id)
        if job is None:
            raise UnknownStudyError(f"there is no search {job_id[:120]!r}", "autotune queue lists them")
        return job

    def report(self, job: JobRecord) -> Report:
        """Return the report of a job's study. Raises ``UnknownStudyError`` before its first trial."""
        if self.store.study(job.study) is None:
            waits = "it waits in the queue" if job.state == "queued" else "it has no trial yet"
            raise UnknownStudyError(f"the search {job.study!r} has nothing to show: {waits}", "ask again later")
        return load_report(self.store, job.study)

    def result_lines(self, jobs: Sequence[JobRecord]) -> dict[str, str]:
        """Return a line for the result of each finished job, by id."""
        finished = [job for job in jobs if job.state == "finished"]
        new = [job for job in finished if job.id not in self._result_lines]
        recorded = self.store.names_of({job.study for job in new}) if new else set()
        for job in new:
            line = None
            if VERIFIES in job.request:
                line = self._line_of_verification(job)
            elif job.study in recorded:
                line = self._line_of_study(job)
            if line is not None:
                # Only lines that exist are kept: a study without a result may go on, and have one later.
                self._result_lines[job.id] = line
        return {job.id: self._result_lines.get(job.id, "no result") for job in finished}

    def _line_of_verification(self, job: JobRecord) -> str | None:
        """Return the verdict of a verification in words; ``None`` without a result."""
        shown = (self.verification(job) or {}).get("verification")
        if not shown:
            return None
        words = {"cannot_tell": "cannot tell", "faster": "faster than promised"}
        return words.get(shown["verdict"], f"the promise is {shown['verdict']}")

    def _line_of_study(self, job: JobRecord) -> str | None:
        """Return speed and configuration of the winner in words; ``None`` without a winner."""
        report = self.report(job)
        if report.best is None:
            return None
        words, speed = report.best.candidate.describe(), report.speed(report.best)
        return f"{format_rate(speed.samples_per_second)} {rate_unit(report.workload)}, {words}" if speed else words

    def trials(self, job: JobRecord) -> list[Document]:
        """Return a job's trials in the format of ``--json``."""
        if self.store.study(job.study) is None:
            return []
        report = self.report(job)
        return [trial_document(trial_view(report, trial)) for trial in report.trials]

    def describe_all(self, jobs: Sequence[JobRecord]) -> list[SearchDocument]:
        """Return the API's JSON documents of jobs."""
        queued = [job for job in jobs if job.state == "queued"]
        hosts = self.engine.hosts() if queued else []
        ahead = self.store.queue.ahead_of(queued)
        # A running search may wait, too: for another program that holds its device or its study.
        waits = {job.id: (job.status or {}).get("waits_for") for job in jobs}
        waits |= {job.id: waits_for(job, hosts, ahead[job.id]) for job in queued}
        return [self._describe(job, waits[job.id]) for job in jobs]

    def describe(self, job: JobRecord) -> SearchDocument:
        """Return the API's JSON document of a job."""
        return self.describe_all([job])[0]

    def _describe(self, job: JobRecord, waits: str | None) -> SearchDocument:
        """Return the API's JSON document of a job; ``waits`` is the reason why it waits, if it does."""
        path = f"/v1/searches/{job.id}"
        times = {name: getattr(job, name) for name in ("submitted_at", "started_at", "ended_at")}
        links = {name: f"{path}/{name}" for name in ("events", "trials", "report", "export")}
        return cast(
            "SearchDocument",
            # Most fields are attributes of the job, under the same names.
            {name: getattr(job, name) for name in SearchDocument.__annotations__ if hasattr(job, name)}
            | {name: None if moment is None else moment.isoformat() for name, moment in times.items()}
            | {
                "needs": encode(job.needs),
                "waits_for": waits,
                "cancel_asked": job.is_cancel_asked,
                "links": {"self": path, **links, "page": f"/searches/{job.id}"},
            },
        )

    def unmet(self, document: Document) -> str | None:
        """Return why no machine could run a request; ``None`` where one meets its needs."""
        needs = read_needs(document.get("needs"), document.get("device"), document.get("gpus"))
        return unmet(needs, self.engine.hosts())

    def cancel(self, job: JobRecord, by: TokenRecord) -> JobRecord:
        """Cancel a job, if the token may; a job that has ended stays as it is."""
        check_may_change(by, job)
        if job.state in ENDED:
            return job
        _note("search cancelled", search=job.id, study=job.study, by=by.name)
        cancelled = self.store.queue.cancel(job.id)
        self.runner.cancel(job.id)
        self.changes.notify(job.id)
        return cancelled or job

    # Forgetting

    async def forget_hourly(self, keep: timedelta) -> None:
        """Delete old searches now and every hour."""
        while True:
            try:
                await asyncio.to_thread(self.forget, keep)
            except StorageError as error:
                log.warning("old searches cannot be forgotten now: %s", error)
            except Exception:
                # Nobody waits for this task: without this, one error would end it unseen.
                log.exception("old searches cannot be forgotten now")
            await asyncio.sleep(_SECONDS_BETWEEN_FORGETTING)

    def forget(self, keep: timedelta) -> int:
        """Delete searches that ended longer ago than ``keep``, with their events; return their number.

        The logs of a study are deleted with its last search. Studies stay: their measurements answer and shorten later
        searches.
        """
        queue, count = self.store.queue, 0
        while gone := queue.forget(queue.clock() - keep):
            count += len(gone)
            for study in set(gone.values()):
                if not queue.jobs(study=study, most=1):
                    shutil.rmtree(log_folder(self.storage, study), ignore_errors=True)
            for job_id in gone:
                self._result_lines.pop(job_id, None)
        if count:
            log.info("old searches forgotten", extra={"fields": {"searches": count}})
            self.changes.notify_all()
        return count


def may_change(token: TokenRecord, job: JobRecord) -> bool:
    """Return whether a token may change a search: an admin's token any, another token its own."""
    return token.role == "admin" or (token.may_write and job.submitted_by == token.name)


def check_may_change(token: TokenRecord, job: JobRecord) -> None:
    """Raise ``ServiceError`` where a search belongs to another token, unless the token is an admin's."""
    if not may_change(token, job):
        raise ServiceError(
            f"the search {job.study!r} belongs to {job.submitted_by!r}",
            "use another --study, or ask them or an admin",
            status=403,
        )


def _check_same(job: JobRecord, submission: Submission, key: str | None) -> None:
    """Raise ``InvalidRequestError`` where an idempotency key belongs to another request."""
    # A verification's needs follow from its study, which may have been continued on another device meanwhile.
    has_other_needs = job.needs != submission.needs and VERIFIES not in submission.options
    if canonical(job.request) != canonical(submission.options) or has_other_needs:
        raise InvalidRequestError(
            f"the Idempotency-Key {key!r:.80} was used with another request", "use a new key for it"
        )


def _note(message: str, **fields: object) -> None:
    """Log an event with its fields, which never hold a token."""
    log.info(message, extra={"fields": fields})


def waits_for(job: JobRecord, hosts: Sequence[Host], ahead: int) -> str:
    """Return why a queued job waits, in words: no device meets its needs, or ``ahead`` jobs come before it."""
    if (missing := unmet(job.needs, hosts)) is not None:
        return missing
    return "it is the next in the queue" if ahead == 0 else f"{ahead} before it in the queue"


def describe_devices(searches: Searches) -> list[Document]:
    """Return the API's JSON documents of the devices, each with its running search."""
    found = []
    for host in searches.engine.hosts():
        for device in host.devices:
            job = searches.runner.job_on(host.name, device.uuid)
            about = {"search": job.id, "study": job.study} if job is not None else {"search": None, "study": None}
            found.append({"host": host.name, **device.document(), **about})
    return found
