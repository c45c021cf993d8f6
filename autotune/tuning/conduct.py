"""A search between its first process and its result: what is known of machine and data, the search, Ctrl-C."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.errors import NoResultError, NothingFitsError
from autotune.devices.presence import Presence
from autotune.execution import LocalRunner
from autotune.execution.gpu_monitor import SharedRunner, WatchedRunner
from autotune.results.report import Report, load_report
from autotune.store import Store, StudyRecord, open_store
from autotune.tuning.answers import KeptPredictions, inspection_key
from autotune.tuning.dataset import read_data
from autotune.tuning.loop import Interruption, Observer, Search
from autotune.tuning.prepare import Prepared, forecast_of, prepare
from autotune.tuning.request import SearchRequest


def conduct(
    request: SearchRequest,
    runner: LocalRunner,
    store: Store | None,
    storage: str,
    observer: Observer,
    folder: Path,
) -> tuple[StudyRecord, Report]:
    """The study at its end and its report; a ``store`` that is not there yet is made at ``storage``.

    It is made when the request is known to be one that can be run. Logs are kept in ``folder``.
    """
    with contextlib.ExitStack() as stack:
        presence = stack.enter_context(Presence(request.device.uuid))
        request = read_data(request, runner, folder.parent, observer.note)
        key = inspection_key(request.device, request.workload)
        remembered = store.answers.find(key) if store is not None and key is not None else None
        facts = remembered or _inspect(request, runner, observer)
        prepared = prepare(request, facts)
        store = store or stack.enter_context(open_store(storage))
        if remembered is None and key is not None:
            store.answers.keep(key, "inspection", facts)
        record = _search(prepared, runner, store, observer, folder, presence)
        return record, load_report(store, record.name)


def _inspect(request: SearchRequest, runner: LocalRunner, observer: Observer) -> Document:
    """What a process with torch says of the machine and the model; the user's own code is run up to its training."""
    source = request.workload.source
    if source is None:
        return runner.inspect()
    observer.note(f"running {source.name} up to its training …")
    return runner.inspect(request.trial_timeout_seconds)


def _search(
    prepared: Prepared, runner: LocalRunner, store: Store, observer: Observer, folder: Path, presence: Presence
) -> StudyRecord:
    """The search itself; where it ends without a result, where its trials can be seen all the same."""
    interruption = Interruption()
    try:
        with _interrupts(interruption, observer):
            forecast = forecast_of(prepared, runner, KeptPredictions(store.answers, prepared.request.workload))
            device, context_bytes = prepared.request.device, prepared.ceiling.context_bytes
            watched = WatchedRunner(runner, device, context_bytes, observer.note, lambda: interruption.asked)
            trials = watched if device.kind == "cuda" else SharedRunner(runner, presence)
            return Search(prepared, trials, store, observer, folder, interruption, forecast=forecast).run()
    except (KeyboardInterrupt, NothingFitsError, NoResultError) as error:
        study = shlex.quote(str(prepared.request.study))
        on = f"autotune resume {study} goes on with it"
        next_step = on if isinstance(error, KeyboardInterrupt) else f"autotune show {study} lists them"
        observer.note(f"every trial is recorded in the study {study}; {next_step}")
        raise


@contextlib.contextmanager
def _interrupts(interruption: Interruption, observer: Observer) -> Iterator[None]:
    """The first Ctrl-C ends the search after the running trial, the second at once, and no third disturbs that.

    What batch systems and closing terminals send, SIGTERM and SIGHUP, ends it at once. Only the main thread may
    take signals; a search in another one is ended by whoever started that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked
        asked += 1 if number == signal.SIGINT or asked > 1 else 2 - asked
        interruption.asked = True
        if asked == 1:
            # Where the signal came in the middle of a print, another one is refused.
            with contextlib.suppress(RuntimeError):
                observer.note("ending after the running trial; press Ctrl-C again to end at once")
        elif asked == 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
