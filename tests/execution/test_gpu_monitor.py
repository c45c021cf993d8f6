"""Test neighbours, throttled clocks and lost GPUs, with a stand-in NVML library that changes during trials."""

from pathlib import Path
from typing import Any

import pytest
from machine import Machine, uuid_of

GIB = 1024**3

SET_UP = """
import dataclasses, sys, threading
sys.path.insert(0, {tests!r})
from recorded import job_of, measurement, out_of_memory
from autotune.execution import gpu_monitor as watch
from autotune.core.errors import DeviceError
from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Failed
from autotune.core.placement import Placement
from autotune.execution.executor import run_to_end
from autotune.execution.gpu_monitor import WatchedExecutor
watch._INTERVAL_SECONDS = 0.01
watch._RETURN_SECONDS, watch._NEIGHBOUR_SECONDS = 0.1, 0.3
CANDIDATE = Candidate(Arm("bf16"), 8, 1)
GIB = 1024**3
notes = []

class Trials:
    def __init__(self, outcome, pid=500, readings=1, device=None, **changes):
        self.outcome, self.pid, self.readings, self.changes = outcome, pid, readings, changes
        self.slots = (Placement.of(device or find_device("cuda:0")),)
        self.pids = frozenset()
        self.was_asked = threading.Semaphore(0)
    def submit(self, job):
        self.trial_id = job.trial_id
        return job.trial_id
    def pids_of(self, trial_id):
        # The last that a reading of the GPU asks for.
        self.was_asked.release()
        return self.pids
    def close(self):
        pass
    def wait(self):
        before = dict(os.environ)
        self.pids = frozenset({{self.pid}})
        os.environ.update(self.changes)
        while self.was_asked.acquire(blocking=False):
            pass
        # The first may have begun before the changes.
        for _ in range(self.readings and self.readings + 1):
            self.was_asked.acquire()
        self.pids = frozenset()
        os.environ.clear()
        os.environ.update(before)
        for name in self.changes.get("STAYS", "").split():
            os.environ[name] = self.changes[name]
        return self.trial_id, self.outcome

COMPLETED = Completed(measurement(CANDIDATE, 0.1, GIB, GIB))
OVER = out_of_memory(GIB)

def watched(trials, cap_gib=20):
    executor = WatchedExecutor(trials, 0, notes.append)
    return executor, lambda: run_to_end(executor, job_of(CANDIDATE, cap_gib * GIB))
"""


def ask_watched(machine: Machine, code: str, **settings: str) -> Any:
    """Return what ``answer`` holds after the code ran with a watched executor at hand."""
    return machine.ask(SET_UP.format(tests=str(Path(__file__).parents[1])) + code, **settings)


def why_disturbed(machine: Machine, changes: str, outcome: str = "COMPLETED", **settings: str) -> list[str]:
    """Why a trial is marked during which the stand-in changes so."""
    code = f"_, run = watched(Trials({outcome}, {changes}))\nanswer = run().disturbed"
    return ask_watched(machine, code, **settings)


NEIGHBOUR = "71=python=512"


