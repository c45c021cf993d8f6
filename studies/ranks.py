"""Measure searches and trials of several ranks on the GPUs of this machine, one part after the other.

    python studies/ranks.py FOLDER [--only search,grid] [--workloads bert-large,gpt2-medium] [--seconds 500]
    python studies/ranks.py FOLDER --cpu [--only faults]

Parts, in the order in which they run:

``search``    ``autotune search --gpus N`` as a whole command, timed; its JSON in ``WORKLOAD_search.json``.
``grid``      cells over strategies, checkpointing, batches and precisions, the most informative first; a line each in
              ``WORKLOAD_grid.jsonl``, with the peaks that were predicted in lines at the end.
``grid-all``  every cell of bf16: all strategies, checkpointing, batches, and ``sync_each_batch`` where gradients are
              accumulated; a line each in ``WORKLOAD_grid-all.jsonl``.
``verify``    ``autotune verify``, a stock ``torchrun``, of each study that was searched, right after its search.
``faults``    one rank is killed, runs out of memory, or stops in a collective: seconds until all processes are gone and
              all GPUs free.
``parallel``  the grid of BERT-large of one-GPU trials on all GPUs at once, and on one: seconds of both, and the speed
              of each cell beside others over that of the same cell alone.
``beside``    one-GPU trials of BERT-large: alone, on all GPUs at the same time, and alone again, three rounds of each
              cell; how much company costs, beside how much two trials alone differ.

``FOLDER/ranks.json`` has what came of each part and is written again after each, so that a run that is cut short keeps
what it has. A part that fails says so there, and the others go on. With ``--cpu`` the same parts run with tiny models
on two ranks of the CPU. ``python studies/ranks_report.py FOLDER`` prints what was recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.candidate import STRATEGIES, Arm, Candidate
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Effort, Failed, Outcome
from autotune.core.placement import Placement, rank_log
from autotune.core.schema import encode
from autotune.core.units import GIB, MIB, parse_bytes
from autotune.core.workload import Workload
from autotune.devices import Device, device_condition, device_used_bytes, find_device, find_gpus
from autotune.estimate.history import History
from autotune.estimate.memory_jobs import Forecast
from autotune.execution import Event, LocalExecutor, TrialJob, TrialServer
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task
from autotune.store.opening import open_store
from autotune.store.records import Stage, StudyRecord, TrialRecord
from autotune.tuning.forecasting import forecast_of
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

PARTS = ("search", "grid", "grid-all", "verify", "faults", "parallel", "beside")
_ENDLESS = Effort(max_steps=10**6, target_spread=0.0, max_seconds=600.0)
# What the driver rounds; a process that stayed would hold a CUDA context of some hundred MiB.
_SLACK_BYTES = 64 * MIB
_LOOK_SECONDS = 0.005
# A prediction this far above the cap is not worth a cell.
_SURELY_OVER = 1.05
_FREE_FOR_RANK_BYTES = 6 * GIB


@dataclass(frozen=True)
class Subject:
    """A workload, and the precisions of its grid, the first of them in all cells that matter."""

    model: str
    seq_len: int | None
    effective_batch: int = 64
    precisions: tuple[str, ...] = ("bf16", "tf32", "fp32")


SUBJECTS = {
    "bert-large": Subject("bert-large-uncased", 512),
    # Weights, gradients, buckets and optimizer state alone exceed 24 GiB under DDP.
    "llama-1b": Subject("Llama-3.2-1B", 512, precisions=("bf16", "tf32")),
    "gpt2-medium": Subject("gpt2-medium", 1024),
    "vit-large": Subject("vit-large-patch16-224", None),
    # Fits no DDP either; its micro-steps keep the GPU busy for longer than the host needs to launch them.
    "gpt2-xl": Subject("gpt2-xl", 1024, 32, precisions=("bf16",)),
}
TINY = {
    "bert-tiny": Subject("bert-tiny", 16, 16, ("fp32",)),
    "gpt2-tiny": Subject("gpt2-tiny", 16, 16, ("fp32",)),
}
# All but its smallest batches are limited by the GPU. fp16 takes as long as bf16, and gives as many cells again.
_BESIDE = Subject("bert-large-uncased", 512, 64, ("bf16", "fp16"))
# Of these cells the first two are limited by the GPU on a fast host, and the last by the host.
_BESIDE_CELLS = ((Arm("bf16"), 32), (Arm("bf16", gradient_checkpointing=True), 64), (Arm("bf16"), 16), (Arm("bf16"), 8))
_BESIDE_ROUNDS = 3
_GRID_ALL_SECONDS = 150.0
_VERIFIED_SECONDS = 20.0
_OF_BESIDE = Effort(min_steps=8, target_spread=0.003, max_seconds=2.5, max_micro_steps=8)
# Every micro-step is run, and a cell of 0.2 s a step takes 12 steps.
_OF_GRID_ALL = Effort(min_steps=8, target_spread=0.005, max_seconds=2.5, max_micro_steps=8)


class Clock:
    """Counts down the seconds of a run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Clock:
        """Return a clock of at most so many of them."""
        return Clock(min(seconds, self.left))


