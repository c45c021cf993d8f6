"""Choose what is verified: the winner of a study with its exported arguments, where it was measured.

The promised speed of the next run is compared with the speed of a run by their intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError, UnknownStudyError
from autotune.core.outcome import Measurement
from autotune.core.placement import Placement
from autotune.core.real_training import StockWork
from autotune.core.statistics import estimate_mean
from autotune.core.units import format_rate, format_spread, is_lopsided
from autotune.core.workload import Workload
from autotune.devices.listing import devices_of_ranks, list_devices
from autotune.results.export import Export, make_export
from autotune.results.report import Report, load_report
from autotune.space.arms import applied_settings
from autotune.store.records import TrialRecord
from autotune.store.repository import Store

Verdict = Literal["kept", "missed", "cannot_tell", "faster"]

TELLING_SLACK = 0.2
"""Share of slow-down that a run must be able to refute. Above it, agreement with the promise says little. A choice."""


@dataclass(frozen=True)
class Interval:
    """A speed in samples a second, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the mean; infinite where the interval is unbounded."""
        return (self.high - self.low) / 2 / self.mean

    def scaled(self, factor: float) -> Interval:
        """Return this interval for a speed that is ``factor`` times as high."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def describe_speed(speed: Interval) -> str:
    """Return speed and interval: ``320.0 ± 1.2%``, or ``305.4 (190.7 to 764.2)`` where it is asymmetric.

    ``51.8 (15.4 or more)`` where it has no upper end.
    """
    if math.isinf(speed.high):
        return f"{format_rate(speed.mean)} ({format_rate(speed.low)} or more)"
    if is_lopsided(speed.mean, speed.low, speed.high):
        return f"{format_rate(speed.mean)} ({describe_ends(speed)})"
    return f"{format_rate(speed.mean)}{format_spread(speed.relative_half_width)}"


def describe_ends(interval: Interval) -> str:
    """Return both ends of an interval: ``310.4 to 329.6``."""
    return f"{format_rate(interval.low)} to {format_rate(interval.high)}"


def mean_speed(samples_per_second: float, stretch_speeds: Sequence[float]) -> Interval:
    """Return a run's mean speed with its interval, from the speeds of the run's consecutive stretches.

    A stretch is the mean of several steps, so neighbouring steps that are slow together widen the interval. A single
    stretch gives no variance, so its interval is unbounded.

    A run's mean speed is that of its total time. So the interval is computed for the mean seconds of a sample, and
    converted to speeds. A stall of the host in one stretch then widens it to the speed of the other stretches at least:
    one stall does not refute a promise. A speed that the run does not reach even without its slowest stretch is
    refuted.
    """
    if not stretch_speeds:
        return Interval(samples_per_second, 0.0, math.inf)
    seconds = [1 / speed for speed in stretch_speeds]
    mean = math.fsum(seconds) / len(seconds)
    least, most = _ends_of_mean(seconds)
    # The stretches stay in their order, since neighbours may be slow together.
    slowest = seconds.index(max(seconds))
    least_without_slowest, _ = _ends_of_mean([*seconds[:slowest], *seconds[slowest + 1 :]])
    least = max(least, least_without_slowest)
    high = samples_per_second * mean / least if least else math.inf
    return Interval(samples_per_second, samples_per_second * mean / most, high)