class TestMeasurements:
    def test_alone_is_not_disturbed(self, machine: Machine) -> None:
        assert why_disturbed(machine, "STAND_IN_PROCESSES='500=python=9000'") == []

    def test_nor_beside_one_that_only_holds_memory(self, machine: Machine) -> None:
        changes = f"STAND_IN_PROCESSES='500=python=9000,{NEIGHBOUR}', STAND_IN_BUSY='500=99,71=2'"
        assert why_disturbed(machine, changes, STAND_IN_PROCESSES=NEIGHBOUR) == []

    def test_a_process_that_came(self, machine: Machine) -> None:
        changes = f"STAND_IN_PROCESSES='500=python=9000,{NEIGHBOUR}'"
        assert why_disturbed(machine, changes) == ["process 71 came to the GPU"]

    def test_one_trial_under_a_number_of_the_hosts(self, machine: Machine) -> None:
        assert why_disturbed(machine, "pid=3, STAND_IN_PROCESSES='90500=python=9000'") == []

    def test_a_process_that_computes(self, machine: Machine) -> None:
        changes = (
            f"STAND_IN_PROCESSES='500=python=9000,{NEIGHBOUR}', STAND_IN_BUSY='500=99,71=40', STAYS='STAND_IN_BUSY'"
        )
        assert why_disturbed(machine, changes, STAND_IN_PROCESSES=NEIGHBOUR) == ["process 71 took 40 % of the GPU"]

    def test_what_slows_it_down(self, machine: Machine) -> None:
        reasons = {
            0x04: [],
            0x01: [],
            0x20: ["thermal slowdown by the driver at 91 °C"],
            0x48: ["hardware slowdown at 91 °C", "thermal slowdown by the hardware at 91 °C"],
            0x84: ["power brake at 91 °C"],
        }
        code = f"""
def during(bits):
    _, run = watched(Trials(COMPLETED, STAND_IN_EVENTS=str(bits), STAND_IN_CELSIUS="91"))
    return run().disturbed
answer = [during(bits) for bits in {[*reasons]}]"""
        assert ask_watched(machine, code) == [*reasons.values()]

    def test_a_slowdown_that_was_there_before_the_trial_does_not_mark_it(self, machine: Machine) -> None:
        code = "_, run = watched(Trials(COMPLETED))\nanswer = [run().disturbed, run().disturbed, notes]"
        said = "thermal slowdown by the driver lasts on cuda:0: trials count as they are, and training will run so too"
        assert ask_watched(machine, code, STAND_IN_EVENTS="32") == [[], [], [said]]

    def test_nor_one_that_comes_with_every_trial(self, machine: Machine) -> None:
        code = """
_, run = watched(Trials(COMPLETED, STAND_IN_EVENTS="32"))
answer = [run().disturbed, run().disturbed, len(notes)]"""
        assert ask_watched(machine, code) == [["thermal slowdown by the driver at 40 °C"], [], 1]

    @pytest.mark.parametrize(("share", "why"), [(12, []), (60, ["process 9 took 60 % of the GPU"])])
    def test_a_compositor_draws_beside_every_trial(self, machine: Machine, share: int, why: list[str]) -> None:
        changes = f"STAND_IN_PROCESSES='500=python=9000,9=Xorg=80', STAND_IN_BUSY='500=99,9={share}'"
        kept = {"STAND_IN_PROCESSES": "9=Xorg=80", "STAND_IN_DRAWING": "9,10"}
        assert why_disturbed(machine, f"{changes}, STAYS='STAND_IN_BUSY'", **kept) == why

    def test_nor_does_a_window_that_opens(self, machine: Machine) -> None:
        changes = "STAND_IN_PROCESSES='500=python=9000,10=editor=80'"
        assert why_disturbed(machine, changes, STAND_IN_DRAWING="9,10") == []

    def test_a_driver_with_the_old_name_of_the_reading(self, machine: Machine) -> None:
        errors = "nvmlDeviceGetCurrentClocksEventReasons=13"
        assert why_disturbed(machine, "STAND_IN_EVENTS='32'", STAND_IN_ERRORS=errors) == [
            "thermal slowdown by the driver at 40 °C"
        ]

    @pytest.mark.parametrize(("events", "why"), [("0", ["clocks of 1200 MHz, not 1980 MHz as before"]), ("4", [])])
    def test_clocks_that_fell(self, machine: Machine, events: str, why: list[str]) -> None:
        code = f"""
few = watch._FEWEST_SAMPLES
executor, run = watched(Trials(COMPLETED, readings=few))
first = run().disturbed
# Before the trial: one reading of the clock as it was would count as its fastest.
os.environ.update(STAND_IN_CLOCK="1200", STAND_IN_EVENTS="{events}")
answer = [first, run().disturbed]"""
        assert ask_watched(machine, code) == [[], why]

    def test_a_driver_that_says_little_disturbs_nothing(self, machine: Machine) -> None:
        names = ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons", "ClockInfo", "Temperature",
                 "TotalEccErrors", "ProcessUtilization", "ComputeRunningProcesses", "ComputeRunningProcesses_v3",
                 "GraphicsRunningProcesses", "GraphicsRunningProcesses_v3")  # fmt: skip
        errors = ",".join(f"nvmlDeviceGet{name}=3" for name in names)
        assert why_disturbed(machine, "STAND_IN_EVENTS='32'", STAND_IN_ERRORS=errors) == []


