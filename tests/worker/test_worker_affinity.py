"""Test a training process pinned to one core, and its child processes, which are not."""

import json
from pathlib import Path

import pytest
import warm
from server_client import ServerClient
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.placement import RankDevices
from autotune.core.real_training import StockResult, StockWork
from autotune.devices.cores import can_pin, usable_core_numbers
from autotune.worker.verify import stock

pytestmark = pytest.mark.skipif(not can_pin(), reason="this system cannot pin")


def test_all_threads_are_pinned_and_no_child_is() -> None:
    found = json.loads(warm.output_of(str(Path(__file__).with_name("print_affinity.py"))))
    alone = [found["core"]]
    assert found["core"] in found["before"]
    assert found["own"] == found["after"] == alone
    assert found["threads"] == [alone, alone], "one from before, one from after"
    assert found["torch_threads"] == 1
    for child in ("program", "fork", "spawn", "forkserver"):
        assert found[child] == found["before"], child


@pytest.mark.parametrize(("pinned", "core"), [(True, 5), (False, None)])
def test_the_stock_run_is_pinned_as_the_winner_was(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, core: int | None
) -> None:
    done: list[str] = []

    def pin(_: str, wanted: int | None) -> int | None:
        done.append("pinned")
        return wanted

    monkeypatch.setattr(stock, "pin_to_one_core", pin)
    monkeypatch.setattr(stock, "open_meter", lambda *_: done.append("opened"))
    monkeypatch.setattr(stock, "_train", lambda *given: StockResult("completed", cpu_core=given[-1]))
    devices = RankDevices("cpu", ("cpu",))
    work = StockWork(tiny_workload("bert-tiny"), devices, {}, "eager", 42, 20, pinned=pinned, cpu_core=5)
    assert stock.run_stock(work, "/nowhere").cpu_core == core
    assert done == (["pinned", "opened"] if core else ["opened"]), "before the device is opened"


def test_a_pinned_trial_says_on_which_core_it_ran(trial_server: ServerClient) -> None:
    answer = trial_server.trial(tiny_workload("bert-tiny"), Candidate(Arm(cpu_affinity=True), 4))
    assert answer.completed.measurement.cpu_core in usable_core_numbers()
    free = trial_server.trial(tiny_workload("bert-tiny"), Candidate(Arm(), 4))
    assert free.completed.measurement.cpu_core is None
