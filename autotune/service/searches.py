"""Queue and describe searches, and answer those that were answered before."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, ServiceError, UnknownStudyError
from autotune.core.units import format_rate
from autotune.results.json_document import report_document
from autotune.results.report import Report, load_report
from autotune.service.change_events import ANY_CHANGE, NEW_JOB, ChangeEvents, wait_for
from autotune.service.listed_code import Listed
from autotune.service.requests import (
    Submission,
    canonical,
    check_against,
    choose_study,
    device_of,
    read_needs,
    read_submission,
)
from autotune.service.verifications import (
    VERIFIES,
    VerificationSubmission,
    check_can_be_exported,
    needs_of_study,
    read_verification,
)
from autotune.store.queue import ENDED, LEASE_SECONDS, AgentRecord, JobRecord, Needs, Offer
from autotune.store.records import new_id
from autotune.store.repository import Store
from autotune.store.transfer import read_study, related_studies, take_in
from autotune.tuning.run import log_folder

log = logging.getLogger("autotune.service")

MOST_QUEUED = 10_000
"""More are refused, so that a client that submits in a loop does not fill the disk."""
_TOO_MANY = f"{MOST_QUEUED} searches wait already"
AGENT_EVENTS = ("line", "study", "trial_begins", "trial", "verification")
"""What an agent tells: lines as the terminal shows them, and what a page draws."""
_MOST_COMPARED = 20
_MOST_REFUSED = 20
# An agent that has not asked for so long was stopped, most likely. A choice.
_REFUSAL_SHOWN = timedelta(hours=1)
_CLAIM_POLL_SECONDS = 5.0
_SEEN_SECONDS = 5.0
_ALIVE = timedelta(seconds=LEASE_SECONDS)


def offer_of(device: Document) -> Offer:
    """Return what an agent on this device offers."""
    return Offer(
        str(device["kind"]), str(device["name"]), int(device["memory_total_bytes"]), int(device.get("count", 1))
    )


@dataclass(frozen=True)
class Refusal:
    """An agent of another version that was refused."""

    version: str
    since: datetime
    """When it asked first."""
    last_asked_at: datetime


@dataclass
class Searches:
    """The searches of one service."""

    store: Store
    storage: str
    """Where the store is, as ``open_store`` takes it."""
    changes: ChangeEvents = field(default_factory=ChangeEvents)
    data_folders: tuple[Path, ...] = ()
    codes: Listed = field(default_factory=dict)
    """What may be searched by name."""
    leases_lost: int = 0
    _refused: dict[str, Refusal] = field(default_factory=dict)
    """By the agents' names."""
    is_closing: bool = False
    _offers: dict[str, Offer] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)
    _result_lines: dict[str, str] = field(default_factory=dict)
    """By job: a list of many is shown often."""

    # Taking in

    def submit(self, document: Any, *, by: str, idempotency_key: str | None = None) -> tuple[JobRecord, bool]:
        """Queue a search; return its job and whether it is new.

        A request that was answered before, without ``fresh`` and without data that may have changed, is not searched
        again: the job that answered it is returned.
        """
        submission = read_submission(document, self.data_folders, self.codes)
        if idempotency_key is None and (known := self._answered(submission)) is not None:
            return known, False
        agents = self.agents()
        fitting = [agent for agent in agents if offer_of(agent.device).meets(submission.needs)]
        check_against(submission, [device_of(agent.device) for agent in _distinct(fitting)], self.codes)
        self._check_length()
        study = choose_study(submission, self._is_taken)
        job, is_new = self._add(study, submission, submission.needs, by, idempotency_key)
        if is_new:
            _note("search submitted", search=job.id, study=job.study, by=by, priority=job.priority)
        else:
            _check_same(job, submission.options, submission.needs, idempotency_key)
        return job, is_new

    def submit_verification(
        self, document: Any, *, by: str, idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
        """Queue a run of a stock Trainer as a study exports it; return its job and whether it is new."""
        submission = read_verification(document)
        report = load_report(self.store, submission.study)
        check_can_be_exported(report)
        self._check_length()
        needs = needs_of_study(report.environment)
        job, is_new = self._add(f"verify {submission.study}", submission, needs, by, idempotency_key)
        if not is_new:
            _check_same(job, submission.options, job.needs, idempotency_key)
        return job, is_new

    def _add(
        self, study: str, submission: Submission | VerificationSubmission, needs: Needs, by: str, key: str | None
    ) -> tuple[JobRecord, bool]:
        """Add a job to the queue; return it and whether it is new."""
        job, is_new = self.store.queue.submit(
            study, submission.options, needs, priority=submission.priority, submitted_by=by, idempotency_key=key
        )
        if is_new:
            # What was accepted is not lost, whatever happens.
            self.store.sync()
            self.changes.notify(NEW_JOB)
        return job, is_new

    def _check_length(self) -> None:
        if self.store.queue.count_queued() >= MOST_QUEUED:
            raise ServiceError(_TOO_MANY, "cancel some of them, or try again later", status=429)

    def verification(self, job: JobRecord) -> Document | None:
        """Return what a verification has shown: its document, and the problem where a promise was missed."""
        found = [event for event in self.store.queue.events(job.id) if event.kind == "verification"]
        return found[-1].document if found else None

    def _answered(self, submission: Submission) -> JobRecord | None:
        """Return the finished job that has answered the same request by the same autotune."""
        if submission.fresh or submission.code is not None or submission.options.get("dataset") is not None:
            return None
        # Options are recorded in one order, so that the database finds the same request as text.
        for job in self.store.queue.jobs(states=["finished"], request=submission.options, most=_MOST_COMPARED):
            if job.needs == submission.needs:
                study = self.store.study(job.study)
                if study is not None and study.state == "finished" and study.autotune_version == __version__:
                    return job
        return None

    def _is_taken(self, name: str) -> bool:
        return self.store.study(name) is not None or bool(self.store.queue.jobs(study=name, most=1))

    # Looking

    def job(self, job_id: str) -> JobRecord:
        """Return a job by its id, or the latest of a study; ``UnknownStudyError`` where there is none."""
        job = self.store.queue.job(job_id)
        if job is None:
            raise UnknownStudyError(f"there is no search {job_id[:120]!r}", "autotune queue lists them")
        return job

    def report(self, job: JobRecord) -> Report:
        """Return the report of a job's study; ``UnknownStudyError`` where none of its trials began."""
        if self.store.study(job.study) is None:
            waits = "it waits in the queue" if job.state == "queued" else "it has no trial yet"
            raise UnknownStudyError(f"the search {job.study!r} has nothing to show: {waits}", "ask again later")
        return load_report(self.store, job.study)

    def result_lines(self, jobs: Sequence[JobRecord]) -> dict[str, str]:
        """Return the results of those jobs that have finished with one, by their ids, in a line each."""
        finished = [job for job in jobs if job.state == "finished"]
        new = [job for job in finished if job.id not in self._result_lines]
        # One question for all: an agent may have recorded nothing.
        known = self.store.names_of({job.study for job in new}) if new else set()
        for job in new:
            if VERIFIES in job.request:
                self._result_lines[job.id] = self._line_of_verification(job)
            else:
                self._result_lines[job.id] = self._line_of_study(job) if job.study in known else ""
        return {job.id: self._result_lines[job.id] for job in finished}

    def _line_of_verification(self, job: JobRecord) -> str:
        shown = (self.verification(job) or {}).get("verification") or {}
        verdict = shown.get("verdict")
        return "cannot tell" if verdict == "cannot_tell" else f"the promise is {verdict}" if verdict else ""

    def _line_of_study(self, job: JobRecord) -> str:
        report = self.report(job)
        speed = report.speed(report.best)
        told = f"{format_rate(speed.samples_per_second)} samples/s, " if speed else ""
        return told + report.best.candidate.describe() if report.best else "no result"

    def trials(self, job: JobRecord) -> list[Document]:
        """Return a job's trials, as ``--json`` has them."""
        if self.store.study(job.study) is None:
            return []
        trials: list[Document] = report_document(self.report(job))["trials"]
        return trials

    def agents(self) -> list[AgentRecord]:
        """Return the agents that were heard of lately."""
        queue = self.store.queue
        return queue.agents(queue.clock() - _ALIVE)

    def describe_all(self, jobs: Sequence[JobRecord]) -> list[Document]:
        """Return jobs as the API shows them; ``waits_for`` says why one does not run yet."""
        queued = [job for job in jobs if job.state == "queued"]
        agents = self.agents() if queued else []
        ahead = self.store.queue.ahead_of(queued)
        return [
            self._describe(job, waits_for(job, agents, ahead[job.id]) if job.state == "queued" else None)
            for job in jobs
        ]

    def describe(self, job: JobRecord) -> Document:
        """Return a job as the API shows it."""
        return self.describe_all([job])[0]

    def _describe(self, job: JobRecord, told: str | None) -> Document:
        path = f"/v1/searches/{job.id}"
        return {
            "id": job.id,
            "number": job.number,
            "study": job.study,
            "state": job.state,
            "request": job.request,
            "needs": {
                "device_kind": job.needs.device_kind,
                "gpu": job.needs.gpu,
                "memory_bytes": job.needs.memory_bytes,
                "count": job.needs.count,
            },
            "priority": job.priority,
            "waits_for": told,
            "cancel_asked": job.is_cancel_asked,
            "agent": job.owner,
            "attempts": job.attempts,
            "status": job.status,
            "problem": job.problem,
            "submitted_by": job.submitted_by,
            "submitted_at": job.submitted_at.isoformat(),
            "started_at": job.started_at.isoformat() if job.started_at else None,
            "ended_at": job.ended_at.isoformat() if job.ended_at else None,
            "links": {
                "self": path,
                "events": f"{path}/events",
                "trials": f"{path}/trials",
                "report": f"{path}/report",
                "export": f"{path}/export",
                "page": f"/searches/{job.id}",
            },
        }

    def waits_for(self, job: JobRecord) -> str:
        """Say what a queued job waits for."""
        return waits_for(job, self.agents(), self.store.queue.ahead_of([job])[job.id])

    def unmet(self, document: Document) -> str | None:
        """Say what a request would wait for, beyond its turn; ``None`` where an agent fits."""
        needs = read_needs(document.get("needs"), document.get("device"), document.get("gpus"))
        return _unmet(needs, self.agents())

    def cancel(self, job: JobRecord) -> JobRecord:
        """Cancel a job; one that has ended stays as it is."""
        if job.state in ENDED:
            return job
        cancelled = self.store.queue.cancel(job.id)
        self.changes.notify(job.id)
        return cancelled or job

    def log_path(self, study: str, number: int) -> Path:
        """Return where the log of a study's trial is, on this machine."""
        return log_folder(self.storage, study) / f"trial-{number:04d}.log"

    def trial_counts(self) -> dict[str, int]:
        """Return how many trials of all studies are in each state."""
        studies = self.store.studies()
        names = ("running", "completed", "out_of_memory", "failed")
        return {name: sum(getattr(summary, name) for summary in studies) for name in names}

    # Agents

    def register_agent(self, document: Document) -> Document:
        """Connect an agent; ``ServiceError`` for one of another version, whose trials may measure otherwise."""
        text = {name: _storable(document.get(name))[:200] for name in ("name", "host", "version")}
        if text["version"] != __version__:
            self._note_refusal(text["name"], text["version"])
            raise ServiceError(
                f"the agent is autotune {text['version']}, the service {__version__}",
                f"install autotune {__version__} where the agent runs",
                status=409,
            )
        try:
            device, count = device_of(document["device"]), int(document["device"].get("count", 1))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError("the agent has no device", "send what autotune devices --json shows") from error
        moment = self.store.queue.clock()
        agent = AgentRecord(
            new_id(),
            **text,
            device={**device.document(), **({"count": count} if count > 1 else {})},
            started_at=moment,
            heartbeat_at=moment,
            gone_at=None,
        )
        self.store.queue.register(agent)
        self._refused.pop(agent.name, None)
        _note("agent connected", agent=agent.id, name=agent.name, device=device.name)
        self.changes.notify(NEW_JOB)
        return {"id": agent.id, "lease_seconds": LEASE_SECONDS}

    def refusals(self) -> dict[str, Refusal]:
        """Return the agents that were refused for their version and asked lately, by name."""
        oldest = self.store.queue.clock() - _REFUSAL_SHOWN
        return {name: refusal for name, refusal in list(self._refused.items()) if refusal.last_asked_at >= oldest}

    def _note_refusal(self, name: str, version: str) -> None:
        """Keep what the page says of an agent that was refused; some agents ask again and again."""
        moment, known = self.store.queue.clock(), self.refusals().get(name)
        if known is not None and known.version == version:
            self._refused[name] = replace(known, last_asked_at=moment)
            return
        self._refused[name] = Refusal(version, moment, moment)
        while len(self._refused) > _MOST_REFUSED:
            self._refused.pop(next(iter(self._refused)), None)
        _note("agent refused", name=name, version=version)
        self.changes.notify(ANY_CHANGE)

    async def claim(
        self, agent_id: str, wait_seconds: float, has_left: Callable[[], Awaitable[bool]] | None = None
    ) -> Document:
        """Give an agent the next job that fits, waiting for one; ``job`` is ``None`` where none came.

        ``has_left`` says whether the agent has gone while it waited: a job that was claimed for it would wait for the
        end of its lease.
        """
        deadline = time.monotonic() + wait_seconds
        # Mostly there is nothing to look up and nothing to record, which needs no thread.
        is_recent = time.monotonic() - self._seen.get(agent_id, -_SEEN_SECONDS) < _SEEN_SECONDS
        offer = self._offers.get(agent_id) if is_recent else None
        if offer is None:
            offer = await run_in_threadpool(self._offer, agent_id)
        while True:
            event = self.changes.next_event(NEW_JOB)
            job = await run_in_threadpool(self.store.queue.claim, agent_id, offer)
            left = deadline - time.monotonic()
            if job is not None:
                _note("search claimed", search=job.id, study=job.study, agent=agent_id, attempt=job.attempts)
                self.changes.notify(job.id)
                return {
                    "job": {
                        "id": job.id,
                        "study": job.study,
                        "options": job.request,
                        "lease_token": job.lease_token,
                        "attempts": job.attempts,
                    }
                }
            if left <= 0 or self.is_closing:
                return {"job": None}
            await wait_for(event, min(left, _CLAIM_POLL_SECONDS))
            if has_left is not None and await has_left():
                return {"job": None}

    def _offer(self, agent_id: str) -> Offer:
        """Return what an agent offers, and record that it was heard of; ``ServiceError`` for an unknown one."""
        if agent_id not in self._offers:
            agent = next((agent for agent in self.store.queue.agents() if agent.id == agent_id), None)
            if agent is None:
                raise ServiceError("this agent is not connected", "connect it again", status=404)
            self._offers[agent_id] = offer_of(agent.device)
        self._saw(agent_id)
        return self._offers[agent_id]

    def _saw(self, agent_id: str) -> None:
        """Record that an agent was heard of, unless that was done just now: each record is a write."""
        moment = time.monotonic()
        if moment - self._seen.get(agent_id, -_SEEN_SECONDS) >= _SEEN_SECONDS:
            self._seen[agent_id] = moment
            self.store.queue.saw_agent(agent_id)

    def leave(self, agent_id: str) -> None:
        """Disconnect an agent."""
        _note("agent left", agent=agent_id)
        self._offers.pop(agent_id, None)
        self._seen.pop(agent_id, None)
        self.store.queue.saw_agent(agent_id, leaves=True)

    def heartbeat(self, agent_id: str, job_id: str, document: Document) -> Document:
        """Renew a lease and take down what runs now."""
        status = document.get("status")
        is_cancelled = self.store.queue.renew(job_id, _lease(document), status if isinstance(status, dict) else None)
        self._saw(agent_id)
        if status is not None:
            self.changes.notify(job_id)
        return {"cancel": is_cancelled}

    def say(self, agent_id: str, job_id: str, document: Document) -> Document:
        """Record events of a search, and what an agent with a database of its own has recorded of it."""
        changes = {"status": document["status"]} if isinstance(document.get("status"), dict) else {}
        records, logs = document.get("records") or [], document.get("logs") or {}
        if not isinstance(records, list) or not isinstance(logs, dict):
            raise InvalidRequestError("records must be a list, and logs an object", "send them as an agent does")
        study = self.job(job_id).study if records or logs else ""
        with self.store.queue.writing(job_id, _lease(document), _events_of(document), **changes) as connection:
            for record in records:
                take_in(connection, record, study)
        for number, text in logs.items():
            self._keep_log(study, number, text)
        self.changes.notify(job_id)
        return {}

    def _keep_log(self, study: str, number: Any, text: Any) -> None:
        """Keep the end of a trial's log that an agent sends."""
        if not (str(number).isdecimal() and len(str(number)) <= 9 and isinstance(text, str)):
            raise InvalidRequestError(f"{number!r:.40} is not the number of a trial", "send the log under its number")
        path = self.log_path(study, int(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")

    def records(self, job_id: str, lease_token: str) -> Document:
        """Return what is recorded of a claimed search, and finished studies of its model, for an agent elsewhere."""
        self.store.queue.renew(job_id, _lease({"lease_token": lease_token}))
        job = self.job(job_id)
        if VERIFIES in job.request:
            return {"own": read_study(self.store.engine, str(job.request[VERIFIES])), "related": []}
        related = []
        if not job.request.get("fresh"):
            related = related_studies(self.store.engine, str(job.request.get("model") or ""))
        return {
            "own": read_study(self.store.engine, job.study),
            "related": [document for document in related if document["study"]["name"] != job.study],
        }

    def end(self, agent_id: str, job_id: str, document: Document) -> Document:
        """End a search, or put it back into the queue."""
        state, lease = document.get("state"), _lease(document)
        if state == "queued":
            self.store.queue.put_back(job_id, lease, str(document.get("why") or "its agent ended")[:200])
            _note("search put back", search=job_id, agent=agent_id)
            self.changes.notify(NEW_JOB)
        elif state in ENDED:
            problem = document.get("problem")
            self.store.queue.end(job_id, lease, state, problem if isinstance(problem, dict) else None)
            _note("search ended", search=job_id, agent=agent_id, state=state)
        else:
            raise InvalidRequestError(
                f"{state!r:.40} is not a state in which a search ends", f"send one of {', '.join(ENDED)}"
            )
        self.store.sync()
        self.changes.notify(job_id)
        return {}

    def sweep(self) -> None:
        """Take searches back from agents that fell silent."""
        for job_id, _ in self.store.queue.sweep():
            self.leases_lost += 1
            _note("lease lost", search=job_id)
            self.changes.notify(job_id)
            self.changes.notify(NEW_JOB)


def _check_same(job: JobRecord, options: Document, needs: Needs, key: str | None) -> None:
    """Raise ``InvalidRequestError`` where the job of a key was made by another request."""
    if canonical(job.request) != canonical(options) or job.needs != needs:
        raise InvalidRequestError(
            f"the Idempotency-Key {key!r:.80} was used with another request", "use a new key for it"
        )


def _note(message: str, **fields: object) -> None:
    """Log an event with its fields; none of them holds a token."""
    log.info(message, extra={"fields": fields})


def waits_for(job: JobRecord, agents: Sequence[AgentRecord], ahead: int) -> str:
    """Say what a queued job waits for: an agent, or its turn after those ``ahead`` of it."""
    if (told := _unmet(job.needs, agents)) is not None:
        return told
    return "it is the next in the queue" if ahead == 0 else f"{ahead} before it in the queue"


def _unmet(needs: Needs, agents: Sequence[AgentRecord]) -> str | None:
    """Say why no agent that is connected can run a search with these needs."""
    if not agents:
        return "no agent is connected; autotune agent --server URL starts one"
    if any(offer_of(agent.device).meets(needs) for agent in agents):
        return None
    have = ", ".join(sorted({_what_it_has(agent.device) for agent in agents}))
    return f"no agent has {needs.describe()}; there are {have}"


def _storable(value: Any) -> str:
    """Return a text without what a database cannot store: zero bytes and lone surrogates."""
    return "".join(letter for letter in str(value or "") if letter != "\0" and not "\ud800" <= letter <= "\udfff")


def _lease(document: Document) -> str:
    token = document.get("lease_token")
    if not isinstance(token, str) or "\0" in token:
        raise InvalidRequestError("lease_token is missing", "send the one that the claim gave")
    return token


def _events_of(document: Document) -> list[tuple[str, Document]]:
    """Return the events that an agent sends, each a kind and a document."""
    found = []
    events = document.get("events") or []
    if not isinstance(events, list):
        raise InvalidRequestError("events is not a list", "send a list of objects with kind and document")
    for event in events:
        kind, told = (event.get("kind"), event.get("document")) if isinstance(event, dict) else (None, None)
        if kind not in AGENT_EVENTS or not isinstance(told, dict):
            raise InvalidRequestError(f"{kind!r:.40} is not a kind of event", f"send {', '.join(AGENT_EVENTS)}")
        found.append((str(kind), told))
    return found


def describe_agent(agent: AgentRecord, jobs: Sequence[JobRecord]) -> Document:
    """Return an agent as the API shows it, with the search that it runs."""
    running = next((job for job in jobs if job.owner == agent.id), None)
    return {
        "id": agent.id,
        "name": agent.name,
        "host": agent.host,
        "version": agent.version,
        "device": agent.device,
        "started_at": agent.started_at.isoformat(),
        "heartbeat_at": agent.heartbeat_at.isoformat(),
        "search": running.id if running else None,
        "study": running.study if running else None,
    }


def _what_it_has(device: Document) -> str:
    count = int(device.get("count", 1))
    return f"{f'{count} × ' if count > 1 else ''}{device['name']} ({device['kind']})"


def _distinct(agents: Sequence[AgentRecord]) -> list[AgentRecord]:
    """Return one agent of each kind of device."""
    return list({str(agent.device["name"]): agent for agent in agents}.values())