class TestMemory:
    def test_out_of_memory_alone_is_a_result(self, machine: Machine) -> None:
        assert why_disturbed(machine, "readings=0", "OVER") == []

    def test_while_others_hold_more_it_is_disturbed(self, machine: Machine) -> None:
        changes = "STAND_IN_USED='70', STAYS='STAND_IN_USED'"
        (why,) = why_disturbed(machine, changes, "OVER")
        assert why == "other processes held 12.0 GiB of what a trial may reserve"

    def test_a_trial_waits_until_its_memory_is_back(self, machine: Machine) -> None:
        code = """
def note(text):
    notes.append(text)
    del os.environ["STAND_IN_USED"]

watch._NEIGHBOUR_SECONDS = 60
executor = WatchedExecutor(Trials(OVER), 0, note)
os.environ["STAND_IN_USED"] = "70"
answer = run_to_end(executor, job_of(CANDIDATE, 20 * GIB)).disturbed, notes"""
        why, notes = ask_watched(machine, code)
        assert why == []
        assert notes == ["waiting up to 60 s for 12.0 GiB that other processes hold on cuda:0"]

    def test_but_not_for_ever_and_less_the_second_time(self, machine: Machine) -> None:
        code = """
os.environ["STAND_IN_USED"] = "70"
_, run = watched(Trials(OVER))
answer = [run().disturbed, run().disturbed, len(notes)]"""
        first, second, notes = ask_watched(machine, code)
        assert first == second == ["other processes held 12.0 GiB of what a trial may reserve"]
        assert notes == 1


class TestLost:
    def test_a_gpu_that_is_lost_ends_the_search(self, machine: Machine) -> None:
        code = """
_, run = watched(Trials(COMPLETED))
os.environ["STAND_IN_ERRORS"] = "nvmlDeviceGetMemoryInfo=15,nvmlDeviceGetMemoryInfo_v2=15"
try:
    run()
except DeviceError as error:
    answer = str(error)"""
        assert f"cuda:0 (Stand-in GPU, {uuid_of(0)}) is lost" in ask_watched(machine, code)

    def test_a_second_gpu_that_is_lost_is_told_before_memory_of_the_first_is_waited_for(self, machine: Machine) -> None:
        code = """
trials = Trials(COMPLETED)
trials.slots = (Placement.of(*find_gpus("2")),)
_, run = watched(trials)
os.environ["STAND_IN_USED"] = "70"
os.environ["STAND_IN_ERRORS"] = "nvmlDeviceGetMemoryInfo:1=15,nvmlDeviceGetMemoryInfo_v2:1=15"
try:
    run()
except DeviceError as error:
    answer = [error.message, notes]"""
        assert ask_watched(machine, code, STAND_IN_GPUS="2") == [f"cuda:1 (Stand-in GPU, {uuid_of(1)}) is lost", []]

    def test_a_trial_that_lost_it_says_so(self, machine: Machine) -> None:
        errors = "STAND_IN_ERRORS='nvmlDeviceGetMemoryInfo=15,nvmlDeviceGetMemoryInfo_v2=15', STAYS='STAND_IN_ERRORS'"
        code = f"_, run = watched(Trials(Failed('error', 'RuntimeError: CUDA error'), {errors}))\nfound = run()\n"
        answer = ask_watched(machine, code + "answer = [found.reason, found.message]")
        assert answer == ["device_lost", "NVML says that cuda:0 is lost; RuntimeError: CUDA error"]

    def test_memory_errors_are_the_gpus(self, machine: Machine) -> None:
        changes = "STAND_IN_ECC='2', STAYS='STAND_IN_ECC'"
        code = f"_, run = watched(Trials(Failed('killed', 'killed by SIGABRT'), {changes}))\nfound = run()\n"
        reason, message = ask_watched(machine, code + "answer = [found.reason, found.message]")
        assert reason == "device_lost"
        assert "2 uncorrectable memory errors" in message


def test_without_nvml_nothing_is_watched(machine: Machine) -> None:
    code = f"""
device = dataclasses.replace(find_device("cuda:0"), uuid="GPU-no-such")
executor = WatchedExecutor(Trials(COMPLETED, readings=0, device=device), 0, notes.append)
disturbed = run_to_end(executor, job_of(CANDIDATE, GIB)).disturbed
answer = [disturbed, current_session().condition({uuid_of(0)!r}).free_bytes]"""
    assert ask_watched(machine, code) == [[], 76 * GIB]
