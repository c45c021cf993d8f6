"""Run searches handed over on standard input, one after the other, and say what happens over a pipe.

The process of an engine: ``python -m autotune.engine.child FD [DEVICE]``, which writes to FD. Each line is a JSON
object. It ends when its standard input does, and the search that runs then with it.

The search runs in the main thread, as on the command line. A thread reads standard input; where the search is to end,
it sends this process a SIGTERM, which ends a search at once. Between searches an idle trial server is kept, so that a
search need not wait for the imports of torch and transformers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from autotune.core.candidate import Candidate, Document
from autotune.core.device import Device
from autotune.core.errors import AutotuneError, PromiseMissedError, StorageError, TrialServerError
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, OutOfMemory
from autotune.core.pipes import LineReader
from autotune.core.placement import Placement
from autotune.core.schema import decode, encode
from autotune.devices.listing import find_device, list_devices
from autotune.engine.work import Work, check_paths, search_request
from autotune.estimate.history import History
from autotune.execution import WarmServer
from autotune.store.opening import open_store
from autotune.store.records import Stage, StudyRecord, TrialRecord
from autotune.store.repository import Store
from autotune.store.transfer import read_study, take_in_study
from autotune.tuning.allowed import check_request
from autotune.tuning.narrator import Narrator
from autotune.tuning.prepare import Prepared
from autotune.tuning.run import log_folder, run_search

_STATUS_SECONDS = 0.5
"""The running step changes often; a status is sent no more often than this."""
# The end of a trial's log is sent to engines that cannot read this machine's files.
_MOST_LOG_BYTES = 16 * 1024
# Modules that a search imports late, imported here before there is a search.
_OF_A_SEARCH = ("autotune.tuning.loop", "autotune.execution.gpu_monitor")

Say = Callable[[str, Document], None]
"""Sends a message of some kind about the work."""


class Teller(Narrator):
    """An observer of a search that sends its events as messages, besides the lines that a terminal would show."""

    def __init__(self, say: Say, record: Callable[[TrialRecord | None], None] = lambda trial: None) -> None:
        """``record`` is called with each trial that ended, and with ``None`` at the start, to send what is recorded."""
        self._say_message = say
        self._record = record
        self._shown_at = -_STATUS_SECONDS
        super().__init__(lambda text, style: say("line", {"text": text, "style": style}))

    def waits(self, text: str | None) -> None:
        """Report what the search waits for before it begins."""
        super().waits(text)
        self._send_status(is_urgent=True)

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """Report what is searched, and its memory ceiling."""
        super().begins(prepared, study)
        device = prepared.request.device
        self._record(None)
        self._say_message(
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
        """Report which trial begins."""
        super().trial_begins(number, candidate, stage)
        self._say_message("trial_begins", {"number": number, "stage": stage, "description": candidate.describe()})
        self._send_status(is_urgent=True)

    def progress(self, number: int, progress: Progress) -> None:
        """Report the phase or step of a trial."""
        super().progress(number, progress)
        self._send_status()

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """Report how a trial ended."""
        super().trial_ends(trial, history)
        self._record(trial)
        outcome = trial.outcome
        measured = outcome.measurement if isinstance(outcome, Completed) else None
        peaks = measured or (outcome if isinstance(outcome, OutOfMemory) else None)
        self._say_message(
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
        self._send_status(is_urgent=True)

    def _send_status(self, *, is_urgent: bool = False) -> None:
        """Send what runs now, unless that was sent a moment ago and nothing else than a step has changed since."""
        now = time.monotonic()
        if is_urgent or now - self._shown_at >= _STATUS_SECONDS:
            self._shown_at = now
            self._say_message("status", self.status())


class _Child:
    """Reads searches and verifications from ``source``, runs one at a time, and writes messages to ``sink``."""

    def __init__(self, source: int, sink: TextIO, device: Device | None) -> None:
        self._source, self._sink, self._device = source, sink, device
        self._warm = WarmServer()
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        """Work to do, in order; ``None`` ends the process."""
        self._guard = threading.Lock()
        self._current: str | None = None
        """The id of the work that may be interrupted."""
        self._cancelled: set[str] = set()
        self._is_interruptible = False
        """Whether a signal may raise ``KeyboardInterrupt`` now."""
        self._is_stopping = False

    def run(self) -> None:
        """Do the work that arrives until standard input closes or a signal arrives."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        with self._warm:
            if self._device is not None:
                self._warm.prepare(Placement.of(self._device), os.environ)
            for name in _OF_A_SEARCH:
                importlib.import_module(name)
            self._send("", "ready", {})
            while not self._is_stopping and (work := self._waiting.get()) is not None:
                self._do(work)
                if self._device is not None and not self._is_stopping:
                    self._warm.prepare(Placement.of(self._device), os.environ)

    def _on_signal(self, number: int, frame: object) -> None:
        """Interrupt the current work and, unless the signal is to cancel this work alone, stop afterwards."""
        if self._current not in self._cancelled:
            # To cancel only the current work, this process sends itself the signal, see ``_take``.
            self._is_stopping = True
            self._waiting.put(None)
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _read(self) -> None:
        """Take messages from standard input; once it closes, end the running work and this process."""
        # Not sys.stdin: Python aborts when it exits while another thread holds the lock of its buffer.
        with contextlib.suppress(OSError):
            for line in LineReader(self._source).lines():
                self._take(json.loads(line))
        self._is_stopping = True
        self._waiting.put(None)
        with self._guard:
            if self._current is not None:
                os.kill(os.getpid(), signal.SIGTERM)

    def _take(self, message: Document) -> None:
        """Queue the work of a message, or cancel the work that it names: by a signal where that runs now."""
        if "work" in message:
            self._waiting.put(decode(message["work"], Work))
            return
        work_id = str(message["cancel"])
        with self._guard:
            self._cancelled.add(work_id)
            if self._current == work_id:
                os.kill(os.getpid(), signal.SIGTERM)

    def _send(self, work_id: str, kind: str, document: Document) -> None:
        """Write a message to the process that started this one."""
        self._sink.write(json.dumps({"work": work_id, "kind": kind, "document": document}) + "\n")
        self._sink.flush()

    def _do(self, work: Work) -> None:
        """Run a search or a verification, and send how it ended as the last message. Never raises an error of it."""
        say = functools.partial(self._send, work.id)
        end: Document = {"state": "failed", "problem": None}
        try:
            with self._guard:
                self._current = work.id
            self._is_interruptible = True
            if work.id in self._cancelled or self._is_stopping:
                raise KeyboardInterrupt
            # A Ctrl-C during a trial ends the search after it.
            end["state"] = "finished" if self._run(work, say) else "interrupted"
        except KeyboardInterrupt:
            end["state"] = "interrupted"
        except AutotuneError as error:
            if isinstance(error, StorageError) and error.may_pass and work.storage is not None:
                # A server restarts, or a disk is full. The service shares the database, and starts another attempt once
                # it can record the loss of this one.
                end |= {"state": "lost", "why": error.message}
            else:
                end["problem"] = error.document()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            message = f"the process of the search failed: {type(error).__name__}: {error}"
            end["problem"] = TrialServerError(message[:500], "see the log of the service").document()
        finally:
            self._is_interruptible = False
            with self._guard:
                # Blocking no signal has Python handle a pending one now. Later, without a current work, a signal that
                # cancels it would count as one that stops the process.
                signal.pthread_sigmask(signal.SIG_BLOCK, ())
                self._current = None
        say("end", end)

    def _run(self, work: Work, say: Say) -> bool:
        """Do the work in its ``storage``, or in a temporary database whose records are sent; return if it finished."""
        if work.storage is not None:
            if work.kind == "verify":
                return _verify(work, work.storage, self._devices(work), say)
            return self._search(work, work.storage, Teller(say))
        with tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True) as folder:
            storage = str(Path(folder) / "autotune.db")
            with open_store(storage) as store:
                for document in work.studies:
                    take_in_study(store, document)
                if work.kind == "verify":
                    return _verify(work, storage, self._devices(work), say)
                try:
                    return self._search(work, storage, Teller(say, lambda trial: _send(store, work.study, trial, say)))
                finally:
                    # All records, with what was not sent before: how the study ended, trials that were interrupted.
                    records = read_study(store, work.study)
                    if records is not None:
                        say("record", records)

    def _search(self, work: Work, storage: str, teller: Teller) -> bool:
        """Run or resume a search; return whether it finished."""
        devices = self._devices(work)
        if work.folders is not None:
            check_paths(work.options, [Path(folder) for folder in work.folders])
        if work.kind == "resume":
            request = _resumed(work, storage, devices)
        else:
            if work.code is not None and Path(work.code.folder).is_dir():
                os.chdir(work.code.folder)
            request = search_request(work.options, devices, work.study, work.code)
            check_request(request)
        wait = teller.waits if work.wait else None
        record, _ = run_search(request, storage, teller, wait=wait, warm=self._warm)
        return record.state == "finished"

    @staticmethod
    def _devices(work: Work) -> list[Device]:
        """Return the devices of the work, by default all GPUs or the CPU."""
        if work.devices:
            return [find_device(uuid) for uuid in work.devices]
        seen = list_devices()
        return [device for device in seen if device.kind == "cuda"] or list(seen[:1])


