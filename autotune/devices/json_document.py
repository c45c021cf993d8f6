"""Describe the JSON document that ``autotune devices`` prints."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.core.device import Device, Precision
from autotune.core.schema import decode, encode, make_record, record_fields


@functools.cache
def devices_type() -> type[Any]:
    """Return the type of the document."""
    device = make_record("Device", [("label", str), *record_fields(Device), ("precisions", tuple[Precision, ...])])
    return make_record(
        "Devices",
        [
            ("devices", tuple[device, ...]),  # type: ignore[valid-type]
            ("nvml_problem", str | None),
            ("packages", dict[str, str | None]),
        ],
    )


def devices_document(devices: Iterable[Device], nvml_problem: str | None, packages: Mapping[str, str | None]) -> Any:
    """Return the document: the devices, why NVML cannot be used, the version of each optional package."""
    found = [device.document() for device in devices]
    return encode(decode({"devices": found, "nvml_problem": nvml_problem, "packages": dict(packages)}, devices_type()))
