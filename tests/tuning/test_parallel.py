"""Test searches whose trials run on several devices at the same time, each on one."""

import dataclasses
from pathlib import Path

import pytest
from recorded import EFFECTIVE_64, RecordedRunner
from searching import BERT_LARGE, FACTS, H200, RecordingObserver, new_store, search
from tiny import tiny_workload

from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.outcome import Completed
from autotune.core.units import GIB
from autotune.tuning import options as tuning_options
from autotune.tuning.options import build_request
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search
from autotune.tuning.studies import Budget, recorded_request

SECOND = dataclasses.replace(H200, uuid="GPU-1", index=1, memory_free_bytes=90 * GIB)


class _Company(RecordingObserver):
    """Notes which trials are under way when one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[set[int]] = []

    def trial_begins(self, number: int, candidate: object, stage: object) -> None:
        super().trial_begins(number, candidate, stage)  # type: ignore[arg-type]
        self.together.append({n for n, _, _ in self.started} - {trial.number for trial in self.ended})


def test_a_grid_on_two_devices(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setenv("WARM_REPORT", str(started))
    request = SearchRequest(
        tiny_workload("bert-tiny"), cpu, beside=(cpu,), effective_batch=16, sampler="grid", study="two",
        precisions=("fp32",), gradient_checkpointing="off",
    )  # fmt: skip
    observer = _Company()
    study, report = run_search(request, str(tmp_path / "studies.db"), observer)
    assert study.state == "finished"
    assert report.best is not None
    # A trial is of one rank, with the whole effective batch.
    assert {(trial.candidate.samples_per_step, trial.candidate.arm.ranks) for trial in report.trials} == {(16, 1)}
    assert all(isinstance(trial.outcome, Completed) for trial in report.trials)
    assert max(map(len, observer.together)) == 2
    assert (tmp_path / "logs" / "two" / "server-1" / "server.log").exists()
    assert not any("cannot" in note for note in observer.notes)
    # Forked, both of them: a variable that searches set and tests/warm.py does not know costs each of them its imports.
    assert [line.partition("\t")[0] for line in started.read_text().splitlines()] == ["warm", "warm"]


def test_the_ceiling_and_the_devices_are_those_of_all() -> None:
    request = SearchRequest(BERT_LARGE, H200, beside=(SECOND,), effective_batch=64)
    assert request.least_free_bytes == 90 * GIB
    assert [slot.uuids for slot in request.slots] == [(H200.uuid,), ("GPU-1",)]
    assert (request.ranks, request.world_size, request.pins) == (1, 1, "off")
    assert request.document() == SearchRequest(BERT_LARGE, H200, effective_batch=64).document()


def test_the_option_makes_slots_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.core.options import BY_NAME

    monkeypatch.setattr(tuning_options, "find_gpus", lambda text: (H200, SECOND))
    options = {name: option.default for name, option in BY_NAME.items()}
    options |= {"model": "bert-tiny", "effective_batch": 64, "parallel": True}
    request = build_request({**options, "gpus": "2"})
    assert (request.others, request.beside, request.world_size) == ((), (SECOND,), 1)
    with pytest.raises(InvalidRequestError, match="--parallel runs trials on several GPUs, and none are named"):
        build_request(options)


def test_a_study_goes_on_with_trials_on_more_devices(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        begun = search(store, RecordedRunner(EFFECTIVE_64), trials=4, sampler="grid")
        assert len(begun.trials) == 4
        request = recorded_request(store, "bert", budget=Budget(trials=9), devices=(H200, SECOND), parallel=True)
        assert (request.device, request.others, request.beside) == (H200, (), (SECOND,))
        runner = RecordedRunner(EFFECTIVE_64, slots=2)
        resumed = search(store, runner, given=prepare(request, FACTS))
    assert runner.most_under_way == 2
    assert [trial.id for trial in resumed.trials[:4]] == [trial.id for trial in begun.trials]
    assert len({trial.candidate for trial in resumed.trials if trial.stage == "search"}) == len(
        [trial for trial in resumed.trials if trial.stage == "search"]
    )
    assert len(resumed.trials) == 9


def test_devices_that_a_study_cannot_go_on_with_are_one_clear_line(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        search(store, RecordedRunner(EFFECTIVE_64), trials=1)
        with pytest.raises(DeviceError, match="has trials of one device, and --gpus names 2") as caught:
            recorded_request(store, "bert", devices=(H200, SECOND))
        assert "--parallel" in caught.value.hint
        assert recorded_request(store, "bert", devices=(SECOND,)).device == SECOND
        other = dataclasses.replace(SECOND, name="NVIDIA L4")
        with pytest.raises(DeviceError, match="NVIDIA H200 and NVIDIA L4 are not equal"):
            recorded_request(store, "bert", devices=(H200, other), parallel=True)
