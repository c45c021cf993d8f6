"""The proof: a stock ``Trainer`` in a process of its own against what a study promises of its winner.

``verify`` compares speed and memory, ``compare_losses`` in ``autotune.same_loss`` the training itself.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.device import Device, list_devices
from autotune.errors import DeviceError, InvalidRequestError, PromiseMissedError, TrialServerError, UnknownStudyError
from autotune.export import make_export
from autotune.history import promised_within
from autotune.report import Report, load_report, measurement
from autotune.runner.fresh import run_fresh
from autotune.store import Store, TrialRecord
from autotune.trial import Document, Measurement
from autotune.units import MIB, format_bytes, format_rate

DEFAULT_STEPS = 100
LEAST_STEPS = 20
MEMORY_TOLERANCE = 0.02
# A CPU's peak is resident memory: a process that was not forked reads libraries and keeps pages of its own.
CPU_SLACK_BYTES = 96 * MIB
# Imports took 10 s on a cold disk; evaluating and writing a checkpoint of a few GiB may take minutes.
_START_SECONDS = 900.0
_MOST_TIMES_SLOWER = 20
# What a workload may say beyond model and shape, none of which the stock process builds.
_NOT_RUN = {"source": "code of its own", "data": "data of its own"}


@dataclass(frozen=True)
class Subject:
    """What is put to the proof: a study's winner, its exported arguments, the device to run on."""

    report: Report
    best: TrialRecord
    promised: Measurement
    arguments: Document
    """Fields of ``TrainingArguments``, as exported or as a file has them."""
    attn_implementation: str
    device: Device
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, which the export asks for."""

    @property
    def cap_bytes(self) -> int | None:
        """The cap of the study's trials where a memory limit made it; ``None``: all that the device has."""
        ceiling = self.report.ceiling
        return None if ceiling.limit_bytes is None else ceiling.cap_bytes

    def job(self, steps: int, **more: Any) -> Document:
        """What a process of ``autotune.worker.stock`` is told."""
        return {
            "workload": self.report.workload,
            "arguments": self.arguments,
            "attn_implementation": self.attn_implementation,
            "device_kind": self.device.kind,
            "device_uuid": self.device.uuid,
            "cap_bytes": self.cap_bytes,
            "seed": self.report.study.request["seed"],
            "steps": steps,
            **more,
        }


def what_is_not_run(workload: Document) -> str | None:
    """What of a workload no stock process can build, in words; ``None`` where it can."""
    return next((name for what, name in _NOT_RUN.items() if workload.get(what)), None)


def subject_of(report: Report, device: Device, arguments: Document | None = None) -> Subject:
    """The winner of a study, with ``arguments`` from a file in place of its export's.

    Raises ``NoResultError`` where the study has no winner and ``InvalidRequestError`` where the file is not its export.
    """
    name = what_is_not_run(report.workload)
    if name is not None:
        raise InvalidRequestError(
            f"the study {report.study.name!r} was searched with {name}, which verify does not run",
            "train with the export as usual; the Trainer's log tells samples a second",
        )
    export = make_export(report)
    best, promised = report.best, measurement(report.best)
    assert best is not None, "an export has a winner"
    assert promised is not None, "a winner was measured"
    if arguments is not None:
        _check_is_export_of(arguments, export.arguments, report)
    return Subject(
        report,
        best,
        promised,
        arguments or export.arguments,
        export.model_arguments["attn_implementation"],
        device,
        export.environment,
    )


def _check_is_export_of(arguments: Document, exported: Document, report: Report) -> None:
    changed = [
        f"{name}: {value!r}, in the file {arguments.get(name)!r}"
        for name, value in exported.items()
        if arguments.get(name) != value
    ]
    if changed:
        raise InvalidRequestError(
            f"the file is not what the study {report.study.name!r} exports ({'; '.join(changed)})",
            f"export it again with autotune export {report.study.name}, or name its study with --study",
        )
    unknown = sorted(set(arguments) - set(report.environment["training_arguments_fields"]))
    if unknown:
        raise InvalidRequestError(f"{', '.join(unknown)} in the file is no TrainingArguments field", "take it out")


def read_arguments(path: Path) -> Document:
    """An export's JSON; ``InvalidRequestError`` where the file holds nothing of the kind."""
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read as JSON ({error})", "make it with autotune export STUDY > FILE"
        ) from error
    if not isinstance(arguments, dict) or "per_device_train_batch_size" not in arguments:
        raise InvalidRequestError(
            f"{path} holds no export: per_device_train_batch_size is missing", "make it with autotune export STUDY"
        )
    return arguments


