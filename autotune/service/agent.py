"""Run the searches of a service on one device of this machine: claim, run and report them, until stopped.

The search runs in the main thread, as on the command line. A thread beside it sends what happens and keeps the lease;
where the search is to end, that thread sends this process a SIGTERM, which ends a search at once.

Between searches an idle trial server is kept, so that a search need not wait for the imports of torch and transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from autotune import __version__
from autotune.core.candidate import Candidate, Document
from autotune.core.errors import AutotuneError, PromiseMissedError, ServiceError, StorageError, TrialServerError
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, OutOfMemory
from autotune.core.placement import Placement
from autotune.core.schema import encode
from autotune.devices import Device, find_device
from autotune.estimate.history import History
from autotune.execution import WarmServer
from autotune.results.report import load_report
from autotune.service.client import Client
from autotune.service.listed_code import Listed
from autotune.service.problems import problem_of
from autotune.service.requests import search_request
from autotune.service.verifications import VERIFIES
from autotune.store.opening import open_store
from autotune.store.records import Stage, StudyRecord, TrialRecord
from autotune.store.transfer import make_way, read_study, take_in_all, take_in_study
from autotune.tuning.allowed import check_request
from autotune.tuning.narrator import Narrator
from autotune.tuning.prepare import Prepared
from autotune.tuning.run import log_folder, run_search
from autotune.verify.json_document import verification_document
from autotune.verify.target import placement_of, target_of
from autotune.verify.text import verification_lines
from autotune.verify.throughput import verify

_CLAIM_WAIT_SECONDS = 20.0
_HEARTBEAT_SECONDS = 5.0
_STATUS_SECONDS = 0.5
"""The running step changes often; it is not sent more often than this."""
_RETRY_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
"""How long a service that is away, or whose database is, is asked again."""

WhyEnded = Literal["cancelled", "lost"]


class Teller(Narrator):
    """An observer that hands on what happens as events, besides the lines that a terminal would show."""

    def __init__(
        self,
        send: Callable[[str, Document], None],
        show: Callable[[Document], None],
        record: Callable[[TrialRecord | None], None] | None = None,
    ) -> None:
        self._send = send
        self._record = record or (lambda trial: None)
        self._show = show
        super().__init__(lambda text, style: send("line", {"text": text, "style": style}))

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """Tell what is searched, and under which ceiling."""
        super().begins(prepared, study)
        device = prepared.request.device
        self._record(None)
        self._send(
            "study",
            {
                "study": study.name,
                "model": prepared.request.workload.model,
                "objective": prepared.request.objective,
                "effective_batch": prepared.request.effective_batch,
                "device": device.name,
                "cap_bytes": prepared.ceiling.cap_bytes,
                "line_bytes": prepared.ceiling.line_bytes,
            },
        )

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """Tell which trial begins."""
        super().trial_begins(number, candidate, stage)
        self._send("trial_begins", {"number": number, "stage": stage, "description": candidate.describe()})
        self._show(self.status())

    def progress(self, number: int, progress: Progress) -> None:
        """Show the phase or the step."""
        super().progress(number, progress)
        self._show(self.status())

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """Tell how a trial ended."""
        super().trial_ends(trial, history)
        self._record(trial)
        outcome = trial.outcome
        measured = outcome.measurement if isinstance(outcome, Completed) else None
        peaks = measured or (outcome if isinstance(outcome, OutOfMemory) else None)
        self._send(
            "trial",
            {
                "number": trial.number,
                "stage": trial.stage,
                "state": trial.state,
                "description": trial.candidate.describe(),
                "candidate": trial.candidate.parameters(),
                "samples_per_second": measured.samples_per_second if measured else None,
                "relative_spread": measured.known_spread if measured else None,
                "peak_reserved_bytes": peaks.peak_reserved_bytes if peaks else None,
                "seconds": trial.seconds,
            },
        )
        self._show(self.status())


class _Lease:
    """A search that was claimed: sends its events and its heartbeats from a thread of its own."""

    def __init__(self, client: Client, agent_id: str, job: Document) -> None:
        self._client = client
        self._path = f"/v1/agents/{agent_id}/jobs/{job['id']}"
        self._token = str(job["lease_token"])
        self._changed = threading.Condition()
        self._events: list[Document] = []
        self._records: list[Document] = []
        self._logs: dict[str, str] = {}
        self._status: Document | None = None
        self._is_over = False
        self.why_ended: WhyEnded | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def send(self, kind: str, document: Document) -> None:
        """Send an event soon."""
        with self._changed:
            self._events.append({"kind": kind, "document": document})
            self._changed.notify()

    def record(self, document: Document, logs: dict[str, str]) -> None:
        """Send what was recorded with the next event."""
        with self._changed:
            self._records.append(document)
            self._logs |= logs

    def fetch_records(self) -> Document:
        """Return what the service has recorded of the search, and of others that it may reuse.

        It is asked again while its database is away: that is no reason for the search to fail.
        """
        query = {"lease_token": self._token}
        found: Document = _until_heard(lambda: self._client.request("GET", f"{self._path}/records", query=query))
        return found

    def show(self, status: Document) -> None:
        """Show what runs now, soon."""
        with self._changed:
            self._status = status

    def release(self) -> None:
        """Stop the heartbeats, before the end of the search is told; what is left to send is sent with it."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def end(self, state: str, problem: Document | None = None, why: str = "") -> None:
        """Tell the service how the search ended; it is tried until the service answers.

        A search has not finished whose records were refused. Where the service stays away its lease runs out, and
        another agent goes on with it.
        """
        while self._events or self._records:
            refused = self._post_until_heard("events", self._take_news())
            if refused is not None and _is_passing(refused):
                return
            if refused is not None and state == "finished":
                state, problem = "failed", problem_of(refused)
        self._post_until_heard("end", {"state": state, "problem": problem, "why": why})

    def _post_until_heard(self, name: str, body: Document) -> AutotuneError | None:
        """Send something until the service answers; return why it was refused, or why there was no answer for long."""
        try:
            _until_heard(lambda: self._post(name, body))
        except AutotuneError as error:
            # Its lease was lost, or the service is gone for good: the search then belongs to another.
            return error
        return None

    def _post(self, name: str, body: Document) -> Any:
        return self._client.request("POST", f"{self._path}/{name}", {"lease_token": self._token, **body})

    def _take_news(self) -> Document:
        """Return what is to be sent, at most as much as one request may hold."""
        with self._changed:
            taken, self._events = self._events[:_MOST_EVENTS], self._events[_MOST_EVENTS:]
            records, self._records = self._records[:_MOST_RECORDS], self._records[_MOST_RECORDS:]
            logs, self._logs = self._logs, {}
        return {"events": taken, "records": records, "logs": logs}

    def _give_back(self, news: Document) -> None:
        """Keep for later what could not be sent."""
        with self._changed:
            self._events[:0] = news["events"]
            self._records[:0] = news["records"]
            self._logs = {**news["logs"], **self._logs}

    def _run(self) -> None:
        beat = status_sent = time.monotonic()
        shown: Document | None = None
        while True:
            with self._changed:
                if not self._events and not self._is_over:
                    self._changed.wait(_STATUS_SECONDS)
                if self._is_over:
                    return
                status = self._status
            moment = time.monotonic()
            news = self._take_news()
            is_news = status != shown and moment - status_sent >= _STATUS_SECONDS
            if not news["events"] and not is_news and moment - beat < _HEARTBEAT_SECONDS:
                continue
            try:
                if news["events"]:
                    self._post("events", {**news, "status": status})
                if moment - beat >= _HEARTBEAT_SECONDS or (is_news and not news["events"]):
                    if self._post("heartbeat", {"status": status})["cancel"]:
                        self._stop("cancelled")
                        return
                    beat = moment
                shown, status_sent = status, moment
            except ServiceError as error:
                if error.status in (404, 409, 410):
                    self._stop("lost")
                    return
                # The service is away: the search goes on, and what happened is told once it is back.
                self._give_back(news)
                time.sleep(_RETRY_SECONDS)
            except AutotuneError:
                self._give_back(news)
                time.sleep(_RETRY_SECONDS)

    def _stop(self, why: WhyEnded) -> None:
        with self._changed:
            if self._is_over:
                return
            self.why_ended = why
            os.kill(os.getpid(), signal.SIGTERM)


