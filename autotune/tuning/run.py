"""Run a search from its request to its report: take the locks, start the trial server, read data, prepare, search.

Optuna, SQLAlchemy and what uses them are imported within functions, after the trial server was started: both processes
then import at the same time. ``dry_run_document`` says what a search would do, without training or writing anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.candidate import Document
from autotune.core.code_interface import PROTECTED
from autotune.core.dataset_spec import describe_lengths, describe_packing
from autotune.core.errors import (
    DeviceError,
    InvalidRequestError,
    NoResultError,
    NothingFitsError,
    StorageError,
    TrainingSourceError,
    TrialServerError,
)
from autotune.core.inspection import Inspection
from autotune.core.schema import encode
from autotune.core.workload import Workload
from autotune.devices.lock import Presence
from autotune.execution import Executor, LocalExecutor, TrialServer, WarmServer
from autotune.models.tasks import max_seq_len
from autotune.store.location import resolve_location, shown_location
from autotune.tuning.exclusive import Wait, hold_lease, take_turn
from autotune.tuning.interruption import Interruption, interrupted_by_signals
from autotune.tuning.request import SearchRequest

if TYPE_CHECKING:
    from autotune.results.report import Report
    from autotune.store.records import StudyRecord
    from autotune.store.repository import Store
    from autotune.tuning.loop import Observer
    from autotune.tuning.prepare import Prepared

# Limit for a process that runs own code up to its training, which may load a checkpoint of unknown size before.
_OWN_CODE_SECONDS = 300.0
_ANOTHER_FILE = "make it writable, or choose another file with --storage"


def run_search(
    request: SearchRequest,
    storage: str,
    observer: Observer,
    *,
    wait: Wait | None = None,
    warm: WarmServer | None = None,
) -> tuple[StudyRecord, Report]:
    """Run the search to its end; return the study and its report. ``warm`` may hold a started trial server.

    Where another search has locked a device or the study, its end is waited for, which is told to ``wait``; without
    ``wait`` that is an error. An existing database is opened first, so that a bad one is reported before a process is
    started. A missing one is created last, when the request is known to be valid: an error leaves no new file behind.
    """
    location = resolve_location(storage)
    path = location.path
    with contextlib.ExitStack() as stack:
        store = None
        if path is not None and not os.path.lexists(path):
            _check_can_be_made(path, storage)
        else:
            store = _opened(stack, storage)

        other_studies: dict[str, str] = {}
        """Why a study is not continued, by the name that was tried for this search."""

        def is_taken(name: str) -> bool:
            """Return whether a study's name belongs to a running search or to a study with other settings."""
            from autotune.store.leases import name_of_study
            from autotune.tuning.studies import what_differs

            nonlocal store
            if store is None and path is not None and path.exists():
                # Another search has created the database since.
                store = _opened(stack, storage)
            if store is None:
                return False
            known = store.study(name)
            if known is not None and (why := what_differs(store, known, request)) is not None:
                other_studies[name] = why
                return True
            return store.leases.holder(name_of_study(name)) is not None

        # Two names of one file are the same study. A URL may contain a password, which its label leaves out.
        database = os.path.realpath(path) if path is not None else location.label
        name = request.study or functools.partial(study_names, request)
        study, has_waited = stack.enter_context(
            take_turn(request.devices, name, database, wait=wait, note=observer.note, is_taken=is_taken)
        )
        if other_studies:
            other, why = next(iter(other_studies.items()))
            observer.note(f"this is not the search of the study {other} ({why}), and is named {study}")
        request = dataclasses.replace(request, study=study)
        folder = log_folder(storage, study)
        if store is not None:
            has_waited |= stack.enter_context(hold_lease(store, study, wait=wait))
            from autotune.tuning.studies import check_source

            check_source(store, study, request)
        if has_waited:
            # The memory that another search held may be free by now.
            request = request.with_current_memory()
        stack.enter_context(_log_folder_made(folder))
        place = stack.enter_context(on_this_machine(request, folder, observer.note, warm))
        if store is None or request.fresh:
            # No answers are stored, so that the servers are needed. This process imports while they do.
            for server in place.servers:
                server.start(inspects=server is place.servers[0])
            importlib.import_module("autotune.store.opening")
            importlib.import_module("autotune.tuning.loop")

        def make_store() -> Store:
            """Open the database and hold the lease of the study."""
            made = _opened(stack, storage)
            stack.enter_context(hold_lease(made, study, wait=wait))
            return made

        return _prepare_and_search(request, place, store, make_store, observer, folder)


