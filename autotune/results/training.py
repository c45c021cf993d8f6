"""Make the command with which ``autotune run`` starts the user's real training with the winner of a study."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.core.real_training import VARIABLE, Promise, RealTraining, WatchedRun
from autotune.core.schema import decode, encode
from autotune.core.scratch import keep_compiled
from autotune.core.training_source import TrainingSource, find_script, masked_options
from autotune.core.units import plural
from autotune.results.export import Export, apply_call, made_by_hand, make_export
from autotune.results.report import Report
from autotune.results.study_view import utilization
from autotune.space.arms import applied_settings

_MODULE = "autotune.worker.user.real_training"


@dataclass(frozen=True)
class Start:
    """The process that trains in place of this one, and what to print before."""

    words: tuple[str, ...]
    """The command: autotune's module, which runs the user's code with the settings."""
    cwd: str
    shown: str
    """The command as the user would type it, without autotune's module."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the training."""
    settings: Document = field(default_factory=dict)
    """Settings that replace the code's own, to be printed."""
    handed: dict[str, str] = field(default_factory=dict)
    """Environment variables that only autotune's module reads."""
    notes: tuple[str, ...] = ()


def make_start(report: Report, given: Sequence[str], runs_file: str | None = None) -> Start:
    """Return how to start the training with the winner: by the ``given`` command, else by the searched one.

    The speed and memory of the training are appended to ``runs_file``. Raises ``NoResultError`` where the study has no
    winner, ``InvalidRequestError`` where the winner does not fit the command.
    """
    export = make_export(report)
    recorded = report.source
    source = _source(report, recorded, given, export)
    notes = [f"run     {source.name} with the winner of {report.study.name}: {export.candidate.describe()}"]
    if recorded is not None and source.digest != recorded.digest:
        notes.append(f"note: {source.name} is not as it was when it was searched")
    variables = _variables(export) | dict(source.variables)
    settings: Document = dict(export.arguments)
    if recorded is None and export.candidate.arm.torch_compile:
        # The winner was measured with it, and the user's script may name another backend.
        settings["torch_compile_backend"] = "inductor"
    folder: str | None = None
    if export.framework == "placeholders":
        assert recorded is not None
        if missing := recorded.template.names - source.template.names:
            named = ", ".join(f"{{{name}}}" for name in sorted(missing))
            notes.append(f"note: {named} has no place in this command, so that the script decides that")
        # Files with placeholders are filled in as copies.
        folder = tempfile.mkdtemp(prefix="autotune-run-") if source.template.files else None
        template = replace(source, interface=export.interface).template
        words, filled = template.fill(export.candidate, folder or "")
        # The command line already has the settings.
        source, settings = replace(source, argv=words, variables=()), {}
        variables |= filled
    is_trainer = export.framework == "trainer"
    if is_trainer:
        notes += [f"by hand {line}" for line in made_by_hand(export)]
    levers = applied_settings(export.candidate.arm)
    if applied := apply_call(levers) if levers else export.applied:
        notes.append(f"set     {applied}")
    notes += [f"note: {line}" for line in export.differs]
    if export.cpu_core is not None:
        notes.append(f"set     the process runs on core {export.cpu_core} alone")
    ranks = ["--standalone", "--nproc_per_node", str(export.processes)]
    launcher, module = ["python"], ["-m", _MODULE]
    if export.processes > 1:
        launcher, module = ["torchrun", *ranks], ["-m", "torch.distributed.run", *ranks, "-m", _MODULE]
    program = ["-m", source.module] if source.module else [source.file]
    shown = [*launcher, *program, *source.argv] if source.kind == "script" else [*launcher, source.name]
    training = RealTraining(
        report.study.name,
        replace(source, variables=(), interface=export.interface),
        export.candidate,
        settings,
        dtype=report.workload["dtype"] if is_trainer and not report.workload.get("quantize") else None,
        has_adapters=bool(export.lora) if recorded is None else None,
        folder=folder,
        cpu_core=export.cpu_core,
        promise=promise_of(report, runs_file),
        loader_batches=export.rehearsal.loader_batches if export.rehearsal is not None else {},
    )
    handed = {VARIABLE: json.dumps(encode(training))}
    return Start((sys.executable, *module), source.cwd, shlex.join(shown), variables, settings, handed, tuple(notes))


