"""Start the queue's jobs on free devices by an engine (child processes, or a Ray cluster), and record its messages.

One thread starts jobs. Each running job has a thread that takes the messages of its run. Only the service writes the
queue. For an engine without access to the database it also writes the studies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import AutotuneError, DeviceError, InvalidRequestError, ServiceError, StorageError
from autotune.core.placement import this_owner
from autotune.engine.work import EVENTS, Code, Engine, Host, Message, Run, Work, WorkKind
from autotune.service.change_events import ChangeEvents
from autotune.service.requests import VERIFIES
from autotune.store.leases import name_of_study, renewed
from autotune.store.queue import AttemptOverError, JobRecord, Needs, Offer
from autotune.store.records import new_id
from autotune.store.repository import Store
from autotune.store.transfer import studies_for, take_in
from autotune.tuning.run import keep_trial_log

log = logging.getLogger("autotune.service")

# For what changes without a notification: a device whose process was started again, a node that has come.
_LOOK_SECONDS = 2.0
_LISTEN_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_END_SECONDS = 8.0
_MOST_AT_ONCE = 1000


@dataclass
class _Running:
    """A job that an engine runs, on the devices that its record names."""

    job: JobRecord
    run: Run | None = None
    """The engine's handle; ``None`` until the engine has started it."""
    is_cancelled: bool = False
    thread: threading.Thread | None = None