def find_exported(store: Store, arguments: Document) -> Report:
    """The newest study whose export has these values; ``UnknownStudyError`` where there is none.

    ``InvalidRequestError`` where there are some of different workloads: the file does not say which model it is of.
    """
    found: list[Report] = []
    for summary in store.studies():
        if summary.best is None:
            continue
        report = load_report(store, summary.study.name)
        exported = make_export(report).arguments
        if all(arguments.get(name) == value for name, value in exported.items()):
            found.append(report)
    if not found:
        raise UnknownStudyError(
            f"no study in {store.label} exports this file",
            "name the study with --study, or its database with --storage; an export of another machine is "
            "verified there",
        )
    if len({report.study.workload_id for report in found}) > 1:
        names = ", ".join(report.study.name for report in found[:5])
        raise InvalidRequestError(
            f"studies of different models or data export these values: {names}", "say which is meant with --study"
        )
    return found[0]


def device_of(report: Report) -> Device:
    """The device here that a study was measured on, by UUID or at least of the same name and size.

    Raises ``DeviceError`` where there is none, since nothing was promised for any other.
    """
    measured = report.environment
    here = [device for device in list_devices() if device.kind == measured["device_kind"]]
    for device in here:
        if device.uuid == measured["device_uuid"] and device.name == measured["device_name"]:
            return device
    for device in here:
        same_size = device.memory_total_bytes == measured["device_memory_bytes"]
        if device.name == measured["device_name"] and (same_size or device.kind == "cpu"):
            return device
    names = ", ".join(f"{device.label} ({device.name})" for device in list_devices())
    raise DeviceError(
        f"the study {report.study.name!r} was measured on {measured['device_name']}; here are {names}",
        "verify it on that machine, or search again on this one",
    )


@dataclass(frozen=True)
class Verification:
    """What a stock run showed, beside what was promised."""

    subject: Subject
    steps: int
    obtained: Document
    """The answer of ``autotune.worker.stock``."""

    def __str__(self) -> str:
        """What came of it in a line, for a notebook."""
        promised, obtained = self.subject.promised.samples_per_second, self.samples_per_second or 0.0
        verdict = "; ".join(self.misses()) or "kept"
        return (
            f"{self.subject.report.study.name}: {format_rate(obtained)} samples/s of {format_rate(promised)} promised, "
            f"peak {format_bytes(self.training_peak_bytes or 0)} of {format_bytes(self.promised_peak_bytes)}: {verdict}"
        )

    @property
    def samples_per_second(self) -> float | None:
        """Of the training steps alone; ``None`` where the run did not end well."""
        speed: float | None = self.obtained.get("samples_per_second")
        return speed

    @property
    def relative_spread(self) -> float:
        """Half the 95 % interval of the mean speed of the stretches over that mean."""
        each: list[float] = self.obtained.get("samples_per_second_each", [])
        if len(each) < 2:
            return 0.0
        return 1.96 * statistics.stdev(each) / math.sqrt(len(each)) / statistics.mean(each)

    @property
    def speed_tolerance(self) -> float:
        """How much slower is no miss: 3 %, 5 % of launch-bound steps, or what the two spreads leave open."""
        promised = self.subject.promised
        stated = promised_within(self.subject.best.candidate, promised)
        return max(stated, math.hypot(promised.relative_spread, self.relative_spread))

    @property
    def training_peak_bytes(self) -> int | None:
        """Peak reserved of the steps: before the evaluation, and later if it then grew beyond that of the save.

        Peak allocated where segments expand: what is reserved then depends on more than the training.
        """
        peaks = self.obtained.get("peak_bytes")
        if not peaks:
            return None
        which = 0 if self.subject.best.candidate.arm.expandable_segments else 1
        before, end = int(peaks.get("before", peaks["end"])[which]), int(peaks["end"][which])
        return end if end > int(peaks.get("save", peaks["end"])[which]) else before

    @property
    def promised_peak_bytes(self) -> int:
        """What it is compared with."""
        return self.subject.promised.judged_bytes(self.subject.best.candidate.arm)

    @property
    def slack_bytes(self) -> int:
        """What a peak may be higher besides, for the libraries of a process of its own."""
        return CPU_SLACK_BYTES if self.subject.device.kind == "cpu" else 0

    @property
    def most_bytes(self) -> int:
        """What a training peak may reach without being a miss."""
        return round(self.promised_peak_bytes * (1 + MEMORY_TOLERANCE)) + self.slack_bytes

    def misses(self) -> list[str]:
        """What was promised and not kept, each in a sentence; empty where all was."""
        if self.obtained["state"] == "out_of_memory":
            return [f"memory ran out during {_DURING[self.obtained['during']]}: {self.obtained['message']}"]
        found = []
        promised, obtained = self.subject.promised, self.samples_per_second or 0.0
        if obtained < promised.samples_per_second * (1 - self.speed_tolerance):
            found.append(
                f"{format_rate(obtained)} samples/s are {1 - obtained / promised.samples_per_second:.1%} below the "
                f"promised {format_rate(promised.samples_per_second)}; {self.speed_tolerance:.1%} would be in order"
            )
        peak = self.training_peak_bytes or 0
        if peak > self.most_bytes:
            found.append(
                f"a peak of {format_bytes(peak)} is {peak / self.promised_peak_bytes - 1:.1%} above "
                f"the promised {format_bytes(self.promised_peak_bytes)}"
            )
        if self.obtained["loss_problem"]:
            found.append(str(self.obtained["loss_problem"]))
        return found

    def check(self) -> None:
        """Raise ``PromiseMissedError`` where a promise was not kept."""
        misses = self.misses()
        if misses:
            raise PromiseMissedError(
                "; ".join(misses),
                "search again with more --headroom or on an idle machine; autotune devices shows who else is there",
            )


