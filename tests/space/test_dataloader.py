"""Test which data loader settings are tried where a candidate waits for data."""

import dataclasses
from pathlib import Path
from typing import Any

from recorded import ComputedRunner
from searching import BERT_LARGE, Run, facts, new_store, request, search, with_environment

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataSpec
from autotune.core.inspection import OwnSettings
from autotune.core.options import Objective
from autotune.core.outcome import Effort, Measurement, Outcome
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.execution.executor import TrialJob
from autotune.results.report import load_report
from autotune.results.warnings import notes
from autotune.space.arms import memory_class
from autotune.space.space import batches_ahead, next_loader, patience, plain_loader, waits_for_data
from autotune.tuning.prepare import prepare

BEST = Candidate(Arm("bf16"), 8, 2)


def measured(data_seconds: float) -> Measurement:
    return Measurement(1.0, (1.0,), 0.0, 16.0, 1, 1, data_seconds=data_seconds)


def loaders(count: int, prefetch: int | None = None) -> Candidate:
    arm = dataclasses.replace(BEST.arm, dataloader_num_workers=count, dataloader_prefetch_factor=prefetch)
    return dataclasses.replace(BEST, arm=arm)


def test_one_that_hardly_waits_is_left_alone() -> None:
    assert waits_for_data(measured(0.25)) == 0.25
    assert next_loader(BEST, measured(0.1), {BEST}, 16) is None
    assert next_loader(BEST, None, {BEST}, 16) is None


def test_loading_processes_are_doubled_for_as_long_as_that_wins() -> None:
    waiting = measured(0.5)
    tried = {BEST}
    for best, expected in ((BEST, loaders(2)), (loaders(2), loaders(4)), (loaders(4), loaders(8))):
        assert next_loader(best, waiting, tried, 8) == expected
        tried.add(expected)
    # No more cores: then more is prefetched, once.
    assert next_loader(loaders(8), waiting, tried, 8) == loaders(8, 4)
    tried.add(loaders(8, 4))
    assert next_loader(loaders(8), waiting, tried, 8) is None
    assert next_loader(loaders(8, 4), waiting, tried, 8) is None


def test_what_the_user_s_own_code_loads_with_is_where_doubling_begins() -> None:
    """An arm that says nothing of loading processes leaves them to that code."""
    assert next_loader(BEST, measured(0.5), {BEST}, 8, 4) == loaders(8)
    assert next_loader(BEST, measured(0.5), {BEST}, 8, 8) is None


def test_no_more_processes_than_cores() -> None:
    assert next_loader(BEST, measured(0.9), {BEST}, 1) is None
    assert next_loader(loaders(2), measured(0.9), {BEST, loaders(2)}, 3) == loaders(2, 4)


def test_after_one_that_did_not_win_nothing_is_left() -> None:
    assert next_loader(BEST, measured(0.5), {BEST, loaders(2)}, 8) is None


def test_a_search_tunes_the_loader_of_its_winner(tmp_path: Path) -> None:
    """Where the winner waits: half as long with each doubling, until what is left is less than a tenth of a step."""

    def loading_seconds(candidate: Candidate) -> float:
        return 4.0 / max(1, candidate.arm.dataloader_num_workers)

    class Waiting(ComputedRunner):
        def answer(self, job: TrialJob) -> tuple[Outcome, float]:
            outcome, seconds = super().answer(job)
            waited = dataclasses.replace(outcome.measurement, data_seconds=loading_seconds(job.candidate))
            return dataclasses.replace(outcome, measurement=waited), seconds

    def run(name: str, workload: Workload, objective: Objective = "throughput", **model: Any) -> Run:
        fixed: dict[str, Any] = {"precisions": ("bf16",), "gradient_checkpointing": "off", "objective": objective}
        options = request(effective_batch=8, study=name, **fixed)
        given = prepare(dataclasses.replace(options, workload=workload), facts(**model))
        given = with_environment(given, host={"usable_cores": 20})
        runner = Waiting(lambda _: GIB, lambda candidate: 4.0 + loading_seconds(candidate))
        with new_store(tmp_path, f"{name}.db") as store:
            found = search(store, runner, given=given)
            told[name] = list(notes(load_report(store, name)))
        return found

    told: dict[str, list[str]] = {}
    found = run("own", dataclasses.replace(BERT_LARGE, data=DataSpec("/x.jsonl", "json", "")))
    counts = [trial.candidate.arm.dataloader_num_workers for trial in found.trials]
    assert list(dict.fromkeys(counts)) == [0, 2, 4, 8, 16]
    assert found.best.candidate.arm.dataloader_num_workers == 16
    script = Workload.of_source(TrainingSource("script", "/run.py", "0", "/"))
    own = OwnSettings(Arm(optim="adamw_torch_fused"), 8)
    of_script = run("script", script, samples=64, own=own)
    assert of_script.best.candidate.arm.dataloader_num_workers == 16
    made_up = run("made-up", BERT_LARGE)
    assert made_up.best.candidate.arm.dataloader_num_workers == 16
    assert [any("made-up samples" in note for note in told[name]) for name in ("own", "made-up")] == [False, True]
    largest = run("largest", BERT_LARGE, "max-batch")
    assert {t.candidate.arm.dataloader_num_workers for t in largest.trials} == {0}, "no batch gets larger"
    streamed = run("streamed", script, samples=None, own=own)
    assert {t.candidate.arm.dataloader_num_workers for t in streamed.trials} == {0}, "each process loads all of it"


def test_memory_is_that_of_the_plain_loader() -> None:
    assert plain_loader(loaders(4, 4).arm) == BEST.arm
    assert memory_class(loaders(4).arm) == memory_class(BEST.arm)


def test_bursts_are_waited_for() -> None:
    effort = Effort(min_steps=5, max_steps=24, max_seconds=4.0)
    assert patience(effort, BEST.arm) == effort
    patient = patience(effort, loaders(8).arm)
    assert (patient.min_steps, patient.max_steps, patient.max_seconds) == (16, 32, 8.0)


def test_loaders_are_said_and_recorded() -> None:
    assert loaders(4, 4).arm.describe() == "bf16, 4 loaders, prefetch 4"
    assert Candidate.from_parameters(loaders(4, 4).parameters()) == loaders(4, 4)
    before = {key: value for key, value in BEST.parameters().items() if not key.startswith("dataloader")}
    assert Candidate.from_parameters(before) == BEST, "as trials were recorded before there were loaders"
    assert (batches_ahead(loaders(4).arm), batches_ahead(loaders(4, 4).arm), batches_ahead(BEST.arm)) == (8, 16, 0)
