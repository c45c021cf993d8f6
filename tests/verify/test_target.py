"""Test on which devices a study is verified."""

import dataclasses

import pytest
from test_throughput_promise import GPU, target

from autotune.core.errors import DeviceError
from autotune.verify.target import placement_of


def test_only_the_devices_that_are_given_are_used() -> None:
    """A search of a service has devices of its own; on others of its machine other searches run."""
    plain = target().report
    environment = {
        **plain.environment,
        "device_kind": "cuda",
        "device_name": GPU.name,
        "device_uuid": GPU.uuid,
        "device_memory_bytes": GPU.memory_total_bytes,
    }
    report = dataclasses.replace(plain, environment=environment)
    other = dataclasses.replace(GPU, uuid="GPU-2", index=1)
    assert placement_of(report, [other, GPU]).device == GPU
    assert placement_of(report, [other]).device == other
    with pytest.raises(DeviceError, match="was measured on NVIDIA H200; this machine has cuda:1"):
        placement_of(report, [dataclasses.replace(other, name="NVIDIA L4")])
