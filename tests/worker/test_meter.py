"""Test that the CPU meter and the fake meter keep the same contract."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_meter import FakeClock, FakeMeter
from meter_contract import check_contract

from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.execution.process_environment import server_environment

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
    command = [sys.executable, str(CONTRACT), "cpu"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "kept", ended.stderr
