"""Test pinning to one core as an option that memory does not depend on."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reported import OLD_FIELDS, report_of
from searching import prepared, request

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import DeviceError
from autotune.core.outcome import Completed
from autotune.devices.cores import can_pin
from autotune.devices.listing import find_device
from autotune.results.export import Export, beside_lines, make_export, render
from autotune.tuning.allowed import check_request
from autotune.tuning.optuna_study import candidate_of, distributions, params_of

PLAIN = Arm("bf16")
PINNED = Arm("bf16", cpu_affinity=True)
LOADING = Arm("bf16", dataloader_num_workers=2, cpu_affinity=True)


class TestRequest:
    def test_auto_is_the_default_and_not_recorded(self) -> None:
        assert request().cpu_affinity == "auto"
        assert "cpu_affinity" not in request().document()
        assert request(cpu_affinity="off").document()["cpu_affinity"] == "off"
        assert request(cpu_affinity="on").document()["cpu_affinity"] == "on"

    @pytest.mark.parametrize(
        ("options", "pins"),
        [
            ({}, "auto"),
            ({"cpu_affinity": "on"}, "on"),
            ({"cpu_affinity": "off"}, "off"),
            ({"world_size": 2}, "off"),
            ({"objective": "max-batch"}, "off"),
        ],
    )
    def test_what_is_really_tried(self, options: dict[str, object], pins: str) -> None:
        assert request(**options).pins == pins

    def test_a_cpu_needs_all_its_cores(self) -> None:
        on_cpu = dataclasses.replace(request(), device=find_device("cpu"), memory_limit_bytes=None)
        assert on_cpu.pins == "off"
        with pytest.raises(DeviceError, match="--lever cpu_affinity=on: a training on the CPU needs all its cores"):
            check_request(dataclasses.replace(on_cpu, cpu_affinity="on"))

    def test_several_processes_need_a_core_each(self) -> None:
        with pytest.raises(DeviceError, match="each of the 2 processes"):
            check_request(request(cpu_affinity="on", world_size=2))


class TestSpace:
    def test_auto_leaves_the_arms_as_they_are_and_lets_the_winner_be_pinned(self) -> None:
        space = prepared().space
        assert not any(arm.cpu_affinity for arm in space.arms)
        assert space.contains(space.candidate(PINNED, 32))
        assert space.contains(space.candidate(dataclasses.replace(PINNED, dataloader_num_workers=2), 32))

    def test_on_pins_every_arm(self) -> None:
        space = prepared(cpu_affinity="on").space
        assert all(arm.cpu_affinity for arm in space.arms)
        assert not space.contains(space.candidate(PLAIN, 32))

    def test_off_never_does(self) -> None:
        space = prepared(cpu_affinity="off").space
        assert not space.contains(space.candidate(PINNED, 32))

    def test_it_is_optunas_parameter_where_arms_differ_in_it(self) -> None:
        for choice, is_parameter in (("auto", False), ("off", False), ("on", True)):
            given = prepared(cpu_affinity=choice)
            assert ("cpu_affinity" in distributions(given.space, given.baseline, "tpe")) is is_parameter
        candidate = given.space.candidate(PINNED, 32)
        names = distributions(given.space, given.baseline, "tpe")
        assert candidate_of(params_of(candidate, names), given.space) == candidate


def export_of(arm: Arm, core: int | None = 3) -> Export:
    report = report_of(Candidate(arm, 8), "cuda", OLD_FIELDS)
    trial = report.trials[0]
    measured = dataclasses.replace(trial.outcome.measurement, cpu_core=core)
    trial = dataclasses.replace(trial, outcome=Completed(measured))
    return make_export(dataclasses.replace(report, trials=(trial,)))


class TestExport:
    def test_the_arguments_say_nothing_of_it(self) -> None:
        assert export_of(PINNED).arguments == export_of(PLAIN, None).arguments
        assert not [name for name in export_of(PINNED).arguments if "affinity" in name or "core" in name]

    def test_the_command_is_started_on_that_core(self) -> None:
        assert any("taskset -c 3 " in line for line in beside_lines(export_of(PINNED)))
        assert "# put taskset -c 3 before" in render(export_of(PINNED), "yaml")
        assert not any("taskset" in line for line in beside_lines(export_of(PLAIN, None)))

    def test_loading_processes_are_not_pinned(self) -> None:
        (line,) = (line for line in beside_lines(export_of(LOADING)) if "taskset" in line)
        assert "--format python" in line
        assert "taskset -c" not in line

    def test_the_python_form_pins_itself_before_torch_is_imported(self) -> None:
        text = render(export_of(PINNED), "python")
        assert text.index("os.sched_setaffinity(0, {3})") < text.index("import torch")
        assert "os.sched" not in render(export_of(PLAIN, None), "python")

    @pytest.mark.skipif(not can_pin(), reason="this system cannot pin")
    def test_its_lines_pin_the_process_and_free_what_is_forked(self, tmp_path: Path) -> None:
        core = max(os.sched_getaffinity(0))
        lines = render(export_of(LOADING, core), "python").partition("import torch")[0]
        script = tmp_path / "train.py"
        script.write_text(
            lines
            + "import json, multiprocessing\n"
            + "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
            + "    child = pool.apply(os.sched_getaffinity, (0,))\n"
            + "print(json.dumps([sorted(os.sched_getaffinity(0)), sorted(child)]))\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout) == [[core], sorted(os.sched_getaffinity(0))]