@dataclass(frozen=True)
class Place:
    """The trial servers of a search on this machine, and a function that makes its executor."""

    servers: Sequence[TrialServer]
    make_executor: Callable[[int, Interruption], Executor]
    """Makes the executor of trials from the bytes of a CUDA context and the interruption that ends waits for memory."""


@contextlib.contextmanager
def on_this_machine(
    request: SearchRequest, folder: Path, note: Callable[[str], None], warm: WarmServer | None
) -> Iterator[Place]:
    """Yield the place of a search here: a trial server for each slot, not started yet, with logs in ``folder``.

    Within the block, other searches on the machine see this one. ``warm`` may hold a started server.
    """
    with contextlib.ExitStack() as stack:
        # Each server has a log of its own. The first may take the process that ``warm`` holds.
        servers = []
        for number, placement in enumerate(request.slots):
            starting = f"starting a process for trials on {placement.label} ({request.device.name}) …"
            server = TrialServer(
                placement, request.workload, folder if number == 0 else folder / f"server-{number}",
                functools.partial(note, starting), warm if number == 0 else None,
                protection="none" if request.unprotected else None,
            )  # fmt: skip
            servers.append(stack.enter_context(server))
        presence = stack.enter_context(Presence(request.device.uuid))
        for uuid in {device.uuid for device in request.devices} - {request.device.uuid}:
            stack.enter_context(Presence(uuid))

        def make_executor(context_bytes: int, interruption: Interruption) -> Executor:
            from autotune.execution.gpu_monitor import WatchedExecutor

            shared = presence if request.device.kind == "cpu" else None
            return WatchedExecutor(LocalExecutor(servers), context_bytes, note, lambda: interruption.asked, shared)

        yield Place(servers, make_executor)


def _prepare_and_search(
    request: SearchRequest,
    place: Place,
    store: Store | None,
    make_store: Callable[[], Store],
    observer: Observer,
    folder: Path,
) -> tuple[StudyRecord, Report]:
    """Read the data, inspect machine and model, and search; return the study and its report.

    Without a ``store``, ``make_store`` creates it once the request is known to be valid. Logs go to ``folder``.
    """
    from autotune.results.report import load_report
    from autotune.tuning.answer_cache import inspection_key
    from autotune.tuning.prepare import prepare

    request = read_data(request, place.servers, folder.parent, observer.note)
    key = inspection_key(request.device, request.workload, request.ranks)
    remembered = store.answers.find(key, Inspection) if store is not None and key is not None else None
    if remembered is None:
        # All servers import at the same time, not one after the other.
        for server in place.servers:
            server.start(inspects=server is place.servers[0])
    facts = remembered or _inspect(request, place.servers[0], observer)
    prepared = prepare(request, facts)
    for server in place.servers:
        # Also ends an inspection of the GPU that a remembered answer made needless.
        server.run_as_inspected(prepared.request.workload)
    store = store or make_store()
    if remembered is None and key is not None:
        store.answers.keep(key, facts)
    record = _search(prepared, place, store, observer, folder)
    return record, load_report(store, record.name)


def _inspect(request: SearchRequest, server: TrialServer, observer: Observer) -> Inspection:
    """Return the facts about machine and model from a process with torch, in which own code runs up to its training.

    What the user should know of own code is noted to the observer.
    """
    from autotune.tuning.forecast import arms_to_trace
    from autotune.tuning.own_code import note_on_engine, notes_on_lengths

    source = request.workload.source
    if source is None:
        return server.inspect()
    observer.note(f"running {source.name} up to its training …")
    facts = server.inspect(request.trial_timeout_seconds or _OWN_CODE_SECONDS, arms_to_trace(request))
    model = facts.model
    if model is not None and model.interface.protection is not None:
        observer.note(PROTECTED[model.interface.protection])
    if model is not None and (unknown := model.interface.memory_unknown):
        observer.note(f"memory is not predicted, so that trials find out what fits: {unknown}")
    if model is not None and (engine := note_on_engine(request, model)) is not None:
        observer.note(engine)
    if model is not None and model.interface.packs:
        observer.note("packing=True: what is called a sample is a row of several, and an effective batch counts rows")
    for line in notes_on_lengths(request, model.interface) if model is not None else ():
        observer.note(line)
    if model is not None and model.interface.batch_matters is not None:
        observer.note(
            f"{model.interface.batch_matters}: another per-device batch is another training; --batch-multiple N "
            "--effective-batch N keeps a batch of N samples"
        )
    return facts


