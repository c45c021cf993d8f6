"""Test the facts that a measurement depends on: recorded, compared for reuse and when resuming."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from searching import BERT_LARGE, FACTS, H200, prepared, request

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.devices import host
from autotune.devices.host import machine_id
from autotune.devices.nvml import NvmlSession
from autotune.space.features import library_versions
from autotune.tuning import environment as module
from autotune.tuning.environment import (
    comparable_environment,
    environment_fingerprint,
    is_of_kind,
    is_same_machine,
    measured_environment,
    measured_variables,
)
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.studies import changes_since

FIRST_KEYS = {"host", "libraries", "gpu_policy", "cudnn", "cublas"}
"""Of environments, what the first releases did not record."""


def environment(**reported: Any) -> Document:
    """The environment of a search on a GPU, with more that a process with torch says."""
    facts = dataclasses.replace(FACTS, software=dataclasses.replace(FACTS.software, **reported))
    return prepare(request(), facts).environment


def key_of_reuse() -> str:
    """The key under which the trials of a search on a GPU are reused."""
    return environment_fingerprint(prepared().environment)


class TestKey:
    @pytest.mark.parametrize(
        ("fact", "value"),
        [
            ("processor_name", "A slower processor"),
            ("usable_cores", 3),
            ("library_versions", {"nvidia-cudnn-cu13": "9.24.0.43"}),
        ],
    )
    def test_the_host_and_the_libraries_of_a_step_count_on_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch, fact: str, value: object
    ) -> None:
        before = key_of_reuse()
        monkeypatch.setattr(module, fact, lambda: value)
        assert key_of_reuse() != before

    def test_power_limit_and_clocks_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def policy(_: NvmlSession, uuid: str) -> dict[str, float | None]:
            asked.append(uuid)
            return {"power_limit_watts": 700.0 if len(asked) < 2 else 450.0}

        monkeypatch.setattr(NvmlSession, "policy", policy)
        assert key_of_reuse() != key_of_reuse()
        assert asked == [H200.uuid] * 2

    def test_versions_that_a_process_with_torch_reports_count(self) -> None:
        assert environment(cudnn=91900) != environment(cudnn=92400)

    @pytest.mark.parametrize(
        "name",
        [
            "CUDA_MODULE_LOADING",
            "KMP_BLOCKTIME",
            "LD_PRELOAD",
            "MKL_DYNAMIC",
            "OMP_PROC_BIND",
            "TORCHINDUCTOR_MAX_AUTOTUNE",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        ],
    )
    def test_variables_count(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(name, raising=False)
        before = key_of_reuse()
        monkeypatch.setenv(name, "1")
        assert key_of_reuse() != before

    def test_what_changes_no_step_does_not_count(self) -> None:
        others = {"CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": "/tmp/x", "HOME": "/root"}
        assert measured_variables(others) == {}

    def test_where_weights_come_from_does_not_count(self) -> None:
        quantized = dataclasses.replace(BERT_LARGE, peft="lora", lora_rank=8, quantize="4bit")
        loaded = dataclasses.replace(quantized, weights="acme/bert")
        assert loaded.fingerprint() == quantized.fingerprint()
        assert dataclasses.replace(BERT_LARGE, weights="acme/bert").fingerprint() == BERT_LARGE.fingerprint()


def test_no_library_is_imported_to_know_its_version() -> None:
    code = "import sys, autotune.space.features as f; f.library_versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    assert all(isinstance(version, str) for version in library_versions().values())


def test_machines_of_one_kind_are_told_apart() -> None:
    here = environment()
    other = {**here, "device_uuid": "GPU-1"}
    assert is_of_kind(here, other)
    assert environment_fingerprint(here) != environment_fingerprint(other)
    assert not is_same_machine(other, here)
    # The order of the devices does not count, nor what an earlier autotune did not record.
    several = {**here, "device_uuids": ["GPU-0", "GPU-1"]}
    assert is_same_machine({**several, "device_uuids": ["GPU-1", "GPU-0"]}, several)
    cpu = {**here, "device_uuid": "cpu", "machine": "one"}
    assert is_same_machine({name: value for name, value in cpu.items() if name != "machine"}, cpu)
    assert not is_same_machine({**cpu, "machine": "another"}, cpu)


def test_a_host_is_known_by_its_id_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one image share the id; without one, the name is all there is."""
    found = []
    for known, name in (("", "a"), ("1" * 32, "a"), ("1" * 32, "b"), ("2" * 32, "b")):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc/machine-id").write_text(known + "\n")
        monkeypatch.setattr("platform.node", lambda name=name: name)
        found.append(host.machine_id(tmp_path))
        assert host.machine_id(tmp_path) == found[-1]
    assert len(set(found)) == 4
    assert "1" * 32 not in found
    assert host.machine_id(tmp_path / "nowhere")


class TestResuming:
    """A recorded environment against today's."""

    def changes(self, recorded: Document, given: Prepared | None = None, **workload: Any) -> list[str]:
        given = given or prepared()
        return changes_since(given, given.request.document(), {**BERT_LARGE.recorded_document(), **workload}, recorded)

    @pytest.fixture(autouse=True)
    def _plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "measured_variables", lambda _: {"KMP_BLOCKTIME": "0"})

    def test_the_same_machine(self) -> None:
        assert self.changes(prepared().environment) == []

    def test_what_was_not_recorded_then_says_nothing(self) -> None:
        earlier = {name: value for name, value in prepared().environment.items() if name not in FIRST_KEYS}
        assert self.changes(earlier) == []

    def test_what_was_recorded_is_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorded = prepared().environment
        monkeypatch.setattr(module, "processor_name", lambda: "A slower processor")
        assert self.changes({**recorded, "variables": {}}) == [
            f"host.processor: {recorded['host']['processor']!r}, now 'A slower processor'",
            "variables.KMP_BLOCKTIME: not given, now '0'",
        ]


def test_a_cpu_has_no_policy() -> None:
    device = Device("cpu", None, "cpu", "CPU", 1 << 34, None, 0, 1 << 34)
    recorded = module.describe_environment(Placement.of(device), BERT_LARGE, [], FACTS.software, 1)
    assert recorded["gpu_policy"] is None
    assert recorded["machine"] == machine_id()
    assert recorded["cpus"] == recorded["host"]["usable_cores"]
    assert measured_environment(recorded)["host"] == recorded["host"]


def test_of_several_gpus_nccl_and_its_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    second = dataclasses.replace(H200, uuid="GPU-1", index=1)

    def recorded(*devices: Device) -> Document:
        return module.describe_environment(Placement.of(*devices), BERT_LARGE, [], FACTS.software, 1)

    monkeypatch.setattr(module, "version_of", lambda package: "2.28.9" if package == "nvidia-nccl-cu13" else None)
    alone, plain = recorded(H200), recorded(H200, second)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    nccl = recorded(H200, second)["nccl"]
    assert nccl["version"] == plain["nccl"]["version"] == "2.28.9"
    assert nccl["variables"] == {**plain["nccl"]["variables"], "NCCL_P2P_DISABLE": "1"}
    assert environment_fingerprint(recorded(H200, second)) != environment_fingerprint(plain)
    # One GPU exchanges nothing.
    assert "nccl" not in alone
    assert environment_fingerprint(recorded(H200)) == environment_fingerprint(alone)
    # A study of before it was recorded goes on.
    assert "nccl" not in comparable_environment(recorded(H200, second), {"ranks": plain["ranks"]})
