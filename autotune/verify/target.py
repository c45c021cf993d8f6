"""Say what verify trains: a study's winner as its export or a file has it, where it was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import DeviceError, InvalidRequestError, UnknownStudyError
from autotune.core.outcome import Measurement
from autotune.core.placement import Placement
from autotune.devices import list_devices
from autotune.results.export import make_export
from autotune.results.report import Report, load_report
from autotune.store import Store, TrialRecord
from autotune.verify.comparison import Interval


@dataclass(frozen=True)
class Subject:
    """A study's winner, its exported arguments, and where to run them."""

    report: Report
    best: TrialRecord
    promised: Measurement
    """Of all measured processes of the winner."""
    promise: Interval
    """The speed that its next run is promised to have."""
    processes: int
    """How many processes of the winner that rests on."""
    arguments: Document
    """Fields of ``TrainingArguments``, as exported or as a file has them."""
    attn_implementation: str
    placement: Placement
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, which the export asks for."""

    @property
    def has_data(self) -> bool:
        """Whether it was searched on the user's own data."""
        return bool(self.report.workload.get("data"))

    @property
    def cap_bytes(self) -> int | None:
        """The cap of the study's trials where a memory limit made it; ``None``: all that the device has."""
        ceiling = self.report.ceiling
        return None if ceiling.limit_bytes is None else ceiling.cap_bytes

    def job(self, steps: int, **more: Any) -> Document:
        """What a process of ``autotune.worker.verify.stock`` is told."""
        return {
            "workload": self.report.workload,
            "arguments": self.arguments,
            "attn_implementation": self.attn_implementation,
            **self.placement.document(),
            "cap_bytes": self.cap_bytes,
            "cpu_affinity": self.best.candidate.arm.cpu_affinity,
            "cpu_core": self.promised.cpu_core,
            "seed": self.report.study.request["seed"],
            "steps": steps,
            **more,
        }


def what_is_not_verified(workload: Document) -> str | None:
    """What of a workload no hundred steps of a stock ``Trainer`` can show, and why; ``None`` where they can."""
    if workload.get("source") or workload.get("task") == "own":
        return "code of its own, which verify does not run: it makes model and Trainer itself"
    if (workload.get("data") or {}).get("group_by_length"):
        # Batches come longest first, fifty at a time.
        return "samples grouped by length, and a part of such an epoch says nothing of it"
    return None


def check_can_be_verified(workload: Document) -> None:
    """Raise before a search that ends with ``verify`` for what that would refuse; ``InvalidRequestError``."""
    unverified = what_is_not_verified(workload)
    if unverified is not None:
        raise InvalidRequestError(f"--verify after a search with {unverified}", "leave --verify out")


def subject_of(report: Report, placement: Placement, arguments: Document | None = None) -> Subject:
    """The winner of a study, with ``arguments`` from a file in place of its export's.

    Raises ``NoResultError`` where the study has no winner and ``InvalidRequestError`` where the file is not its export.
    """
    unverified = what_is_not_verified(report.workload)
    if unverified is not None:
        raise InvalidRequestError(
            f"the study {report.study.name!r} was searched with {unverified}",
            "train with the export as usual; the Trainer's log tells samples a second",
        )
    export = make_export(report)
    best, promised, speed = report.best, report.pooled(report.best), report.speed(report.best)
    assert best is not None, "an export has a winner"
    assert promised is not None, "a winner was measured"
    assert speed is not None, "what was measured has a speed"
    if arguments is not None:
        _check_is_export_of(arguments, export.measured_arguments, report)
    return Subject(
        report,
        best,
        promised,
        Interval(speed.samples_per_second, *speed.interval()),
        speed.processes,
        arguments or export.arguments,
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
        exported = make_export(report).measured_arguments
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


def placement_of(report: Report) -> Placement:
    """Return the placement here that a study was measured on, by UUID or at least of the same name and size.

    Raises ``DeviceError`` where there is none, since nothing was promised for any other.
    """
    measured = report.environment
    here = [device for device in list_devices() if device.kind == measured["device_kind"]]
    for device in here:
        if device.uuid == measured["device_uuid"] and device.name == measured["device_name"]:
            return Placement.of(device)
    for device in here:
        same_size = device.memory_total_bytes == measured["device_memory_bytes"]
        if device.name == measured["device_name"] and (same_size or device.kind == "cpu"):
            return Placement.of(device)
    names = ", ".join(f"{device.label} ({device.name})" for device in list_devices())
    raise DeviceError(
        f"the study {report.study.name!r} was measured on {measured['device_name']}; here are {names}",
        "verify it on that machine, or search again on this one",
    )