@dataclass
class Runner:
    """Runs a service's jobs (its queued searches and verifications) by an engine, and records what becomes of them."""

    store: Store
    storage: str
    engine: Engine
    changes: ChangeEvents
    codes: Mapping[str, Code]
    """The listed code by name."""
    data_folders: Sequence[Path] = ()
    """The folders whose models and datasets requests may name."""
    lost: int = 0
    """Attempts whose process or node was lost, since the start."""
    _running: dict[str, _Running] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _is_settled: bool = False
    """Whether every job that the queue has as running is in ``_running``."""
    _is_closing: bool = False
    _thread: threading.Thread | None = None

    # What the service sees of it

    def wake(self) -> None:
        """Make the runner check the queue, after a job was added."""
        self._wake.set()

    def job_on(self, host: str, uuid: str) -> JobRecord | None:
        """Return the job that runs on a device; ``None`` where the device is free."""
        with self._guard:
            jobs = [running.job for running in self._running.values()]
        places = ((job, job.device or {}) for job in jobs)
        return next((job for job, at in places if at.get("host") == host and uuid in at.get("uuids", ())), None)

    def problems(self) -> list[str]:
        """Return the reasons why jobs cannot run, a line each."""
        found = list(self.engine.problems())
        if self._thread is not None and not self._thread.is_alive() and not self._is_closing:
            found.append("the thread that starts searches has ended; see the log")
        return found

    def cancel(self, job_id: str) -> None:
        """Cancel a running job."""
        with self._guard:
            running = self._running.get(job_id)
        if running is not None:
            # ``_start`` sees this if the engine has not started it yet.
            running.is_cancelled = True
            if running.run is not None:
                running.run.cancel()

    # Life

    def begin(self) -> None:
        """Start the thread that takes up jobs from before a restart of the service, and starts queued jobs."""
        self._thread = threading.Thread(target=self._start_jobs, name="runner", daemon=True)
        self._thread.start()

    def _settle(self) -> None:
        """Follow the runs of jobs that the queue has as running, as after a restart; put jobs without a run back."""
        with self._guard:
            known = set(self._running)
        for job in self.store.queue.jobs(states=["running"], most=_MOST_AT_ONCE):
            if job.id in known:
                continue
            run = self.engine.find(_attempt_id(job))
            if run is None:
                self._put_back(job, "the service was started again", is_lost=False)
            else:
                self._follow_in_thread(_Running(job, run))
                if job.is_cancel_asked:
                    self.cancel(job.id)
        self._is_settled = True

    def close(self) -> None:
        """Start no more jobs, end the local ones, and record their ends."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self.engine.shares_storage:
            # Local runs end with their engine. Their threads then record the last message of each, its end.
            self.engine.close()
        with self._guard:
            every = list(self._running.values())
        deadline = time.monotonic() + _END_SECONDS
        for running in every:
            if running.thread is not None:
                running.thread.join(max(0.0, deadline - time.monotonic()))
        if not self.engine.shares_storage:
            # Runs elsewhere go on. The threads have used this connection until now.
            self.engine.close()

    # Starting

    def _start_jobs(self) -> None:
        """Start queued jobs until the service ends, in a thread."""
        while not self._is_closing:
            try:
                if not self._is_settled:
                    self._settle()
                while not self._is_closing and self._start_next():
                    pass
            except Exception as error:
                # The database may have recorded a start without an answer: look at its running jobs again.
                self._is_settled = False
                # A database that does not answer needs no traceback.
                if isinstance(error, StorageError):
                    log.warning("no job can be started: %s", error)
                else:
                    log.exception("starting jobs failed")
                time.sleep(_RETRY_SECONDS)
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _start_next(self) -> bool:
        """Start the next job that free devices can run; return whether there was one."""
        for host in self.engine.hosts():
            # Each offer is a group of equal devices.
            for offer, alike in offers_of(host):
                free = [device for device in alike if self.job_on(host.name, device.uuid) is None]
                job = self.store.queue.next_for(offer) if free else None
                # Devices that are too few for the first job stay free for it: later jobs would delay it for ever.
                if job is not None and job.needs.count <= len(free):
                    self._start(job, host, free[: job.needs.count])
                    return True
        return False

    def _start(self, job: JobRecord, host: Host, devices: Sequence[Device]) -> None:
        """Start a job on devices, and follow it in a thread."""
        uuids = tuple(device.uuid for device in devices)
        where = {"host": host.name, "kind": devices[0].kind, "name": devices[0].name, "uuids": list(uuids)}
        running = _Running(job)
        # Before the start is recorded: whoever cancels it from then on finds it here.
        with self._guard:
            self._running[job.id] = running
        started = None
        try:
            started = self.store.queue.start(job.id, where)
        finally:
            if started is None:
                with self._guard:
                    del self._running[job.id]
        # It was cancelled or deleted meanwhile.
        if started is None:
            return
        running.job = started
        log.info("search started", extra={"fields": _log_fields(started, device=devices[0].name, host=host.name)})
        self.changes.notify(job.id)
        try:
            work = self._work(started, uuids)
            running.run = self.engine.start(work, host)
        except Exception as error:
            with self._guard:
                del self._running[job.id]
            if isinstance(error, AutotuneError) and not isinstance(error, DeviceError | ServiceError | StorageError):
                self._end(started, "failed", error.document())
                return
            # Any other error, such as no memory for a process: without this, the devices would stay taken for ever.
            log.warning("a search cannot be started: %s", error, extra={"fields": _log_fields(started)})
            self._put_back(started, getattr(error, "message", str(error)), is_lost=True)
            return
        if running.is_cancelled:
            running.run.cancel()
        self._follow_in_thread(running)

    def _work(self, job: JobRecord, uuids: tuple[str, ...]) -> Work:
        """Return the work to send to the engine. Raises ``InvalidRequestError`` for code that is no longer listed."""
        verified = job.request.get(VERIFIES)
        study = str(verified) if verified is not None else job.study
        code = None
        if (name := job.request.get("code")) is not None:
            code = self.codes.get(name)
            if code is None:
                raise InvalidRequestError(f"the code {name!r:.80} is not listed any more", "have the operator list it")
        kind: WorkKind = "search" if verified is None else "verify"
        folders = tuple(map(str, self.data_folders))
        work = Work(_attempt_id(job), study, job.request, kind, code, uuids, folders=folders)
        if self.engine.shares_storage:
            return replace(work, storage=self.storage)
        return replace(work, studies=studies_for(self.store, study, job.request))

    # Following

    def _follow_in_thread(self, running: _Running) -> None:
        """Start the thread that takes the messages of a running job."""
        running.thread = threading.Thread(target=self._follow, args=(running,), name="follow", daemon=True)
        with self._guard:
            self._running[running.job.id] = running
        running.thread.start()

    def _follow(self, running: _Running) -> None:
        """Record the messages of a job's run until its end."""
        job, run = running.job, running.run
        assert run is not None
        goes_on_elsewhere = False
        try:
            with contextlib.ExitStack() as stack:
                if not self.engine.shares_storage:
                    self._hold(stack, job.study)
                goes_on_elsewhere = not self._record_until_end(job, run)
        except AttemptOverError:
            log.warning("what a former attempt said is left out", extra={"fields": _log_fields(job)})
        except StorageError as error:
            log.warning("what a search says is not recorded: %s", error, extra={"fields": _log_fields(job)})
            self._is_settled = False
        except Exception:
            log.exception("following a search failed", extra={"fields": _log_fields(job)})
            self._is_settled = False
        finally:
            if not goes_on_elsewhere:
                run.close()
            with self._guard:
                # A job that was put back may run again by now, with another ``_Running``.
                if self._running.get(job.id) is running:
                    del self._running[job.id]
            self.store.sync()
            self.changes.notify(job.id)
            self._wake.set()

    def _hold(self, stack: contextlib.ExitStack, study: str) -> None:
        """Hold the lease (the right to write the records) of a study that runs elsewhere, once it is free."""
        while not self._is_closing:
            try:
                stack.enter_context(held(self.store, name_of_study(study), f"the study {study!r}"))
                return
            except StorageError as error:
                log.warning("what a search says cannot be recorded now: %s", error)
                time.sleep(_RETRY_SECONDS)

    def _record_until_end(self, job: JobRecord, run: Run) -> bool:
        """Record the messages of a run; return whether it ended before the service did."""
        last_number = job.heard
        while True:
            try:
                messages = run.messages(last_number, _LISTEN_SECONDS)
            except AutotuneError as error:
                messages = [Message(last_number + 1, "end", {"state": "lost", "why": error.message})]
            if messages:
                last_number = messages[-1].number
                if self._record_with_retries(job, messages):
                    return True
            if self._is_closing and not self.engine.shares_storage:
                # It goes on without this service, which finds it again after its restart.
                return False

    def _record_with_retries(self, job: JobRecord, messages: Sequence[Message]) -> bool:
        """Record messages, retrying until the database accepts them; return whether the run has ended.

        Until then the engine keeps the messages, so that none is lost. A refused record ends its search as failed.
        """
        may_be_recorded = False
        while True:
            try:
                # A transaction may have succeeded although its confirmation was lost: its messages are left out.
                if may_be_recorded and (known := self.store.queue.job(job.id)) is not None:
                    messages = [each for each in messages if each.kind == "end" or each.number > known.heard]
                return self._record(job, messages)
            except InvalidRequestError as error:
                log.warning("a record is refused: %s", error, extra={"fields": _log_fields(job)})
                messages = [Message(messages[-1].number, "end", {"state": "failed", "problem": error.document()})]
            except StorageError as error:
                may_be_recorded = True
                log.warning("what a search says cannot be recorded now: %s", error)
                if self._is_closing:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _record(self, job: JobRecord, messages: Sequence[Message]) -> bool:
        """Write a run's messages to the database, and logs to files; return whether the last one is the run's end."""
        events = [(each.kind, each.document) for each in messages if each.kind in EVENTS]
        statuses = [each.document for each in messages if each.kind == "status"]
        # An end does not count as heard: it comes again if this process is killed before the job's end is recorded.
        numbers = [each.number for each in messages if each.kind != "end"]
        changes: dict[str, Any] = {"heard": numbers[-1]} if numbers else {}
        changes |= {"status": statuses[-1]} if statuses else {}
        if numbers:
            with self.store.queue.writing(job.id, job.attempts, events, **changes) as connection:
                for each in messages:
                    if each.kind == "record":
                        take_in(connection, each.document, str(job.request.get(VERIFIES) or job.study))
        for each in messages:
            if each.kind == "log":
                try:
                    keep_trial_log(self.storage, job.study, each.document)
                except OSError as error:
                    log.warning("the log of a trial cannot be kept: %s", error)
        has_ended = bool(messages) and messages[-1].kind == "end"
        if has_ended:
            self._take_end(job, messages[-1].document)
        self.changes.notify(job.id)
        return has_ended

    def _take_end(self, job: JobRecord, end: Document) -> None:
        """Record the end of a run: the job ends as finished or failed, or else returns to the queue."""
        if end["state"] in ("finished", "failed"):
            self._end(job, end["state"], end.get("problem"))
        else:
            is_lost = end["state"] == "lost"
            self.lost += is_lost
            # What is lost as the service ends does not count towards the attempts after which a job has failed.
            self._put_back(job, end.get("why") or "its process was ended", is_lost=is_lost and not self._is_closing)

    def _end(self, job: JobRecord, state: Any, problem: Document | None) -> None:
        """Record that a job has finished or failed, unless another attempt runs it by now."""
        with contextlib.suppress(AttemptOverError):
            self.store.queue.end(job.id, job.attempts, state, problem)
            log.info("search ended", extra={"fields": _log_fields(job, state=state)})
        self.changes.notify(job.id)

    def _put_back(self, job: JobRecord, why: str, *, is_lost: bool) -> None:
        """Put a job back into the queue after an attempt without a result, unless another attempt runs it by now."""
        with contextlib.suppress(AttemptOverError):
            state = self.store.queue.put_back(job.id, job.attempts, why, is_lost=is_lost)
            log.info("search put back", extra={"fields": _log_fields(job, state=state, why=why)})
        self.changes.notify(job.id)


