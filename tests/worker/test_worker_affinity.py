"""Test a training process pinned to one core, and its child processes, which are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_client import ServerClient
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.devices.cores import can_pin, usable_core_numbers
from autotune.worker.verify import stock

pytestmark = pytest.mark.skipif(not can_pin(), reason="this system cannot pin")


def test_all_threads_are_pinned_and_no_child_is() -> None:
    script = Path(__file__).with_name("print_affinity.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    alone = [found["core"]]
    assert found["core"] in found["before"]
    assert found["own"] == found["after"] == alone
    assert found["threads"] == [alone, alone], "one from before, one from after"
    assert found["torch_threads"] == 1
    for child in ("program", "fork", "spawn", "forkserver"):
        assert found[child] == found["before"], child


@pytest.mark.parametrize(("job", "core"), [({"cpu_affinity": True, "cpu_core": 5}, 5), ({"cpu_affinity": False}, None)])
def test_the_stock_run_is_pinned_as_the_winner_was(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], core: int | None
) -> None:
    done: list[str] = []

    def pin(_: str, wanted: int | None) -> int | None:
        done.append("pinned")
        return wanted

    monkeypatch.setattr(stock, "pin_to_one_core", pin)
    monkeypatch.setattr(stock, "open_meter", lambda *_: done.append("opened"))
    monkeypatch.setattr(stock, "_train", lambda *_: {})
    said = stock.run_stock(
        {"device_kind": "cpu", "device_uuid": "cpu", "cap_bytes": None, "steps": 20, "evaluates": False, **job}
    )
    assert said["cpu_core"] == core
    assert done == (["pinned", "opened"] if core else ["opened"]), "before the device is opened"


def test_a_pinned_trial_says_on_which_core_it_ran(trial_server: ServerClient) -> None:
    answer = trial_server.trial(tiny_workload("bert-tiny"), Candidate(Arm(cpu_affinity=True), 4))
    assert answer.completed.measurement.cpu_core in usable_core_numbers()
    free = trial_server.trial(tiny_workload("bert-tiny"), Candidate(Arm(), 4))
    assert free.completed.measurement.cpu_core is None