def _variables(export: Export) -> dict[str, str]:
    """Return the environment variables to add for the training: of the export, and of the cache of compiled code."""
    with_cache = dict(os.environ)
    keep_compiled(with_cache)
    cache = {name: value for name, value in with_cache.items() if os.environ.get(name) != value}
    variables = export.environment | cache
    if export.omp_threads not in (None, "1") and export.processes == 1:
        variables["OMP_NUM_THREADS"] = str(export.omp_threads)
    return variables


# Each new shape is compiled and captured in the first steps of an epoch, whose mean speed is promised: Qwen2.5-0.5B on
# texts ran at 110 samples/s in steps 10 to 50, and from step 100 on at the promised 148 (H200, 28 November 2026).
_SHAPED_STEPS = 100


def promise_of(report: Report, runs_file: str | None) -> Promise | None:
    """Return the promised speed and memory of the training; ``None`` where it was not measured as it is run."""
    best, speed, measured = report.best, report.speed(report.best), report.pooled(report.best)
    if best is None or speed is None or measured is None:
        return None
    request = report.study.request
    if int(request.get("world_size") or 1) > int(request.get("ranks") or 1):
        # One device was measured for a training on several, which also exchange gradients.
        return None
    arm, (low, high) = best.candidate.arm, speed.interval()
    line_bytes, tokens = report.ceiling.line_bytes, measured.tokens_per_sample
    used = utilization(report, measured, arm)
    promise = Promise(speed.samples_per_second, low, high, line_bytes, tokens, used, runs_file)
    # New shapes of batches are compiled or captured in the first steps, which are not compared with the promise.
    is_prepared_by_shape = measured.batches_vary and (arm.torch_compile or arm.cuda_graphs)
    return replace(promise, warm_steps=_SHAPED_STEPS) if is_prepared_by_shape else promise


def watched_line(runs_file: str) -> str | None:
    """Return a sentence on how many trainings in this file were as fast as promised; ``None`` if it has none."""
    try:
        with open(runs_file, encoding="utf-8") as file:
            runs = [decode(json.loads(line), WatchedRun) for line in file]
    except (OSError, ValueError):
        return None
    if not runs:
        return None
    kept = [run for run in runs if run.kept]
    share = "" if len(kept) == len(runs) else f"{len(kept)} of "
    return f"speed kept in {share}{plural(len(runs), 'run')} of autotune run, {sum(run.steps for run in kept):,} steps"


def _source(report: Report, recorded: TrainingSource | None, given: Sequence[str], export: Export) -> TrainingSource:
    """Return the code to train: the given command, else the recorded one. Raises an error if it cannot be used."""
    name = shlex.quote(report.study.name)
    if recorded is not None and recorded.kind != "script":
        if given:
            raise InvalidRequestError(
                f"{report.study.name} was searched with {recorded.name}, which takes no command",
                f"leave it out: autotune run {name}",
            )
        return recorded.as_it_is_now()
    if not given:
        if recorded is None:
            raise InvalidRequestError(
                f"{report.study.name} was searched with the model {export.model}, not with a script",
                f"give one that trains it with transformers.Trainer: autotune run {name} -- python train.py …",
            )
        if hidden := masked_options(recorded.argv):
            raise InvalidRequestError(
                f"the value of {hidden[0]} was not recorded", f"give the command: autotune run {name} -- python …"
            )
        return recorded.as_it_is_now()
    source = find_script(given, export.processes)
    if export.framework == "placeholders" and not source.template.names:
        assert recorded is not None
        raise InvalidRequestError(
            f"{shlex.join(given)[:80]!r} has no placeholders, so that nothing of the winner reaches it",
            f"put them where they were searched: {shlex.join(recorded.argv)[:200]}",
        )
    if recorded is not None and os.path.basename(source.file) != os.path.basename(recorded.file):
        raise InvalidRequestError(
            f"{report.study.name} was searched with {recorded.name}, not with {source.name}",
            f"search with that: autotune search -- {shlex.join(given)[:200]}",
        )
    return source