@contextlib.contextmanager
def held(store: Store, name: str, what: str) -> Iterator[None]:
    """Hold a lease during the block; ``what`` is its name in messages. Raises ``StorageError`` if another holds it."""
    token = new_id()
    if (holder := store.leases.take(name, this_owner(), token)) is not None:
        raise StorageError(f"{what} is held by {holder.describe()}", "wait for its end, or name another database")
    with renewed(store.leases, name, token):
        yield


def _attempt_id(job: JobRecord) -> str:
    return f"{job.id}-{job.attempts}"


def _log_fields(job: JobRecord, **more: object) -> Document:
    return {"search": job.id, "study": job.study, "attempt": job.attempts, **more}


def offers_of(host: Host) -> list[tuple[Offer, list[Device]]]:
    """Return the queue's offers of a machine: one for devices of equal kind, name and memory, with these devices."""
    groups: dict[tuple[str, str, int], list[Device]] = {}
    for device in host.devices:
        groups.setdefault((device.kind, device.name, device.memory_total_bytes), []).append(device)
    return [(Offer(*about, len(alike)), alike) for about, alike in groups.items()]


def unmet(needs: Needs, hosts: Sequence[Host]) -> str | None:
    """Return why no device meets these needs; ``None`` where one does."""
    offers = [offer for host in hosts for offer, _ in offers_of(host)]
    if not offers:
        return "no device is ready to search"
    if any(offer.meets(needs) for offer in offers):
        return None
    words = {
        f"{f'{offer.count} × ' if offer.count > 1 else ''}{offer.device_name} ({offer.device_kind})" for offer in offers
    }
    have = ", ".join(sorted(words))
    return f"no machine has {needs.describe()}; there are {have}"