def _search(prepared: Prepared, place: Place, store: Store, observer: Observer, folder: Path) -> StudyRecord:
    """Run the prepared search at a place; return its study.

    Where it ends without a result, a note says which command shows or resumes it.
    """
    from autotune.tuning.answer_cache import AnswerCache, KeptPredictions
    from autotune.tuning.forecast import forecast_of
    from autotune.tuning.look import looker_of, rehearser_of
    from autotune.tuning.loop import Search

    interruption = Interruption()
    try:
        with interrupted_by_signals(interruption, observer.note):
            kept = KeptPredictions(AnswerCache(store.answers), prepared.request.workload)
            forecast = forecast_of(prepared, place.servers[0], kept)
            executor = place.make_executor(prepared.ceiling.context_bytes, interruption)
            looker = looker_of(prepared, place.servers[0], store.answers, _OWN_CODE_SECONDS)
            rehearse = rehearser_of(prepared, place.servers[0], _OWN_CODE_SECONDS)
            return Search(
                prepared, executor, store, observer, folder, interruption,
                forecast=forecast, looker=looker, rehearse=rehearse,
            ).run()  # fmt: skip
    except (KeyboardInterrupt, DeviceError, NothingFitsError, NoResultError) as error:
        study = shlex.quote(str(prepared.request.study))
        resume = f"autotune resume {study} goes on with it"
        next_step = (
            resume if isinstance(error, KeyboardInterrupt | DeviceError) else f"autotune show {study} lists them"
        )
        observer.note(f"every trial is recorded in the study {study}; {next_step}")
        raise


def _opened(stack: contextlib.ExitStack, storage: str) -> Store:
    """Open the database; the stack closes it."""
    from autotune.store.opening import open_store

    return stack.enter_context(open_store(storage))


def log_folder(storage: str, study: str) -> Path:
    """Return the folder for the logs of a study's processes, beside its database."""
    path = resolve_location(storage).path
    return (path.parent if path is not None else Path("studies")).absolute() / "logs" / study


def runs_file(storage: str, study: str) -> Path:
    """Return the path of the file that records trainings with a study's winner, one a line."""
    return log_folder(storage, study) / "runs.jsonl"


def trial_log_path(storage: str, study: str, number: int) -> Path:
    """Return the log file of a study's trial."""
    return log_folder(storage, study) / f"trial-{number:04d}.log"


def keep_trial_log(storage: str, study: str, log: Document) -> None:
    """Write the end of a trial's log that another machine sent. Raises ``OSError`` where that fails."""
    path = trial_log_path(storage, study, int(log["number"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(log["text"]), encoding="utf-8", errors="replace")


def study_names(request: SearchRequest) -> Iterator[str]:
    """Yield names for a new study of a request, endlessly, the best first."""
    model = request.workload.model
    if request.workload.source is not None:
        model = model.replace(".py", "")
    return free_names(model, request.effective_batch, request.objective)


def free_names(model: str, effective_batch: int | None, objective: str) -> Iterator[str]:
    """Yield names endlessly: model, effective batch and an objective other than speed, then also numbers from 2 on."""
    model = model.rstrip("/").rsplit("/", 1)[-1]
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in model)
    stem = plain.strip(".- ")[:60] or "model"
    stem += f"-{effective_batch}" if effective_batch else ""
    stem += "" if objective == "throughput" else f"-{objective}"
    yield stem
    for number in itertools.count(2):
        yield f"{stem}-{number}"


def _check_can_be_made(path: Path, label: str) -> None:
    """Raise ``StorageError`` where a new database file cannot be created."""
    try:
        folder = next(parent for parent in path.parents if parent.exists())
    except OSError as error:
        raise StorageError(f"{label} cannot be made: {error.strerror}", "choose another file with --storage") from error
    if not folder.is_dir():
        raise StorageError(f"{label} cannot be made: {folder} is not a folder", "choose another file with --storage")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{label} cannot be made: the folder {folder} cannot be written", _ANOTHER_FILE)


@contextlib.contextmanager
def _log_folder_made(path: Path) -> Iterator[None]:
    """Create the folder of a study's logs; after the block, remove it if it is empty, or no trial ran before an error.

    Raises ``StorageError`` where it cannot be created.
    """
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"no logs can be kept in {path}: {error.strerror}", _ANOTHER_FILE) from error
    try:
        yield
    except (TrialServerError, TrainingSourceError):
        # The hints of these errors name a log in this folder.
        raise
    except BaseException:
        if path in made and next(path.glob("trial-*"), None) is None:
            shutil.rmtree(path, ignore_errors=True)
            for folder in made[1:]:
                # A parent stays where something else has come into it since.
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise
    # A search that started no process wrote nothing there.
    with contextlib.suppress(OSError):
        path.rmdir()


