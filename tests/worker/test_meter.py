"""Test that the CPU meter and the fake meter keep the same contract."""

import os
from pathlib import Path

import pytest
import warm
from fake_meter import FakeClock, FakeMeter
from meter_contract import check_contract

from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.core.units import MIB
from autotune.execution.child_process import server_environment
from autotune.worker.trial.meter import growth_of

CONTRACT = Path(__file__).with_name("meter_contract.py")


def test_the_fake_keeps_the_contract() -> None:
    clock = FakeClock()
    meter = FakeMeter(clock)
    check_contract(meter, meter.allocate, clock.sleep)


def test_a_fake_that_forgets_its_limit_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    meter = FakeMeter(clock)
    monkeypatch.setattr(meter, "limit", lambda cap_bytes: None)
    with pytest.raises(AssertionError, match="beyond the cap"):
        check_contract(meter, meter.allocate, clock.sleep)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the CPU's meter reads Linux's /proc")
def test_the_cpu_meter_keeps_the_contract(cpu: Device) -> None:
    environment = server_environment(Placement.of(cpu), os.environ, offline=True)
    assert warm.output_of(str(CONTRACT), "cpu", env=environment) == "kept\n"


@pytest.mark.parametrize(
    ("held", "grows"),
    [
        ([1, 100, 100, 100, 100, 100], None),
        # Once, as when an allocator takes more; in each step; by little; at the end alone.
        ([1, 100, 100, 140, 140, 140], None),
        ([1, 100, 102, 104, 106, 108], 2),
        ([1, 100, 100, 100, 130, 160], None),
        ([1, 100, 102], None),
        ([None] * 9, None),
    ],
)
def test_memory_that_grows_with_each_step_is_told(held: list[int | None], grows: int | None) -> None:
    found = growth_of([None if each is None else each * MIB for each in held])
    assert found == (None if grows is None else grows * MIB)
    assert growth_of([None if each is None else each * 100 for each in held]) is None