def _ends_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval of a mean of positive values; 0 and infinity where it is unbounded."""
    if len(values) < 2:
        return 0.0, math.inf
    estimate = estimate_mean(values, relative_prior=None)
    half = estimate.half_width()
    return max(0.0, estimate.mean - half), estimate.mean + half


def slack(promised: Interval, obtained: Interval) -> float:
    """Return the largest relative slow-down that would go unnoticed in a run as noisy as this one."""
    # A run is refuted where ``noise`` times its mean, the upper end, is below the promised interval.
    noise = obtained.high / obtained.mean
    return 1 - promised.low / promised.mean / noise


def compare(promised: Interval, obtained: Interval) -> Verdict:
    """Return whether a run kept the promised speed.

    It is missed where the run's interval lies wholly below the promised one. It is kept where the run's speed lies in
    the promised interval, unless both intervals are so wide that hardly any speed would have missed. A run whose speed
    lies above the promised interval is faster than promised: the search measured too low. In all other cases nobody can
    tell.
    """
    if obtained.high < promised.low:
        return "missed"
    is_sure = obtained.low >= promised.mean or slack(promised, obtained) <= TELLING_SLACK
    if not is_sure or obtained.mean < promised.low:
        return "cannot_tell"
    return "faster" if obtained.mean > promised.high else "kept"


@dataclass(frozen=True)
class Target:
    """The winner of a study with its promised speed, its exported arguments, and the devices to train on."""

    report: Report
    best: TrialRecord
    promised: Measurement
    """Measurement pooled over all processes of the winner."""
    promise: Interval
    """The promised speed of its next run."""
    processes: int
    """Number of processes behind the promise."""
    arguments: Document
    """Fields of ``TrainingArguments``, as exported or read from a file."""
    attn_implementation: str
    placement: Placement
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the export asks for."""

    @property
    def has_data(self) -> bool:
        """Whether the search used the user's own dataset."""
        return bool(self.report.workload.get("data"))

    @property
    def cap_bytes(self) -> int | None:
        """The memory cap of the study's trials, if it had a limit; ``None`` means all memory of the device."""
        ceiling = self.report.ceiling
        return None if ceiling.limit_bytes is None else ceiling.cap_bytes

    @property
    def workload(self) -> Workload:
        """The workload of the study."""
        return Workload.from_document(self.report.workload)

    def work(self, steps: int, *, evaluates: bool, data_folder: Path | None = None) -> StockWork:
        """Return the work for a process of ``autotune.worker.verify.stock``, which also ``evaluates`` and saves."""
        return StockWork(
            self.workload,
            self.placement.rank_devices,
            self.arguments,
            self.attn_implementation,
            self.report.study.request["seed"],
            steps,
            evaluates=evaluates,
            cap_bytes=self.cap_bytes,
            pinned=self.best.candidate.arm.cpu_affinity,
            cpu_core=self.promised.cpu_core,
            data_folder=str(data_folder) if data_folder else None,
            applied=applied_settings(self.best.candidate.arm),
            context_parallel=self.best.candidate.arm.context_parallel,
        )


def what_is_not_verified(workload: Document, *, any_order: bool = False) -> str | None:
    """Return in words the part of a workload that a stock ``Trainer`` cannot verify in 100 steps; else ``None``."""
    if workload.get("source") or workload.get("task") == "own":
        return "your own code, which makes the model and the Trainer itself: verify does not run that"
    if any_order or (workload.get("data") or {}).get("group_by_length"):
        # A search in any order may group samples by length: batches come longest first, fifty at a time.
        return "samples grouped by length, where a few steps do not represent an epoch"
    return None


def check_can_be_verified(workload: Document, *, any_order: bool) -> None:
    """Raise ``InvalidRequestError`` for a search with ``--verify`` that cannot be verified.

    The winner of a search in ``any_order`` may group its samples.
    """
    unverified = what_is_not_verified(workload, any_order=any_order)
    if unverified is not None:
        raise InvalidRequestError(f"--verify after a search with {unverified}", "leave --verify out")


def verifiable_export(report: Report) -> Export:
    """Return the export of a winner. Raises an error without a winner, or for one that a stock Trainer cannot run."""
    is_ordered = report.best is not None and report.best.candidate.arm.train_sampling_strategy is not None
    unverified = what_is_not_verified(report.workload, any_order=is_ordered)
    if unverified is not None:
        raise InvalidRequestError(
            f"the study {report.study.name!r} was searched with {unverified}",
            "train with the export as usual; the Trainer's log tells samples a second",
        )
    return make_export(report)