def read_data(
    request: SearchRequest, servers: Sequence[TrialServer], logs: Path, note: Callable[[str], None]
) -> SearchRequest:
    """Return the request with the facts of its dataset, read by a worker process; unchanged without a dataset.

    The first server reads the dataset; the trials of all servers map its files. Raises ``InvalidRequestError`` where
    the dataset is invalid, too small, or padded beyond the model's limit.
    """
    data = request.workload.data
    if data is None:
        return request
    note(f"reading {data.label} …")
    folder = request.workload.data_folder(logs)
    for server in servers:
        request = dataclasses.replace(
            request, workload=server.read_data(folder, functools.partial(_check_read, request))
        )
    facts = request.workload.data.facts if request.workload.data else None
    assert facts is not None
    if facts.packed is not None:
        note(describe_lengths(facts.packed.lengths))
        note(describe_packing(facts))
    elif facts.lengths is not None:
        note(describe_lengths(facts.lengths))
    return request


def _check_read(request: SearchRequest, workload: Workload) -> None:
    """Raise ``InvalidRequestError`` where the dataset is too small for one step, or padded beyond the model's limit.

    ``workload`` has the facts of the dataset that was read.
    """
    request, data = dataclasses.replace(request, workload=workload), workload.data
    assert data is not None
    assert data.facts is not None
    facts = data.facts
    *_, smallest_multiple = request.batches.levels()
    needed = request.effective_batch or smallest_multiple
    if facts.samples < needed:
        option = request.batches.option if request.effective_batch else "--batch-multiple {}".format
        counted = "samples" if facts.packed is None else "rows"
        raise InvalidRequestError(
            f"--dataset {data.label} has {facts.samples} {counted}, less than one step of {option(needed)}",
            f"use {option(facts.samples)} or less, or more data",
        )
    limit = max_seq_len(workload.config)
    if facts.lengths is None or limit is None:
        return
    longest = max(facts.lengths.in_batches[1], facts.lengths.longest_target or 0)
    padded = data.padded(longest, workload.seq_len)
    if padded > limit:
        raise InvalidRequestError(
            f"--pad-to-multiple-of {data.pad_to_multiple_of} pads samples to {padded} tokens, more than the {limit} "
            f"positions of {workload.model}",
            f"use one that divides {limit}, or leave --pad-to-multiple-of out",
        )


def dry_run_document(request: SearchRequest, storage: str) -> dict[str, Any]:
    """Return as JSON-ready data the candidates and predictions of a search, and the files that it would write.

    ``predicted`` is the output of ``predict`` for a GPU; ``None`` on a CPU, which has no predictions.
    """
    from autotune.tuning.forecast import forecast_of
    from autotune.tuning.predictions import batches_of, gpu_document
    from autotune.tuning.prepare import prepare

    if request.workload.source is not None:
        raise InvalidRequestError(
            "--dry-run is for a model by name: your own code would have to run to be looked at",
            "leave --dry-run out, and give --trials 1",
        )
    with tempfile.TemporaryDirectory(prefix="autotune-dry-run-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        with on_this_machine(request, logs, lambda _: None, None) as place:
            request = read_data(request, place.servers, logs.parent, lambda _: None)
            server = place.servers[0]
            prepared = prepare(request, server.inspect())
            forecast = forecast_of(prepared, server)
            predicted = None
            if forecast is not None and prepared.chip is not None:
                forecast.complete()
                predicted = encode(gpu_document(prepared.chip, prepared, forecast.model))
    location = resolve_location(storage)
    study = request.study or next(study_names(request))
    return {
        "study": study,
        "device": request.device.name,
        "writes": [str(location.path) if location.path else shown_location(storage), str(log_folder(storage, study))],
        "trials": request.trials,
        "time_budget_seconds": request.time_budget_seconds,
        "baseline": prepared.baseline.parameters(),
        "batches": [[batch, prepared.space.batches.accumulation(batch)] for batch in batches_of(prepared.space)],
        "configurations": [arm.describe() for arm in prepared.space.arms],
        "predicted": predicted,
    }
