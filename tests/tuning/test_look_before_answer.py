"""Test that a winner which trains something else is no answer, and what it shows beyond its first steps, on computed
trials."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from messages import check_messages
from recorded import job_of
from searching import H200, RecordingObserver, Run, new_store, prepared
from test_anytime import Gpu, prepared_with_levers

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface
from autotune.core.look import FirstStep, Gradient, LookAnswer, LookWork
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.placement import Placement
from autotune.core.rehearsal import Evaluation, LongestBatch, Rehearsal, Saving, Whole
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB
from autotune.estimate.history import History
from autotune.results.export import beside_lines, make_export, render
from autotune.results.report import load_report
from autotune.results.warnings import notes
from autotune.store.records import TrialRecord
from autotune.tuning.look import Looker, with_smaller_evaluation
from autotune.tuning.loop import Search
from autotune.tuning.plan import Plan, Step
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import Prepared

AS_ASKED = FirstStep(loss=2.0, gradients={"weight": Gradient(1.0, (1.0,) * 8)}, samples=4, micro_steps=1, weights=5.0)


def searched(
    given: Prepared, step: Callable[[Candidate], FirstStep], folder: Path
) -> tuple[Run, list[LookWork], list[str]]:
    """Search with the first steps of a training; return also what was asked of it, and the notes on the study."""
    runner, observer, asked = Gpu().runner(), RecordingObserver(), list[LookWork]()

    def ask(work: LookWork) -> LookAnswer:
        asked.append(work)
        return LookAnswer(tuple(map(step, work.candidates)))

    devices = Placement.of(H200).rank_devices
    looker = Looker(ask, given.baseline, devices, cap_bytes=1, seed=0, is_unmodified=False, is_own=False)
    with new_store(folder) as store:
        study = Search(given, runner, store, observer, Path("logs"), clock=runner.clock, looker=looker).run()
        report = load_report(store, study.name)
        return Run(study, observer, store.trials(study.id)), asked, list(notes(report))


def changed() -> FirstStep:
    """A step whose gradients have another direction."""
    return replace(AS_ASKED, gradients={"weight": Gradient(1.0, (1.0, -1.0) * 4)})


def test_a_lever_that_changes_the_training_is_left_out_and_the_search_goes_on(tmp_path: Path) -> None:
    def step(candidate: Candidate) -> FirstStep:
        return changed() if candidate.arm.cuda_graphs else AS_ASKED

    run, _, lines = searched(prepared_with_levers(), step, tmp_path)
    assert not run.best.candidate.arm.cuda_graphs
    graphed = [trial.outcome for trial in run.trials if trial.candidate.arm.cuda_graphs]
    assert graphed
    assert all(isinstance(outcome, Failed) and outcome.reason == "other_training" for outcome in graphed)
    assert "cuda graphs has other gradients" in run.study.look.ruled_out[0]
    assert any(line.startswith("left out, since it is another training: cuda graphs") for line in lines)
    assert run.study.state == "finished"


def test_levers_that_change_the_training_only_together_are_not_both_in_the_answer(tmp_path: Path) -> None:
    def step(candidate: Candidate) -> FirstStep:
        return changed() if candidate.arm.cuda_graphs and candidate.arm.unpadded else AS_ASKED

    run, _, lines = searched(prepared_with_levers(), step, tmp_path)
    arm = run.best.candidate.arm
    assert arm.cuda_graphs != arm.unpadded
    assert run.study.look.differs == ()
    assert any("beside the other settings has other gradients" in line for line in lines)


def test_a_split_that_changes_the_training_is_told_with_what_keeps_it(tmp_path: Path) -> None:
    given = prepared()

    def step(candidate: Candidate) -> FirstStep:
        same = candidate.per_device_train_batch_size <= 2
        return AS_ASKED if same else changed()

    run, asked, lines = searched(given, step, tmp_path)
    assert run.best.candidate.per_device_train_batch_size > given.baseline.per_device_train_batch_size
    assert "is another training than 8 × 8: cut down to" in lines[0]
    assert lines[0].endswith("--batch-multiple 8 searches batches of 8 and its multiples")
    # The two settings; those of the baseline with other random numbers; the split alone.
    assert [len(work.candidates) for work in asked] == [2, 1, 1]
    assert all(candidate.arm.precision == "fp32" for work in asked for candidate in work.candidates)


def test_what_cannot_be_compared_is_told(tmp_path: Path) -> None:
    def step(candidate: Candidate) -> FirstStep:
        return replace(AS_ASKED, weights=5.0 + candidate.per_device_train_batch_size)

    run, _, lines = searched(prepared(), step, tmp_path)
    assert run.study.look.differs == ()
    assert any("was not looked at: its weights are other ones each time" in line for line in lines)


def test_a_batch_that_may_be_any_is_not_compared() -> None:
    asked: list[LookWork] = []

    def ask(work: LookWork) -> LookAnswer:
        asked.append(work)
        return LookAnswer((AS_ASKED,) * len(work.candidates))

    devices = Placement.of(H200).rank_devices
    options: Any = {"cap_bytes": 1, "seed": 0, "is_unmodified": False, "is_own": False, "is_batch_free": True}
    looker = Looker(ask, Candidate(Arm(), 8, 1), devices, **options)
    assert looker.differences(Candidate(Arm("bf16"), 64, 1)).look.differs == ()
    assert asked == []


def test_the_baselines_own_settings_are_not_looked_at(tmp_path: Path) -> None:
    given = prepared(precisions=("fp32",), effective_batch=8)
    run, asked, _ = searched(given, lambda _: AS_ASKED, tmp_path)
    assert run.best.candidate == given.baseline
    assert asked == []


def test_a_trial_that_trains_less_than_half_of_the_baselines_tensors_has_failed() -> None:
    given = prepared()
    history = History(given.ceiling)
    plan = Plan(given, history, make_policy("autotune", "throughput", given.space), lambda: 0.0)
    runner = Gpu().runner()

    def outcome(trained: int) -> Completed:
        measured, _ = runner.answer(job_of(given.baseline, given.ceiling.cap_bytes))
        assert isinstance(measured, Completed)
        with_trained = replace(measured.measurement, trained_tensors=trained, untrained_tensors=14 - trained)
        return replace(measured, measurement=with_trained)

    assert plan.judged(outcome(2)) == outcome(2)
    plan.take(TrialRecord("study", 0, given.baseline, "w", "e", stage="baseline", outcome=outcome(14)))
    judged = plan.judged(outcome(2))
    assert isinstance(judged, Failed)
    assert judged.message == "trains 2 of 14 tensors, the baseline 14"
    assert plan.judged(outcome(13)) == outcome(13)


def test_what_is_left_is_weighed_again_once_the_winner_is_ruled_out() -> None:
    given = prepared(precisions=("bf16",))
    history = History(given.ceiling)
    plan = Plan(given, history, make_policy("autotune", "throughput", given.space), lambda: 0.0)
    runner = Gpu().runner()

    tried = []
    while isinstance(step := plan.next(), Step):
        record = TrialRecord("study", len(tried), step.candidate, "w", "e", stage=step.stage)
        outcome, seconds = runner.answer(job_of(step.candidate, given.ceiling.cap_bytes))
        plan.begin(record)
        plan.take(replace(record, outcome=outcome, seconds=seconds))
        tried.append(step.candidate)

    best = plan.best()
    for each in history.outcomes_of(best.candidate):
        plan.change_outcome(each.trial_id, OutOfMemory("the longest batch"))
    step = plan.next()
    assert isinstance(step, Step)
    assert step.stage == "search"
    assert step.candidate not in tried


TOO_LARGE = Whole(90 * GIB, 4 * GIB, 60.0, 80 * GIB)
FITTING = Whole(20 * GIB, 4 * GIB, 70.0, 10 * GIB)
SETTINGS = {"per_device_eval_batch_size": 4, "eval_accumulation_steps": 16}
LOST = Rehearsal(Evaluation(512, 4096, 0, None, False), line_bytes=GIB, failed_rank=1)
FOUND = Rehearsal(Evaluation(8, 5000, 64, TOO_LARGE, False, SETTINGS, FITTING), line_bytes=24 * GIB)


def test_settings_of_an_evaluation_that_fits_are_told_and_exported(tmp_path: Path) -> None:
    runner, asked = Gpu().runner(), list[Candidate]()

    def rehearse(candidate: Candidate, searched_seconds: float) -> Rehearsal:
        asked.append(candidate)
        return FOUND

    with new_store(tmp_path) as store:
        arguments = (prepared(), runner, store, RecordingObserver(), Path("logs"))
        study = Search(*arguments, clock=runner.clock, rehearse=rehearse).run()
        report = load_report(store, study.name)
    assert asked == [report.best.candidate]
    assert report.study.look.rehearsal == FOUND
    assert any(line.startswith("the evaluation does not fit") for line in notes(report))
    exported = json.loads(render(make_export(report), "json"))
    assert exported.items() >= SETTINGS.items()
    # A loop's is an argument of its DataLoader.
    of_loop = Evaluation(512, 512, 1, None, False, {"batch_size": 64}, of_loop=True, loader_key="/a/train.py:30#0")
    source = TrainingSource("script", "/a/train.py", "0", "/a", interface=CodeInterface("accelerate"))
    found = replace(FOUND, evaluation=of_loop)
    export = replace(make_export(report), task="own", source=source, arguments={}, rehearsal=found)
    assert "set by hand: batch_size of the validation DataLoader at train.py:30 = 64" in beside_lines(export)


def searched_with_longest(most: int, folder: Path) -> tuple[Run, list[Candidate], list[str]]:
    """Search where the batch of the longest samples fits up to some batch; return what was rehearsed, and the notes."""
    runner, asked = Gpu().runner(), list[Candidate]()

    def rehearse(candidate: Candidate, searched_seconds: float) -> Rehearsal:
        asked.append(candidate)
        batch = candidate.per_device_train_batch_size
        return Rehearsal(longest=LongestBatch(batch, 3000, None, fits=batch <= most, read=9, of=9), line_bytes=24 * GIB)

    with new_store(folder) as store:
        arguments = (prepared(), runner, store, RecordingObserver(), Path("logs"))
        study = Search(*arguments, clock=runner.clock, rehearse=rehearse).run()
        return Run(study, RecordingObserver(), store.trials(study.id)), asked, [*notes(load_report(store, study.name))]


def test_a_search_goes_on_to_what_survives_the_longest_batch(tmp_path: Path) -> None:
    first = searched_with_longest(10_000, tmp_path / "all")[0].best.candidate
    most = first.per_device_train_batch_size // 2
    run, asked, lines = searched_with_longest(most, tmp_path / "half")
    survivor = run.best.candidate
    assert survivor.arm.gradient_checkpointing or survivor.per_device_train_batch_size == most
    assert asked[0] == first
    assert asked[-1] == survivor
    for died in [trial.outcome for trial in run.trials if trial.candidate == first]:
        assert isinstance(died, OutOfMemory)
        assert died.message.startswith("a batch of the longest samples (")
    assert not any("nothing smaller was found" in line for line in lines)


def test_where_nothing_survives_the_longest_batch_the_first_winner_is_told_with_it(tmp_path: Path) -> None:
    first = searched_with_longest(10_000, tmp_path / "all")[0].best.candidate
    run, asked, lines = searched_with_longest(0, tmp_path / "none")
    assert len(set(asked)) == len(asked)
    assert any(
        "of up to 3,000 tokens) is out of memory" in line and "nothing smaller was found" in line for line in lines
    )
    assert run.study.state == "finished"
    assert run.best.candidate == first or len(asked) == 9


def test_ranks_that_ran_out_of_memory_are_started_again_with_a_smaller_evaluation() -> None:
    asked: list[int] = []

    def again(batch: int, most: int) -> Rehearsal:
        asked.append(batch)
        fits = Evaluation(batch, 4096, 64, FITTING, True)
        return replace(LOST, evaluation=fits, failed_rank=None) if batch <= most else LOST

    found = with_smaller_evaluation(LOST, lambda batch: again(batch, 40))
    assert asked == [128, 32]
    assert found.evaluation.settings == {"per_device_eval_batch_size": 32}
    assert with_smaller_evaluation(LOST, lambda batch: again(batch, 0)) is LOST


def test_messages_of_what_comes_after_the_first_steps() -> None:
    smaller = Evaluation(32, 4096, 64, FITTING, True)
    saving = Saving(10 * GIB, 90 * GIB, 0.0, fits=False, ranks=4, host_limit_bytes=64 * GIB, is_computed=True)
    found = {
        "an evaluation that does not fit": FOUND,
        "a smaller evaluation of ranks": with_smaller_evaluation(
            LOST, lambda batch: replace(LOST, evaluation=smaller, failed_rank=None)
        ),
        "a checkpoint that does not fit": Rehearsal(saving=saving, line_bytes=70 * GIB),
        "nothing was seen": Rehearsal(growth_bytes=GIB, line_bytes=GIB, problem="its process was killed"),
    }
    check_messages(
        "rehearsals", {name: [*each.sentences, *(f"! {line}" for line in each.alarms)] for name, each in found.items()}
    )
