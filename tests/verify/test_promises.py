"""The study of kept promises, as far as that goes without a GPU: its order, its processes, what it reads and prints."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from promise_tables import gains_table, read_records, read_search, read_verification, table
from promises import PROMISES, RECORDED, environment_of, run, schedule

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.workload import TASKS
from autotune.models import catalog

WINNER = Candidate(Arm("bf16", cpu_affinity=True), 32)
MISSED = {
    "verdict": "missed",
    "misses": ["77.8 samples/s are 12.3% below the promised 88.7"],
    "promised": {"samples_per_second": 88.0, "samples_per_second_low": 66.0, "samples_per_second_high": 110.0},
    "obtained": {"samples_per_second": 77.0, "samples_per_second_low": 70.0, "samples_per_second_high": 84.0},
}


def promise(workload: str, machine: str, **changes: Any) -> dict[str, Any]:
    facts = {"device": "NVIDIA H200", "device_uuid": machine, "cpu": "Xeon", "cores": 16, "commit": "abc"}
    record = {"kind": "promise", "workload": workload, "round": 0, "date": "2026-11-22T10:00:00", "facts": facts}
    record |= {"python_loop_seconds": 1.3, "winner": "32 × 1  bf16", "trials": 4, "gpu_busy_share": 0.46}
    record |= {"search_wall_seconds": 14.0, "verify_wall_seconds": 11.0, "verify_exit_code": 0}
    return {**record, "verification": {**MISSED, "verdict": "kept", "misses": []}, **changes}


@pytest.mark.parametrize("case", [*PROMISES, *RECORDED], ids=lambda case: case.name)
def test_every_workload_is_one_of_the_catalog(case: Any) -> None:
    assert catalog.find(case.model) is not None
    assert case.task is None or case.task in TASKS


def test_a_second_machine_continues_where_the_first_one_ended() -> None:
    jobs = schedule(PROMISES, 3)
    assert [case for index, case in jobs if index == 0] == list(PROMISES)
    assert schedule(PROMISES, 3, skip_first=11) == jobs[11:]


class TestEnvironment:
    def test_another_checkout_takes_the_place_of_this_one(self, tmp_path: Path) -> None:
        here, old, site = (tmp_path / name for name in ("here", "old", "site"))
        variables = {"PYTHONPATH": os.pathsep.join([str(site), str(here)]), "HOME": "/root"}
        found = environment_of(old, variables, here)
        assert found["PYTHONPATH"] == os.pathsep.join([str(old), str(site)])
        assert found["HOME"] == "/root"
        assert environment_of(here, variables, here)["PYTHONPATH"] == os.pathsep.join([str(here), str(site)])


class TestRun:
    def test_an_answer(self, tmp_path: Path) -> None:
        ended = run([sys.executable, "-c", "print('{\"a\": 1}')"], tmp_path, dict(os.environ), 60)
        assert (ended.exit_code, ended.document, ended.error) == (0, {"a": 1}, None)

    def test_a_failure_is_told_by_the_end_of_stderr(self, tmp_path: Path) -> None:
        ended = run([sys.executable, "-c", "raise SystemExit('no such device')"], tmp_path, dict(os.environ), 60)
        assert ended.error.startswith("exit code 1")
        assert ended.error.endswith("no such device")

    def test_a_process_that_takes_too_long_is_ended(self, tmp_path: Path) -> None:
        ended = run([sys.executable, "-c", "import time; time.sleep(300)"], tmp_path, dict(os.environ), 1)
        assert ended.exit_code is None
        assert str(ended.error).startswith("its time was over")


class TestReading:
    def test_an_interval_and_a_verdict(self) -> None:
        told = read_verification({**MISSED, "verdict": "cannot_tell", "obtained": {"samples_per_second_low": None}})
        assert told["promised_interval"] == (66.0, 110.0)
        assert told["obtained_interval"] is None
        assert told["verdict"] == "cannot tell"

    def test_the_winners_busy_share_may_be_that_of_another_trial_of_it(self) -> None:
        best = {**WINNER.parameters(), "samples_per_second": 1200.0, "gpu_busy_share": None, "cpu_core": 3}
        others = [{**Candidate(Arm("tf32"), 32).parameters(), "gpu_busy_share": 0.9}, {**best, "gpu_busy_share": 0.4}]
        found = read_search({"trials": others, "best": best, "seconds": 9.0})
        assert (found["trials"], found["pinned"], found["cpu_core"], found["gpu_busy_share"]) == (2, True, 3, 0.4)
        assert "winner" not in read_search({"trials": others, "best": None})


class TestTable:
    def test_refuted_promises_and_machines_are_counted(self) -> None:
        missed = promise(
            "qwen", "GPU-b", verify_exit_code=11, verification={**MISSED, "obtained": {"samples_per_second": 65.0}}
        )
        broken = {**promise("vit-large", "GPU-b"), "verification": None, "error": "search: exit code 6\nnothing fits"}
        text = table([promise("bert-base", "GPU-a"), promise("bert-base", "GPU-b"), missed, broken])
        assert "1 of 3 promises refuted on 2 machines (2 kept, 1 missed); " in text
        assert "; 1 obtained below the promised interval, 0 above; 1 without a verdict" in text
        assert "qwen, machine 2: 77.8 samples/s are 12.3% below the promised 88.7" in text
        assert "no verdict: nothing fits" in text
        assert "66.0–110.0" in text

    def test_checkouts_are_compared_by_the_median_of_the_workloads_medians(self) -> None:
        def pair(workload: str, ratio: float) -> dict[str, Any]:
            one = {"search_wall_seconds": 10.0, "trials": 4}
            return promise(workload, "GPU-a", kind="comparison", old=one, new=one, ratio=ratio)

        records = [pair("a", 0.8), pair("a", 0.9), pair("a", 2.0), pair("b", 1.0), pair("c", 1.1)]
        assert "median of 3 workloads: 1.000" in table(records)

    def test_a_line_that_was_cut_off_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "records.jsonl"
        path.write_text('{"kind": "promise"}\n{"kind": "pro')
        assert read_records([path]) == [{"kind": "promise"}]


def test_gains_are_the_median_of_each_workload() -> None:
    def record(name: str, speedup: float, measured: bool = True) -> Document:
        return {"workload": name, "expert": {"speedup": speedup, "measured": measured}}

    shown = gains_table([record("a", 1.0), record("a", 4.0), record("a", 2.0), record("b", 8.0, measured=False)])
    assert shown.splitlines()[1:] == [
        "a                 2.00  measured",
        "b                 8.00  predicted in part",
        "geometric mean 4.00, least 2.00",
    ]
    assert gains_table([{"workload": "a", "expert": None}]) == ""