def target_of(report: Report, placement: Placement, arguments: Document | None = None) -> Target:
    """Return the winner of a study as a target, with ``arguments`` from a file in place of its export's.

    Raises ``NoResultError`` where the study has no winner, and ``InvalidRequestError`` where the file is not its
    export.
    """
    export = verifiable_export(report)
    best, promised, speed = report.best, report.pooled(report.best), report.speed(report.best)
    assert best is not None, "an export has a winner"
    assert promised is not None, "a winner was measured"
    assert speed is not None, "what was measured has a speed"
    if arguments is not None:
        _check_is_export_of(arguments, export.measured_arguments, report)
    return Target(
        report,
        best,
        promised,
        Interval(speed.samples_per_second, *speed.interval()),
        speed.processes,
        arguments or dict(export.arguments),
        export.model_arguments["attn_implementation"],
        placement,
        export.environment,
    )


def _check_is_export_of(arguments: Document, exported: Document, report: Report) -> None:
    """Raise ``InvalidRequestError`` where the arguments of a file differ from a study's export, or are unknown."""
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
        raise InvalidRequestError(f"{', '.join(unknown)} in the file is not a field of TrainingArguments", "remove it")


def read_arguments(path: Path) -> Document:
    """Return the JSON of an export file. Raises ``InvalidRequestError`` for an invalid file."""
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read as JSON ({error})", "make it with autotune export STUDY > FILE"
        ) from error
    if not isinstance(arguments, dict) or "per_device_train_batch_size" not in arguments:
        raise InvalidRequestError(
            f"{path} is not an export: per_device_train_batch_size is missing", "make it with autotune export STUDY"
        )
    return arguments


def find_exported(store: Store, arguments: Document) -> Report:
    """Return the newest study that exports these values. Raises ``UnknownStudyError`` where there is none.

    Raises ``InvalidRequestError`` where studies of different workloads match: the file does not name its model.
    """
    reports: list[Report] = []
    for summary in store.studies():
        if summary.best is None:
            continue
        report = load_report(store, summary.study.name)
        exported = make_export(report).measured_arguments
        if all(arguments.get(name) == value for name, value in exported.items()):
            reports.append(report)
    if not reports:
        raise UnknownStudyError(
            f"no study in {store.label} exports this file",
            "name the study with --study, or its database with --storage; an export of another machine is "
            "verified there",
        )
    if len({report.study.workload_id for report in reports}) > 1:
        names = ", ".join(report.study.name for report in reports[:5])
        raise InvalidRequestError(
            f"studies of different models or data export these values: {names}", "say which is meant with --study"
        )
    return reports[0]


def placement_of(report: Report, among: Sequence[Device] | None = None) -> Placement:
    """Return the placement of a study, found by UUID, or by name and memory size.

    It is chosen from ``among``, by default from this machine's devices. Raises ``DeviceError`` without matching
    devices, since the promise is valid for no others.
    """
    measured = report.environment
    devices = list_devices() if among is None else tuple(among)
    if "ranks" in measured:
        return Placement.of(*devices_of_ranks(measured, report.study.name, devices))
    kind, name = measured["device_kind"], measured["device_name"]
    alike = [device for device in devices if (device.kind, device.name) == (kind, name)]
    # The measured device itself comes first, then others of its kind and memory.
    same = [device for device in alike if device.uuid == measured["device_uuid"]]
    same += [d for d in alike if d.kind == "cpu" or d.memory_total_bytes == measured["device_memory_bytes"]]
    if same:
        return Placement.of(same[0])
    names = ", ".join(f"{device.label} ({device.name})" for device in devices)
    raise DeviceError(
        f"the study {report.study.name!r} was measured on {measured['device_name']}; this machine has {names}",
        "verify it on that machine, or search again on this one",
    )