# Beyond this a speed that is kept says little.
_TELLING_TOLERANCE = 0.2
_DURING = {"train": "training", "evaluate": "the evaluation", "save": "the checkpoint's saving", "": "the start"}


def verify(subject: Subject, steps: int, log_path: Path) -> Verification:
    """Run the stock process; ``TrialServerError`` where it fails for another reason than memory."""
    if steps < LEAST_STEPS:
        raise InvalidRequestError(
            f"--steps {steps} are too few to tell a speed after the warm-up", f"use {LEAST_STEPS} or more"
        )
    timeout_seconds = _START_SECONDS + _MOST_TIMES_SLOWER * steps * subject.promised.step_seconds
    job = subject.job(steps, evaluates=True)
    obtained = run_fresh("autotune.worker.stock", job, subject.device, log_path, timeout_seconds, subject.variables)
    if obtained["state"] == "failed":
        raise TrialServerError(f"the stock run failed: {obtained['message']}", f"its log is {log_path}")
    return Verification(subject, steps, obtained)


def notes(verification: Verification) -> list[str]:
    """What the reader should know of how far the comparison reaches."""
    found = []
    recorded = verification.subject.report.environment["packages"]
    changed = [
        f"{name} {version or 'none'}, now {now or 'none'}"
        for name, now in verification.obtained.get("packages", {}).items()
        if (version := recorded.get(name)) != now
    ]
    if changed:
        found.append(f"the study was measured with {'; '.join(changed)}")
    if verification.speed_tolerance > _TELLING_TOLERANCE:
        found.append(
            f"the two ± leave {verification.speed_tolerance:.0%} open: too noisy a machine for a speed to tell much"
        )
    if verification.obtained.get("skipped_steps"):
        found.append(f"fp16's gradient scaler left out {verification.obtained['skipped_steps']} updates at the start")
    return found


def verification_document(verification: Verification) -> Document:
    """As ``--json`` prints it; what was not measured is ``None``."""
    subject, obtained = verification.subject, verification.obtained
    promised, speed = subject.promised, verification.samples_per_second
    peak = verification.training_peak_bytes
    peaks = {name: reserved for name, (_, reserved) in obtained.get("peak_bytes", {}).items()}
    return {
        "study": subject.report.study.name,
        "model": subject.report.workload["model"],
        "device": subject.device.name,
        "candidate": subject.best.candidate.parameters(),
        "steps": verification.steps,
        "kept": not verification.misses(),
        "misses": verification.misses(),
        "promised": {
            "samples_per_second": promised.samples_per_second,
            "relative_spread": promised.relative_spread,
            "peak_allocated_bytes": promised.peak_allocated_bytes,
            "peak_reserved_bytes": promised.peak_reserved_bytes,
            "joules_per_sample": promised.joules_per_sample,
        },
        "obtained": {
            "state": obtained["state"],
            "message": obtained.get("message"),
            "samples_per_second": speed,
            "relative_spread": verification.relative_spread if speed else None,
            "samples_per_second_each": obtained.get("samples_per_second_each", []),
            "measured_steps": obtained.get("measured_steps"),
            "peak_allocated_bytes": obtained.get("peak_bytes", {}).get("before", [None])[0],
            "peak_reserved_bytes": peak,
            "peak_reserved_with_evaluation_bytes": peaks.get("evaluate"),
            "peak_reserved_with_save_bytes": peaks.get("save"),
            "peak_reserved_at_the_end_bytes": peaks.get("end"),
            "evaluation_seconds": obtained.get("pause_seconds", {}).get("evaluate"),
            "save_seconds": obtained.get("pause_seconds", {}).get("save"),
            "evaluation_batch_size": obtained.get("evaluation_batch_size"),
            "joules_per_sample": obtained.get("joules_per_sample"),
            "skipped_steps": obtained.get("skipped_steps"),
        },
        "samples_per_second_ratio": speed / promised.samples_per_second if speed else None,
        "peak_reserved_ratio": peak / verification.promised_peak_bytes if peak else None,
        "speed_tolerance": verification.speed_tolerance,
        "memory_tolerance": MEMORY_TOLERANCE,
        "memory_slack_bytes": verification.slack_bytes,
        "cap_bytes": subject.cap_bytes,
        "notes": notes(verification),
    }