def _send(store: Store, study: str, trial: TrialRecord | None, say: Say) -> None:
    """Send the record of a study and, where a ``trial`` is given, that trial's record and the end of its log."""
    document = read_study(store, study, [trial.id] if trial else [])
    if document is not None:
        say("record", document)
    if trial is None or trial.log_path is None:
        return
    try:
        log = Path(trial.log_path).read_bytes()[-_MOST_LOG_BYTES:]
    except OSError:
        return
    say("log", {"number": trial.number, "text": log.decode("utf-8", "replace")})


def _resumed(work: Work, storage: str, devices: list[Device]) -> Any:
    """Return the request that resumes the recorded study of some work on these devices, with the work's limits."""
    from autotune.tuning.studies import recorded_request

    options = work.options
    with open_store(storage, create=False) as store:
        limits = {name: options.get(name) for name in ("trials", "time_budget", "trial_timeout")}
        several = devices if len(devices) > 1 else ()
        return recorded_request(
            store, work.study, devices[0].uuid, limits, several, parallel=bool(options.get("parallel"))
        )


def _verify(work: Work, storage: str, devices: list[Device], say: Say) -> bool:
    """Run a stock Trainer with a study's exported arguments and send its result; return ``True``, also for a miss."""
    from autotune.results.report import load_report
    from autotune.verify.target import placement_of, target_of
    from autotune.verify.throughput import verification_document, verification_lines, verify

    with open_store(storage) as store:
        report = load_report(store, work.study)
    # Only devices of this work: other searches may use the others of this machine.
    target = target_of(report, placement_of(report, devices))
    teller = Teller(say)
    teller.note(f"training {report.workload['model']} for {work.options['steps']} steps with a stock Trainer")
    log_path = log_folder(storage, work.study) / "verify.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    wait = teller.waits if work.wait else None
    verification = verify(target, work.options.get("steps"), log_path, wait=wait, note=teller.note)
    missed = None
    try:
        verification.check()
    except PromiseMissedError as error:
        missed = error.document()
    document = encode(verification_document(verification))
    say("verification", {"verification": document, "problem": missed, "lines": verification_lines(verification)})
    return True


def main(fd: int, uuid: str | None) -> None:
    """Do an engine's work on the device with a ``uuid``, else on those of the work; write messages to ``fd``."""
    os.set_inheritable(fd, False)
    sink = os.fdopen(fd, "w", encoding="utf-8")
    device = find_device(uuid) if uuid is not None else None
    # A broken pipe means that nobody reads any more.
    with contextlib.suppress(BrokenPipeError):
        _Child(0, sink, device).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
