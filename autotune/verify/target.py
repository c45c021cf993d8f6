"""Choose what is verified: the winner of a study with its exported arguments, where it was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError, UnknownStudyError
from autotune.core.outcome import Measurement
from autotune.core.placement import Placement
from autotune.core.verification import StockWork
from autotune.core.workload import Workload
from autotune.devices.listing import devices_of_ranks, list_devices
from autotune.results.export import Export, make_export
from autotune.results.report import Report, load_report
from autotune.space.levers import applied_settings
from autotune.store.records import TrialRecord
from autotune.store.repository import Store
from autotune.verify.comparison import Interval


@dataclass(frozen=True)
class Target:
    """The winner of a study, its exported arguments, and where to run them."""

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
        """The cap of the study's trials, if it had a memory limit; ``None`` means all that the device has."""
        ceiling = self.report.ceiling
        return None if ceiling.limit_bytes is None else ceiling.cap_bytes

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return Workload.from_document(self.report.workload)

    def work(self, steps: int, *, evaluates: bool, data_folder: Path | None = None) -> StockWork:
        """Return the work of a process of ``autotune.worker.verify.stock``."""
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


def what_is_not_verified(workload: Document) -> str | None:
    """Say what of a workload a hundred steps of a stock ``Trainer`` cannot verify; ``None`` where they can."""
    if workload.get("source") or workload.get("task") == "own":
        return "your own code, which makes the model and the Trainer itself: verify does not run that"
    if (workload.get("data") or {}).get("group_by_length"):
        # Batches come longest first, fifty at a time.
        return "samples grouped by length, where a few steps do not represent an epoch"
    return None


def check_can_be_verified(workload: Document) -> None:
    """Raise ``InvalidRequestError`` for a search with ``--verify`` that could not be verified at its end."""
    unverified = what_is_not_verified(workload)
    if unverified is not None:
        raise InvalidRequestError(f"--verify after a search with {unverified}", "leave --verify out")


def verifiable_export(report: Report) -> Export:
    """Return the export of a winner; raises an error where there is none, or none that a stock Trainer can show."""
    unverified = what_is_not_verified(report.workload)
    if unverified is not None:
        raise InvalidRequestError(
            f"the study {report.study.name!r} was searched with {unverified}",
            "train with the export as usual; the Trainer's log tells samples a second",
        )
    return make_export(report)


def target_of(report: Report, placement: Placement, arguments: Document | None = None) -> Target:
    """Return the winner of a study, with ``arguments`` from a file in place of its export's.

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
    """Return the JSON of an export; raises ``InvalidRequestError`` where the file holds none."""
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
    """Return the newest study that exports these values; raises ``UnknownStudyError`` where there is none.

    Raises ``InvalidRequestError`` where studies of different workloads do: the file does not name its model.
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
    """Return the placement that a study was measured on, by UUID, or by name and memory size.

    It is one of this machine's devices, or ``among`` those that are given.

    Raises ``DeviceError`` where there is none, since the promise holds for no other.
    """
    measured = report.environment
    devices = list_devices() if among is None else tuple(among)
    if "ranks" in measured:
        return Placement.of(*devices_of_ranks(measured, report.study.name, devices))
    here = [device for device in devices if device.kind == measured["device_kind"]]
    for device in here:
        if device.uuid == measured["device_uuid"] and device.name == measured["device_name"]:
            return Placement.of(device)
    for device in here:
        same_size = device.memory_total_bytes == measured["device_memory_bytes"]
        if device.name == measured["device_name"] and (same_size or device.kind == "cpu"):
            return Placement.of(device)
    names = ", ".join(f"{device.label} ({device.name})" for device in devices)
    raise DeviceError(
        f"the study {report.study.name!r} was measured on {measured['device_name']}; this machine has {names}",
        "verify it on that machine, or search again on this one",
    )