# Status 0 means that nobody answered.
_PASSING = (0, 429, 500, 502, 503, 504)
_MOST_EVENTS = 200
_MOST_RECORDS = 20
# Of each trial, for a service that cannot read this machine's files.
_MOST_LOG_BYTES = 16 * 1024


# What a search imports when it needs it.
_OF_A_SEARCH = ("autotune.tuning.loop", "autotune.execution.gpu_monitor")


class Agent:
    """Runs searches on one device, or on several at once, until it is told to stop.

    ``storage`` is the database that its searches are recorded in. ``is_shared`` says that it is the service's own.
    """

    def __init__(
        self, client: Client, devices: Sequence[Device], storage: str, say: Callable[[str], None], *, is_shared: bool,
        codes: Listed = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._client = client
        self._devices = tuple(devices)
        self._device = devices[0]
        self._storage = storage
        self._say = say
        self._is_shared = is_shared
        self._codes = codes
        self._is_stopping = False
        self._is_searching = False
        self._id: str | None = None
        self._lease: _Lease | None = None
        self._warm = WarmServer()

    def run(self) -> None:
        """Claim and search until a SIGTERM, SIGINT or SIGHUP. A search that runs then goes back to the queue."""
        is_waiting = False
        with self._warm, self._signals():
            self._warm_up()
            while not self._is_stopping:
                try:
                    self._id = self._id or self._register()
                    job = self._claim()
                except (ServiceError, StorageError) as error:
                    is_unknown = isinstance(error, ServiceError) and error.status == 404
                    if not is_unknown and not _is_passing(error):
                        raise
                    self._id = None if is_unknown else self._id
                    if not is_waiting:
                        self._say(f"{error.message}; asking again every {_RETRY_SECONDS:g} s")
                    is_waiting = True
                    self._pause()
                    continue
                except KeyboardInterrupt:
                    break
                is_waiting = False
                if job is not None:
                    self._search(job)
                    self._warm.prepare(Placement.of(self._device), os.environ)
        if self._id is not None:
            with contextlib.suppress(ServiceError):
                self._client.request("DELETE", f"/v1/agents/{self._id}")

    def _warm_up(self) -> None:
        """Have the imports of a search done before there is one, here and in a trial server."""
        self._warm.prepare(Placement.of(self._device), os.environ)
        for name in _OF_A_SEARCH:
            importlib.import_module(name)

    def _register(self) -> str:
        device, host = self._device, platform.node()
        label = ", ".join(each.label for each in self._devices)
        offer = {**device.document(), "count": len(self._devices)}
        told = {"name": f"{host} {label}"[:200], "host": host, "version": __version__, "device": offer}
        found = self._client.request("POST", "/v1/agents", told)
        self._say(f"agent of {label} ({device.name}) connected to {self._client.url}")
        return str(found["id"])

    def _claim(self) -> Document | None:
        answer = self._client.request(
            "POST", f"/v1/agents/{self._id}/claim", {}, query={"wait_seconds": _CLAIM_WAIT_SECONDS},
            timeout_seconds=_CLAIM_WAIT_SECONDS + 20,
        )  # fmt: skip
        job: Document | None = answer["job"]
        return job

    def _pause(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(_RETRY_SECONDS)

    def _search(self, job: Document) -> None:
        assert self._id is not None
        lease = self._lease = _Lease(self._client, self._id, job)
        self._say(f"search {job['study']} begins")
        state, problem, why = "failed", None, ""
        try:
            self._is_searching = True
            if VERIFIES in job["options"]:
                self._verify(job, lease)
                state = "finished"
            else:
                # A Ctrl-C during a trial ends the search after it.
                state = "finished" if self._run_search(job, lease).state == "finished" else "queued"
        except KeyboardInterrupt:
            state, why = "queued", "its agent ended"
        except AutotuneError as error:
            problem = problem_of(error)
        except Exception as error:
            self._say(f"search {job['study']} failed: {type(error).__name__}: {error}")
            problem = problem_of(TrialServerError(f"the agent failed: {type(error).__name__}: {error}"[:500]))
        finally:
            self._is_searching = False
            lease.release()
        if lease.why_ended == "cancelled":
            state, problem = "cancelled", None
        self._is_stopping |= state == "queued" and lease.why_ended is None
        if lease.why_ended != "lost":
            lease.end(state, problem, why or "its agent ended")
        self._say(f"search {job['study']}: {'lease lost' if lease.why_ended == 'lost' else state}")

    def _run_search(self, job: Document, lease: _Lease) -> StudyRecord:
        devices = [find_device(device.uuid) for device in self._devices]
        request = search_request(job["options"], devices, str(job["study"]), self._codes)
        check_request(request)
        if self._is_shared:
            record, _ = run_search(request, self._storage, Teller(lease.send, lease.show), wait=True, warm=self._warm)
            return record
        study, found = str(job["study"]), lease.fetch_records()
        with open_store(self._storage) as store:
            engine, own = store.engine, found["own"]
            make_way(engine, study, own)
            if own:
                take_in_study(engine, own)
            take_in_all(engine, found["related"])

            def record_trial(trial: TrialRecord | None) -> None:
                document = read_study(engine, study, [trial.id] if trial else [])
                if document is not None:
                    lease.record(document, _log_of(trial))

            try:
                teller = Teller(lease.send, lease.show, record_trial)
                record, _ = run_search(request, self._storage, teller, wait=True, warm=self._warm)
                return record
            finally:
                # Whatever was missed on the way: how the study ended, trials that were interrupted.
                whole = read_study(engine, study)
                if whole is not None:
                    lease.record(whole, {})

    def _verify(self, job: Document, lease: _Lease) -> None:
        """Run a stock Trainer as a study exports it, and tell what it came to."""
        study, found = str(job["options"][VERIFIES]), None if self._is_shared else lease.fetch_records()
        with open_store(self._storage) as store:
            if found is not None and found["own"]:
                make_way(store.engine, study, found["own"])
                take_in_study(store.engine, found["own"])
            report = load_report(store, study)
        # Other devices of this machine are those of other agents.
        target = target_of(report, placement_of(report, [find_device(device.uuid) for device in self._devices]))

        def say(text: str) -> None:
            lease.send("line", {"text": text, "style": None})

        say(f"training {report.workload['model']} for {job['options']['steps']} steps with a stock Trainer")
        log_path = log_folder(self._storage, study) / "verify.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        again = bool(job["options"].get("again"))
        verification = verify(target, int(job["options"]["steps"]), log_path, again=again, wait=True, note=say)
        missed = None
        try:
            verification.check()
        except PromiseMissedError as error:
            missed = problem_of(error)
        told = encode(verification_document(verification))
        lines = verification_lines(verification)
        lease.send("verification", {"verification": told, "problem": missed, "lines": lines})

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            # One that ends a search alone, sent from within, may come when the search is over.
            self._is_stopping |= not self._is_from_within()
            if self._is_searching or not self._is_from_within():
                raise KeyboardInterrupt

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _is_from_within(self) -> bool:
        return self._lease is not None and self._lease.why_ended is not None


def _is_passing(error: AutotuneError) -> bool:
    """Return whether the service may answer otherwise in a while: it is away, or its database is locked or full."""
    return isinstance(error, StorageError) or (isinstance(error, ServiceError) and error.status in _PASSING)


def _until_heard(ask: Callable[[], Any]) -> Any:
    """Return the service's answer; while it is away, ask again for a while, then raise its last error."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except AutotuneError as error:
            if not _is_passing(error) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _log_of(trial: TrialRecord | None) -> dict[str, str]:
    """Return the end of a trial's log, by the trial's number."""
    if trial is None or trial.log_path is None:
        return {}
    try:
        text = Path(trial.log_path).read_bytes()[-_MOST_LOG_BYTES:].decode("utf-8", "replace")
    except OSError:
        return {}
    return {str(trial.number): text}