class Study:
    """What one run of this program knows: its options, its devices, and the record that it writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clock = Clock(options.seconds)
        self.is_cpu: bool = options.cpu
        cpu = find_device("cpu")
        self.devices: tuple[Device, ...] = (cpu,) * options.gpus if self.is_cpu else find_gpus(str(options.gpus))
        self.storage = self.folder / "ranks.db"
        self.subjects = {name: (TINY if self.is_cpu else SUBJECTS)[name] for name in options.workloads}
        self.record: dict[str, Any] = {
            "command": ["python", "studies/ranks.py", *sys.argv[1:]],
            "devices": [f"{device.label} {device.name}" for device in self.devices],
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_"))},
            "links": self._links(),
            "parts": {},
        }

    def _links(self) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
        return None

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f"[{self.options.seconds - self.clock.left:5.0f} s] {text}", flush=True)

    def keep(self, part: str, name: str, found: dict[str, Any]) -> None:
        """Write what came of a part for one workload."""
        self.record["parts"].setdefault(part, {})[name] = found
        path = self.folder / "ranks.json"
        path.with_suffix(".part").write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".part").rename(path)

    def run(self, part: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run a part for one workload; whatever it raises is what came of it."""
        if self.clock.left < 5:
            self.keep(part, name, {"left_out": "no time was left"})
            return
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-4000:]}
        found["part_seconds"] = round(time.monotonic() - began, 2)
        self.keep(part, name, found)
        told = {key: value for key, value in found.items() if not isinstance(value, dict | list) and key != "traceback"}
        self.say(f"{part} {name}: {json.dumps(told)[:600]}")

    def request(self, subject: Subject, *, together: bool = True, **others: Any) -> SearchRequest:
        """Return the request for a workload on all devices."""
        source = resolve_model(subject.model)
        task = infer_task(source.config)
        workload = Workload(source.name, source.config, task, choose_seq_len(source.config, task, subject.seq_len))
        first, *rest = self.devices
        limit = self.options.memory_limit
        return SearchRequest(
            workload,
            first,
            others=tuple(rest) if together else (),
            effective_batch=subject.effective_batch,
            world_size=len(self.devices) if together else 1,
            memory_limit_bytes=parse_bytes(limit) if limit else None,
            **others,
        )

    def command(self, name: str, words: list[str], seconds: float) -> dict[str, Any]:
        """Run a whole command of autotune; return its exit code, its seconds and its JSON, which is kept in a file."""
        line = [sys.executable, "-m", "autotune", *words, "--storage", str(self.storage), "--json"]
        path = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self.say(f"$ autotune {' '.join(words)}")
        began = time.monotonic()
        with open(self.folder / f"{name}.txt", "wb") as said:
            process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=said, env=environment, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                # Asked to end, it records what it has, and ends its trials.
                process.send_signal(signal.SIGINT)
                try:
                    output, _ = process.communicate(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    output, _ = process.communicate()
        found: dict[str, Any] = {
            "command": ["autotune", *words],
            "exit_code": process.returncode,
            "whole_seconds": round(time.monotonic() - began, 2),
        }
        (self.folder / f"{name}.json").write_bytes(output)
        with contextlib.suppress(ValueError):
            found["document"] = json.loads(output)
        if process.returncode:
            found["last_words"] = (self.folder / f"{name}.txt").read_text(errors="replace")[-2000:]
        return found

    def in_process(self, name: str, request: SearchRequest) -> dict[str, Any]:
        """Run a search within this process, as on the CPU, which ``--gpus`` does not name."""
        from autotune.results.json_document import report_document
        from autotune.results.study_view import study_view
        from autotune.tuning.run import run_search

        began = time.monotonic()
        _, report = run_search(dataclasses.replace(request, study=name, fresh=True), str(self.storage), _Silence())
        document = report_document(study_view(report))
        (self.folder / f"{name}.json").write_text(json.dumps(document))
        return {"exit_code": 0, "whole_seconds": round(time.monotonic() - began, 2), "document": document}


class _Silence:
    """Is told of a search, and says nothing."""

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """See ``autotune.tuning.loop.Observer``."""

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """See ``Observer``."""

    def progress(self, number: int, progress: Progress) -> None:
        """See ``Observer``."""

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """See ``Observer``."""

    def note(self, text: str) -> None:
        """See ``Observer``."""


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a search came to, without its document."""
    document = found.pop("document", None)
    if not isinstance(document, dict) or "trials" not in document:
        return found
    best, trials = document.get("best") or {}, document["trials"]
    names = ["strategy", "precision", "gradient_checkpointing", "sync_each_batch", "samples_per_second"]
    names += ["per_device_train_batch_size", "gradient_accumulation_steps", "peak_allocated_bytes"]
    names += ["peak_reserved_bytes", "seconds"]
    states = [trial["state"] for trial in trials]
    return {
        **found,
        "study": document["study"],
        "search_seconds": document["seconds"],
        "trials": len(trials),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "ceiling_bytes": document["ceiling_bytes"],
        "stopped_because": document["stopped_because"],
        "best": {name: best.get(name) for name in names},
        "tried": [{name: trial.get(name) for name in ("number", "stage", "state", *names)} for trial in trials],
    }


def _search(study: Study, name: str, subject: Subject) -> dict[str, Any]:
    if study.is_cpu:
        return _summary(study.in_process(name, study.request(subject, precisions=("fp32",), trials=3)))
    words = ["search", "--model", subject.model, "--effective-batch", str(subject.effective_batch)]
    words += ["--seq-len", str(subject.seq_len)] if subject.seq_len else []
    words += ["--gpus", str(study.options.gpus), "--study", name, "--fresh"]
    words += ["--memory-limit", study.options.memory_limit] if study.options.memory_limit else []
    return _summary(study.command(f"{name}_search", words, min(180.0, study.clock.left)))


def _steps_to_verify(study: Study, name: str) -> int:
    """Return the steps that take about twenty seconds by the study's promise: 100 at most, 30 at least."""
    with open_store(str(study.storage)) as store:
        record = store.study(name)
        best = store.trials(record.id) if record is not None else []
    promised = [t.outcome.measurement.step_seconds for t in best if isinstance(t.outcome, Completed)]
    return max(30, min(100, round(_VERIFIED_SECONDS / min(promised)))) if promised else 100


def _verify(study: Study, name: str, _: Subject) -> dict[str, Any]:
    steps = "20" if study.is_cpu else str(_steps_to_verify(study, name))
    found = study.command(f"{name}_verify", ["verify", name, "--steps", steps, "--again"], min(150.0, study.clock.left))
    document = found.pop("document", None) or {}
    kept = ["verdict", "promised", "obtained", "samples_per_second_ratio", "peak_ratio", "misses", "why"]
    kept += ["measured_again", "not_measured_again"]
    return {**found, **{key: document.get(key) for key in kept}}


# The grid


def _order(candidate: Candidate, most: int, precisions: tuple[str, ...]) -> tuple[float, ...]:
    """Return what the cells are sorted by: large batches first, all strategies of one before the next."""
    arm = candidate.arm
    smaller = (most // candidate.per_device_train_batch_size).bit_length() - 1
    score = smaller + 0.5 * arm.gradient_checkpointing + arm.sync_each_batch
    score += 1.75 * precisions.index(arm.precision)
    return score, STRATEGIES.index(arm.strategy or "ddp")


def _cells(prepared: Prepared, precisions: tuple[str, ...]) -> list[Candidate]:
    space = prepared.space
    batches = space.batches.at_level(space.batches.levels()[0])
    cells = [space.candidate(arm, batch) for arm in space.arms for batch in batches]
    # Without accumulation every micro-step reduces its gradients anyway.
    cells = [cell for cell in cells if cell.accumulates or not cell.arm.sync_each_batch]
    return sorted(cells, key=lambda cell: _order(cell, batches[-1], precisions))


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / MIB, 1)


def _cell(candidate: Candidate, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the line of a cell."""
    cell: dict[str, Any] = {**candidate.parameters(), "trial_seconds": round(seconds, 3)}
    cell |= {"phase_seconds": outcome.phase_seconds}
    if isinstance(outcome, Failed):
        return {**cell, "state": "failed", "reason": outcome.reason, "message": outcome.message}
    if not isinstance(outcome, Completed):
        peaks = {"peak_allocated_mib": _mib(outcome.peak_allocated_bytes)}
        peaks["peak_reserved_mib"] = _mib(outcome.peak_reserved_bytes)
        return {**cell, "state": "oom", "where": outcome.where, "message": outcome.message, **peaks}
    measured = outcome.measurement
    own_steps = sum(measured.warmup_step_seconds) + sum(measured.step_seconds_each)
    return {
        **cell,
        "state": "ok",
        "samples_per_second": round(measured.samples_per_second, 3),
        "step_seconds": round(measured.step_seconds, 5),
        "step_seconds_each": [round(each, 5) for each in measured.step_seconds_each],
        "warmup_step_seconds": [round(each, 5) for each in measured.warmup_step_seconds],
        "rank_step_seconds": [round(each, 5) for each in measured.rank_step_seconds],
        "micro_step_seconds": measured.micro_step_seconds,
        "last_micro_step_seconds": measured.last_micro_step_seconds,
        "optimizer_seconds": measured.optimizer_seconds,
        "micro_steps_run": measured.micro_steps_run,
        "over_steps_seconds": round(seconds - own_steps, 3),
        "relative_spread": round(measured.relative_spread, 5),
        "peak_allocated_mib": _mib(measured.peak_allocated_bytes),
        "peak_reserved_mib": _mib(measured.peak_reserved_bytes),
        "context_mib": _mib(measured.context_bytes),
        "joules_per_sample": measured.joules_per_sample,
        "train_loss": measured.train_loss,
    }


def _predicted_mib(forecast: Forecast | None, candidate: Candidate) -> dict[str, Any]:
    """Return the predicted peaks of a cell; empty where they are not known."""
    told = forecast.model.prediction(candidate) if forecast is not None else None
    if told is None:
        return {}
    peaks = _mib(told.peak_allocated_bytes), _mib(told.peak_reserved_bytes)
    return dict(zip(("predicted_allocated_mib", "predicted_reserved_mib"), peaks, strict=True))


@contextlib.contextmanager
def _server(study: Study, name: str, request: SearchRequest) -> Iterator[tuple[TrialServer, Prepared, float]]:
    """Start a server; yield it with the prepared search and the seconds that both took."""
    began = time.monotonic()
    logs = study.folder / "logs" / name
    with TrialServer(request.placement, request.workload, logs) as server:
        server.start(inspects=True)
        prepared = prepare(request, server.inspect())
        yield server, prepared, round(time.monotonic() - began, 2)


def _outcome(
    server: TrialServer, prepared: Prepared, candidate: Candidate, log: Path, effort: Effort | None = None
) -> tuple[Outcome, float]:
    executor = LocalExecutor([server])
    effort = effort or Effort()
    job = TrialJob(uuid.uuid4().hex, candidate, prepared.ceiling.cap_bytes, effort, 42, 90.0, str(log))
    began = time.monotonic()
    executor.submit(job)
    while True:
        _, report = executor.wait()
        if not isinstance(report, Event):
            return report, time.monotonic() - began


def _meta(request: SearchRequest, prepared: Prepared, start_seconds: float) -> dict[str, Any]:
    """Return the first line of a grid: where, and of what, its cells were measured."""
    workload = {key: value for key, value in request.workload.document().items() if key != "config"}
    environment = {k: v for k, v in prepared.environment.items() if k != "training_arguments_fields"}
    meta = {"meta": True, "environment": environment, "workload": workload, "start_seconds": start_seconds}
    meta |= {"ceiling": prepared.ceiling.document(), "cap_bytes": prepared.ceiling.cap_bytes}
    return meta | {"line_bytes": prepared.ceiling.line_bytes, "model": encode(prepared.model)}


def _grid_all(study: Study, name: str, subject: Subject) -> dict[str, Any]:
    """Measure every cell in the subject's first precision, with nothing predicted beside the trials.

    Cells that the folder's file has already are left out, so that a run that was cut short can be continued.
    """
    clock = study.clock.within(_GRID_ALL_SECONDS)
    precisions = subject.precisions[:1]
    request = study.request(subject, precisions=precisions)
    states: list[str] = []
    path = study.folder / f"{name}_grid-all.jsonl"
    before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]] if path.exists() else []
    measured = {Candidate.from_parameters(cell) for cell in before}
    with (
        _server(study, f"{name}-all", request) as (server, prepared, start_seconds),
        open(path, "a", encoding="utf-8") as lines,
    ):
        if not before:
            lines.write(json.dumps(_meta(request, prepared, start_seconds)) + "\n")
        cells = _cells(prepared, precisions)
        for number, candidate in enumerate(cells):
            if candidate in measured:
                continue
            if clock.left < 6:
                break
            log = study.folder / "logs" / f"{name}-all" / f"cell-{number:03d}.log"
            outcome, seconds = _outcome(server, prepared, candidate, log, _OF_GRID_ALL)
            states.append(outcome.state)
            lines.write(json.dumps(_cell(candidate, outcome, seconds)) + "\n")
            lines.flush()
    found = {"cells": len(cells), "measured": len(states), "measured_before": len(before)}
    return {**found, "states": {state: states.count(state) for state in dict.fromkeys(states)}}


def _grid(study: Study, name: str, subject: Subject) -> dict[str, Any]:
    clock = study.clock.within(study.options.workload_seconds)
    request = study.request(subject, precisions=subject.precisions)
    states: list[str] = []
    with (
        _server(study, name, request) as (server, prepared, seconds),
        open(study.folder / f"{name}_grid.jsonl", "w", encoding="utf-8") as lines,
    ):

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        forecast = forecast_of(prepared, server)
        write(_meta(request, prepared, seconds))
        cells = _cells(prepared, subject.precisions)
        over = 0
        for number, candidate in enumerate(cells):
            if clock.left < 8:
                break
            if forecast is not None:
                forecast.begin(None)
                # Files the answers that have come.
                forecast.is_settled(candidate.arm)
            predicted = _predicted_mib(forecast, candidate)
            allocated = predicted.get("predicted_allocated_mib", 0.0)
            if allocated * MIB > _SURELY_OVER * prepared.ceiling.cap_bytes and over:
                write({**candidate.parameters(), "state": "predicted over", **predicted})
                continue
            log = study.folder / "logs" / name / f"cell-{number:03d}.log"
            outcome, seconds = _outcome(server, prepared, candidate, log)
            over += outcome.state == "out_of_memory"
            states.append(outcome.state)
            write({**_cell(candidate, outcome, seconds), **predicted})
        while forecast is not None and not forecast.is_complete and clock.left > 1:
            forecast.begin(None)
            forecast.settle(lambda: cells[0].arm)
            time.sleep(0.2)
        for candidate in cells:
            if predicted := _predicted_mib(forecast, candidate):
                write({"prediction": True, **candidate.parameters(), **predicted})
    return {
        "cells": len(cells),
        "measured": len(states),
        "states": {state: states.count(state) for state in set(states)},
        "not_predicted": len(forecast.unanswered) if forecast is not None else None,
    }


# Faults


class _Watch:
    """Looks every few milliseconds whether processes are gone and devices free, in a thread."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self._uuids = [device.uuid for device in devices if device.kind == "cuda"]
        self._before = {each: device_used_bytes(each) or 0 for each in self._uuids}
        self.pids: frozenset[int] = frozenset()
        self.first_gone: float | None = None
        self.all_gone: float | None = None
        self.all_free: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self, pids: frozenset[int]) -> None:
        """Begin to look."""
        self.pids = pids
        self._thread.start()

    def end(self) -> None:
        """Look until all is free, ten seconds at most."""
        self._thread.join(timeout=10)
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.is_set() and self.all_free is None:
            now = time.time()
            alive = [pid for pid in self.pids if _is_alive(pid)]
            if len(alive) < len(self.pids) and self.first_gone is None:
                self.first_gone = now
            if not alive:
                self.all_gone = self.all_gone or now
                used = ((device_used_bytes(each) or 0) - self._before[each] for each in self._uuids)
                if all(more < _SLACK_BYTES for more in used):
                    self.all_free = time.time()
            time.sleep(_LOOK_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _hog(study: Study) -> Iterator[None]:
    """Hold most of the last GPU's memory meanwhile."""
    if study.is_cpu:
        yield
        return
    program = (
        "import sys, torch\n"
        f"free = torch.cuda.mem_get_info()[0] - {_FREE_FOR_RANK_BYTES}\n"
        "held = torch.empty(free, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": study.devices[-1].uuid}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def _fault(
    study: Study, server: TrialServer, prepared: Prepared, candidate: Candidate, how: str, cap_bytes: int
) -> dict[str, Any]:
    """Run a trial that goes wrong in one rank; return its outcome and how long all took to be gone."""
    executor = LocalExecutor([server])
    watch = _Watch(study.devices)
    log = study.folder / "logs" / "faults" / f"{how}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    limit = 20.0 if how == "stop" else 90.0
    trial = executor.submit(TrialJob(uuid.uuid4().hex, candidate, cap_bytes, _ENDLESS, 42, limit, str(log)))
    began = at = time.time()
    variables: dict[str, str] = {}
    on_gpus: dict[str, int] = {}
    is_hit = False
    while True:
        _, report = executor.wait()
        if not isinstance(report, Event):
            break
        pids = executor.pids_of(trial)
        if pids and not watch.pids:
            watch.begin(pids)
            variables = _variables_of(min(pids))
        if report.progress.step == 3:
            on_gpus = _processes_on(study.devices)
        if how in ("kill", "stop") and report.progress.step == 4 and not is_hit:
            is_hit, at = True, time.time()
            os.kill(sorted(pids)[-1], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    told = time.time()
    watch.end()
    if how == "stop":
        # The time limit ends such a trial, not the stop.
        at = began + limit
    elif how == "memory":
        # The rank prints its error when it has caught it.
        texts = [Path(rank_log(str(log), rank)) for rank in range(len(study.devices))]
        at = max((path.stat().st_mtime for path in texts if path.exists()), default=began)
    message = report.message if not isinstance(report, Completed) else None
    return {
        "state": report.state,
        "message": message,
        "variables": variables,
        "processes_on_each_gpu": on_gpus,
        "processes": len(watch.pids),
        "first_gone_after": _after(watch.first_gone, at),
        "all_gone_after": _after(watch.all_gone, at),
        "all_free_after": _after(watch.all_free, at),
        "told_after": _after(told, at),
    }


def _variables_of(pid: int) -> dict[str, str]:
    """Return what a rank was started with of NCCL's variables: nothing may take them away."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        known = dict(entry.partition("=")[::2] for entry in entries if "=" in entry)
        return {name: value for name, value in known.items() if name.startswith(("NCCL_", "CUDA_VISIBLE"))}
    return {}


def _processes_on(devices: tuple[Device, ...]) -> dict[str, int]:
    """Return how many processes are on each GPU: one, or a rank has also opened the GPU of another."""
    seen = {device.label: device_condition(device.uuid) for device in devices if device.kind == "cuda"}
    return {label: len(condition.pids) for label, condition in seen.items() if condition is not None}


def _after(moment: float | None, since: float) -> float | None:
    return None if moment is None else round(moment - since, 3)


def _faults(study: Study, name: str, subject: Subject) -> dict[str, Any]:
    request = study.request(subject, precisions=subject.precisions[:1])
    found: dict[str, Any] = {}
    with _server(study, f"{name}-faults", request) as (server, prepared, _):
        cells = _cells(prepared, subject.precisions)
        for how in ("kill", "memory", "stop"):
            if study.clock.left < 15:
                break
            # More than the last GPU has left, so that its rank alone runs out; all ranks of a CPU do.
            cap_bytes = 4 * MIB if study.is_cpu and how == "memory" else prepared.ceiling.cap_bytes
            with _hog(study) if how == "memory" else contextlib.nullcontext():
                try:
                    found[how] = _fault(study, server, prepared, cells[0], how, cap_bytes)
                except Exception as error:
                    found[how] = {"error": f"{type(error).__name__}: {error}"}
            study.say(f"{how}: {json.dumps(found[how])}")
        after, seconds = _outcome(server, prepared, cells[0], study.folder / "logs" / "faults" / "after.log")
        found["after"] = _cell(cells[0], after, seconds)
    return found


# Trials on all GPUs at the same time


def _parallel(study: Study) -> dict[str, Any]:
    subject = next(iter(TINY.values())) if study.is_cpu else _BESIDE
    found: dict[str, Any] = {}
    speeds: dict[str, dict[Candidate, float]] = {}
    for how in ("together", "alone"):
        name = f"parallel-{how}"
        if study.is_cpu:
            request = study.request(subject, together=False, sampler="grid", precisions=("fp32",))
            beside = study.devices[1:] if how == "together" else ()
            ended = study.in_process(name, dataclasses.replace(request, beside=beside))
        else:
            words = ["search", "--model", subject.model, "--seq-len", str(subject.seq_len), "--sampler", "grid"]
            words += ["--effective-batch", str(subject.effective_batch), "--precision", ",".join(subject.precisions)]
            words += ["--study", name, "--fresh", "--no-baseline"]
            words += ["--memory-limit", study.options.memory_limit] if study.options.memory_limit else []
            is_alone = how == "alone"
            words += ["--device", "cuda:0"] if is_alone else ["--gpus", str(study.options.gpus), "--parallel"]
            ended = study.command(name, words, min(200.0, study.clock.left))
        of_grid = _grid_trials(study, name)
        speeds[how] = {
            trial.candidate: trial.outcome.measurement.samples_per_second
            for trial in of_grid
            if isinstance(trial.outcome, Completed)
        }
        found[how] = {**_summary(ended), "grid_seconds": _span(of_grid), "grid_trials": len(of_grid)}
    return {**found, **_compared(found, speeds)}


def _beside(study: Study) -> dict[str, Any]:
    """Measure cells alone on the first GPU, beside the same trial on each other GPU, and alone again."""
    subject = next(iter(TINY.values())) if study.is_cpu else _BESIDE
    request = study.request(subject, together=False)
    logs = study.folder / "logs" / "beside"
    cells: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(TrialServer(Placement.of(device), request.workload, logs / str(number)))
            for number, device in enumerate(study.devices)
        ]
        servers[0].start(inspects=True)
        prepared = prepare(request, servers[0].inspect())
        for arm, batch in _BESIDE_CELLS:
            plain = Arm() if study.is_cpu else arm
            candidate = Candidate(plain, min(batch, subject.effective_batch), max(1, subject.effective_batch // batch))
            cell: dict[str, Any] = {"cell": candidate.describe(), "rounds": []}
            for _ in range(_BESIDE_ROUNDS):
                if study.clock.left < 20:
                    break
                each = [_speeds(some, prepared, candidate, logs) for some in (servers[:1], servers, servers[:1])]
                cell["rounds"].append(dict(zip(("before", "beside", "after"), each, strict=True)))
            if cell["rounds"]:
                cells.append({**cell, **_cost_of_company(cell["rounds"])})
    return {"cells": cells}


def _speeds(servers: list[TrialServer], prepared: Prepared, candidate: Candidate, logs: Path) -> list[float | None]:
    """Return the samples a second of a candidate on each server, all at the same time; ``None`` where it failed."""
    executor = LocalExecutor(servers)
    trials = []
    for server in servers:
        log = str(logs / f"{uuid.uuid4().hex}.log")
        job = TrialJob(uuid.uuid4().hex, candidate, prepared.ceiling.cap_bytes, _OF_BESIDE, 42, 90.0, log)
        trials.append(executor.submit(dataclasses.replace(job, placement=server.placement)))
    found: dict[str, float | None] = {}
    while len(found) < len(trials):
        trial, report = executor.wait()
        if not isinstance(report, Event):
            found[trial] = report.measurement.samples_per_second if isinstance(report, Completed) else None
    return [found[trial] for trial in trials]


def _cost_of_company(rounds: list[dict[str, list[float | None]]]) -> dict[str, Any]:
    """Return the relative change of the first GPU's speed in company, and from alone to alone, of each round."""
    company, alone = [], []
    for each in rounds:
        before, beside, after = each["before"][0], each["beside"][0], each["after"][0]
        if before and beside and after:
            company.append(round(beside / statistics.fmean((before, after)) - 1, 4))
            alone.append(round(after / before - 1, 4))
    median = [statistics.median(found) if found else None for found in (company, alone)]
    return {"company": company, "alone": alone, "company_median": median[0], "alone_median": median[1]}


def _compared(found: dict[str, Any], speeds: dict[str, dict[Candidate, float]]) -> dict[str, Any]:
    """Return the seconds together over those alone, of the grid and of the whole command, and speeds likewise."""
    together, alone = found["together"], found["alone"]
    told: dict[str, Any] = {}
    if together["grid_trials"] and alone["grid_trials"]:
        # Of each trial, since the later search may have been cut short.
        each = [how["grid_seconds"] / how["grid_trials"] for how in (together, alone)]
        told["grid_ratio"] = round(each[0] / each[1], 3)
    if not together["exit_code"] and not alone["exit_code"]:
        told["whole_ratio"] = round(together["whole_seconds"] / alone["whole_seconds"], 3)
    both = [key for key in speeds["alone"] if key in speeds["together"]]
    told["speeds"] = [
        {"cell": key.describe(), "together": speeds["together"][key], "alone": speeds["alone"][key]} for key in both
    ]
    differences = sorted(speeds["together"][key] / speeds["alone"][key] - 1 for key in both)
    if differences:
        worst: float = max(differences, key=abs)
        told["speed_difference_median"] = round(statistics.median(differences), 4)
        told["speed_difference_worst"] = round(worst, 4)
    return told


def _grid_trials(study: Study, name: str) -> list[TrialRecord]:
    """Return the trials that the grid proposed."""
    with open_store(str(study.storage)) as store:
        record = store.study(name)
        trials = store.trials(record.id) if record is not None else []
    return [trial for trial in trials if trial.stage == "search" and trial.seconds is not None]


def _span(trials: list[TrialRecord]) -> float | None:
    """Return the seconds from the first trial's start to the last one's end."""
    spans = [(trial.started_at.timestamp(), trial.seconds or 0.0) for trial in trials]
    return round(max(start + each for start, each in spans) - min(spans)[0], 2) if spans else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--workloads", help=f"some of {', '.join(SUBJECTS)}, with commas between them")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=500.0, help="of all parts together")
    parser.add_argument("--workload-seconds", type=float, default=70.0, help="of the grid of one workload")
    parser.add_argument("--memory-limit", default="24GiB", help="for each rank; empty for all of a GPU")
    parser.add_argument("--cpu", action="store_true", help="two ranks of tiny models on the CPU")
    options = parser.parse_args()
    options.only = options.only.split(",")
    known = TINY if options.cpu else SUBJECTS
    options.workloads = options.workloads.split(",") if options.workloads else list(known)
    for given, all_known in ((options.only, PARTS), (options.workloads, known)):
        if unknown := [each for each in given if each not in all_known]:
            parser.error(f"{unknown[0]} is none of {', '.join(all_known)}")
    if options.cpu:
        options.memory_limit = ""
    return options


def main() -> None:
    """Run the parts that are asked for."""
    options = _options()
    study = Study(options)
    of_workloads = {"search": _search, "grid": _grid, "grid-all": _grid_all, "verify": _verify}
    for part in [part for part in PARTS if part in options.only]:
        if part == "faults":
            name, subject = next(iter(study.subjects.items()))
            study.run(part, name, lambda name=name, subject=subject: _faults(study, name, subject))  # type: ignore[misc]
        elif part == "parallel":
            study.run(part, "grid", lambda: _parallel(study))
        elif part == "beside":
            study.run(part, "cells", lambda: _beside(study))
        elif part == "verify" and "search" in options.only:
            continue
        else:
            # A study is verified at once, as people do, and before the host's speed has changed much.
            parts = ("search", "verify") if part == "search" and "verify" in options.only else (part,)
            for name, subject in study.subjects.items():
                for each in parts:
                    run = of_workloads[each]
                    study.run(each, name, lambda run=run, name=name, subject=subject: run(study, name, subject))  # type: ignore[misc]
    study.say(f"written to {options.folder}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        # Locks of its own: a search of a moment ago may still be letting go of them.
        os.environ.setdefault("AUTOTUNE_LOCKS", temporary)
        main()
