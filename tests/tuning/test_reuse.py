"""Test what a search reuses from earlier studies, and what it must not."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import BATCHES, EFFECTIVE_64, ComputedRunner, RecordedRunner, measurement, out_of_memory, with_measured
from searching import FACTS, H200, ceiling_of, new_store, prepared, request, search, with_environment

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.device import Device
from autotune.core.outcome import (
    Completed,
    Effort,
    Failed,
    Measurement,
    Outcome,
    OutOfMemory,
    outcome_document,
    outcome_from_document,
    source_of,
)
from autotune.core.prediction import MemoryPrediction, PredictionAnswer
from autotune.core.schema import encode
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB, MIB
from autotune.core.workload import Workload
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.pooling import Pool, Tried
from autotune.results.json_document import report_document
from autotune.results.optuna_trials import frozen_trials
from autotune.results.report import load_report
from autotune.results.text import summary_lines
from autotune.results.warnings import notes
from autotune.store.records import PastTrial, TrialRecord
from autotune.store.repository import Store
from autotune.tuning import studies
from autotune.tuning.request import MAX_BATCH_EFFORT
from autotune.tuning.reuse import Library, derive, holds_under

BF16 = Arm("bf16")
CAP_BYTES = 20 * GIB


def completed(candidate: Candidate, gib: float = 10.0, allocated_gib: float | None = None, **changes: Any) -> Completed:
    """A measurement of a second a step, a tenth of it the optimizer's, with these peaks."""
    allocated = gib if allocated_gib is None else allocated_gib
    found = measurement(candidate, 1.0, int(allocated * GIB), int(gib * GIB))
    return Completed(dataclasses.replace(found, **{"optimizer_seconds": 0.1, **changes}))


def past(candidate: Candidate, outcome: Outcome, cap_bytes: int = CAP_BYTES, number: int = 0) -> PastTrial:
    """A trial of another study."""
    trial = TrialRecord("study", number, candidate, "workload", "environment", outcome=outcome)
    return PastTrial(trial, "earlier", encode(ceiling_of(cap_bytes)))


def library(*trials: PastTrial, ceiling: Ceiling | None = None) -> Library:
    return Library(trials, ceiling or ceiling_of(CAP_BYTES))


class TestHoldsUnder:
    """The cap of the trial, its peaks, the cap now: does it count?"""

    @pytest.mark.parametrize(
        ("reserved", "allocated", "retries", "cap", "now", "holds"),
        [
            (10, 9, 0, 20, 20, True),
            (10, 9, 0, 20, 40, True),
            (10, 9, None, 20, 12, True),
            # Between the two peaks nobody knows: cached segments could have been given back.
            (10, 8, 0, 20, 9, False),
            # What was allocated alone is over the line.
            (10, 9, 0, 20, 8, True),
            # The cap was met: under another one the trial would have been another.
            (19.9, 15, 3, 20, 20, True),
            (19.9, 15, 3, 20, 40, False),
            (19.9, 15, 3, 20, 18, False),
            (19.9, 15, 3, 20, 15, True),
            # Over the line as it was, and with a little more no less so.
            (19.9, 15, 3, 20, 20.1, True),
        ],
    )
    def test_each(
        self, reserved: float, allocated: float, retries: int | None, cap: float, now: float, holds: bool
    ) -> None:
        found = completed(Candidate(BF16, 8), reserved, allocated, allocation_retries=retries).measurement
        assert holds_under(found, int(cap * GIB), ceiling_of(int(now * GIB))) is holds


class TestAnswers:
    def test_exactly_what_was_measured_with_its_source(self) -> None:
        candidate = Candidate(BF16, 32, 2)
        earlier = past(candidate, completed(candidate), number=3)
        found = library(earlier).answer(candidate, Effort())
        assert found.measurement == earlier.trial.outcome.measurement  # type: ignore[union-attr]
        source = source_of(found)
        assert (source.trial_id, source.derived, source.describe()) == (earlier.trial.id, False, "trial 3 of earlier")
        assert outcome_from_document(outcome_document(found)) == found

    def test_nothing_of_what_was_not_measured(self) -> None:
        known = library(past(Candidate(BF16, 32), completed(Candidate(BF16, 32))))
        for other in (Candidate(BF16, 16), Candidate(BF16, 32, 2), Candidate(Arm("tf32"), 32)):
            assert known.answer(other, Effort()) is None

    @pytest.mark.parametrize(
        "outcome", [Failed("error", "broken"), Failed("timeout", "slow"), OutOfMemory("killed", where="host")]
    )
    def test_faults_and_the_hosts_memory_say_nothing(self, outcome: Outcome) -> None:
        candidate = Candidate(BF16, 32)
        assert library(past(candidate, outcome)).answer(candidate, Effort()) is None

    def test_a_disturbed_measurement_says_nothing(self) -> None:
        candidate = Candidate(BF16, 32)
        disturbed = dataclasses.replace(completed(candidate), disturbed=("another search used this CPU",))
        assert library(past(candidate, disturbed)).answer(candidate, Effort()) is None
        once_more = outcome_from_document(outcome_document(dataclasses.replace(disturbed, run_again=False)))
        assert library(past(candidate, once_more)).answer(candidate, Effort()) is None

    def test_the_latest_of_several_and_one_in_full_before_all(self) -> None:
        candidate = Candidate(BF16, 8, 8)
        partly = [past(candidate, completed(candidate, micro_steps_run=3), number=number) for number in (1, 3)]
        in_full = past(candidate, completed(candidate), number=2)
        source = source_of(library(*partly).answer(candidate, Effort()))
        assert source.number == 3
        assert library(*partly).answer(candidate, Effort(), in_full=True) is None
        source = source_of(library(partly[0], in_full, partly[1]).answer(candidate, Effort(), in_full=True))
        assert source.number == 2

    def test_fewer_steps_than_are_asked_for_say_too_little(self) -> None:
        candidate = Candidate(BF16, 32)
        one_step = completed(candidate, step_seconds_each=(1.0,), relative_spread=0.0)
        two_wide = completed(candidate, step_seconds_each=(0.5, 0.4), relative_spread=0.2)
        for little in (one_step, two_wide):
            known = library(past(candidate, little))
            assert known.answer(candidate, Effort()) is None
            assert known.answer(candidate, MAX_BATCH_EFFORT) is not None
        # Far behind the best, two are enough now as they were then.
        assert library(past(candidate, two_wide)).answer(candidate, Effort(behind_step_seconds=0.3)) is not None
        assert library(past(candidate, two_wide)).answer(candidate, Effort(behind_step_seconds=0.45)) is None

    def test_running_out_counts_up_to_the_cap_it_ran_out_under(self) -> None:
        candidate = Candidate(BF16, 64)
        trial = past(candidate, out_of_memory())
        for now, counts in ((10, True), (20, True), (20.5, True), (21, False), (40, False)):
            found = library(trial, ceiling=ceiling_of(int(now * GIB))).answer(candidate, Effort())
            assert isinstance(found, OutOfMemory) is counts, now

    def test_running_out_speaks_of_all_that_needs_no_less(self) -> None:
        known = library(past(Candidate(Arm("bf16", gradient_checkpointing=True), 64), out_of_memory(), number=7))
        for more in (Candidate(BF16, 64), Candidate(BF16, 64, 2), Candidate(BF16, 80)):
            found = known.answer(more, Effort())
            assert isinstance(found, OutOfMemory)
            assert "64 × 1  bf16, checkpointing" in found.message
            assert found.source.describe() == "derived from trial 7 of earlier"
        assert known.answer(Candidate(BF16, 56), Effort()) is None


class TestSecondMeasurements:
    """What may answer when a candidate is to be measured once more."""

    def test_no_trial_answers_twice(self) -> None:
        candidate = Candidate(BF16, 32, 2)
        older, newer = (past(candidate, completed(candidate), number=number) for number in (1, 2))
        known = library(older, newer)
        first = known.answer(candidate, Effort(), in_full=True)
        asked = {Tried("own", candidate, first).process}
        assert asked == {newer.trial.id}
        second = known.answer(candidate, Effort(), in_full=True, not_from=asked)
        assert Tried("own", candidate, second).process == older.trial.id
        assert known.answer(candidate, Effort(), in_full=True, not_from={older.trial.id, newer.trial.id}) is None

    def test_nothing_is_derived(self) -> None:
        known = library(past(Candidate(BF16, 16, 4), completed(Candidate(BF16, 16, 4))))
        wanted = Candidate(BF16, 16, 8)
        derived = known.answer(wanted, Effort())
        assert derived is not None
        assert Pool([Tried("a", wanted, derived)]).processes(wanted) == 0
        assert known.answer(wanted, Effort(), not_from={"own"}) is None

    def test_running_out_answers_once(self) -> None:
        candidate = Candidate(BF16, 64)
        ran_out, less = past(candidate, out_of_memory()), past(Candidate(BF16, 32), out_of_memory())
        assert library(ran_out, less).answer(candidate, Effort(), not_from={ran_out.trial.id}) is None
        assert library(ran_out, less).answer(candidate, Effort(), not_from={"own"}) is not None

    def test_one_over_the_line_answers_once(self) -> None:
        candidate = Candidate(BF16, 8, 8)
        over, under = (past(candidate, completed(candidate, gib)) for gib in (19.9, 10.0))
        found = library(over, under).answer(candidate, Effort())
        assert found.measurement.peak_reserved_bytes > 19 * GIB
        assert library(over).answer(candidate, Effort(), not_from={over.trial.id}) is None


class TestProcesses:
    """How many processes measured a candidate."""

    def test_one_that_is_reused_twice_counts_once(self) -> None:
        candidate = Candidate(BF16, 32, 2)
        earlier = past(candidate, completed(candidate))
        reused = library(earlier).answer(candidate, Effort())
        own = completed(candidate)
        assert reused is not None
        twice = [Tried("a", candidate, reused), Tried("b", candidate, reused)]
        assert Pool(twice).processes(candidate) == 1
        assert Pool([*twice, Tried("c", candidate, own), Tried("d", candidate, own)]).processes(candidate) == 3


class TestDerived:
    @pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1)])
    def test_but_not_where_only_one_of_the_two_accumulates(self, then: int, now: int) -> None:
        known = library(past(Candidate(BF16, 16, then), completed(Candidate(BF16, 16, then))))
        assert known.answer(Candidate(BF16, 16, now), Effort()) is None

    def test_nor_without_the_optimizers_own_time(self) -> None:
        candidate = Candidate(BF16, 16, 4)
        known = library(past(candidate, completed(candidate, optimizer_seconds=None)))
        assert known.answer(Candidate(BF16, 16, 8), Effort()) is None

    def test_what_was_measured_goes_before(self) -> None:
        exact = Candidate(BF16, 16, 8)
        trials = [past(c, completed(c), number=c.gradient_accumulation_steps) for c in (exact, Candidate(BF16, 16, 4))]
        source = source_of(library(*trials).answer(exact, Effort()))
        assert (source.number, source.derived) == (8, False)

    @given(st.floats(1e-4, 10), st.floats(0, 5), st.integers(2, 64), st.integers(2, 64))
    def test_there_and_back_again(self, micro: float, optimizer: float, then: int, now: int) -> None:
        first, second = Candidate(BF16, 8, then), Candidate(BF16, 8, now)
        original = dataclasses.replace(
            measurement(first, micro * then + optimizer, GIB, GIB), optimizer_seconds=optimizer
        )
        there = derive(original, first, second)
        assert isinstance(there, Measurement)
        assert there.step_seconds == pytest.approx(micro * now + optimizer)
        back = derive(there, second, first)
        assert back.step_seconds == pytest.approx(original.step_seconds)


class TestSearches:
    def test_repeated_under_another_name_nothing_is_run(self, store: Store) -> None:
        first = search(store, RecordedRunner(EFFECTIVE_64), study="first")
        runner = RecordedRunner(EFFECTIVE_64)
        second = search(store, runner, study="second")
        assert runner.jobs == []
        assert Counter(t.candidate for t in second.trials) == Counter(t.candidate for t in first.trials)
        assert {trial.stage for trial in second.trials} == {"reused"}
        assert second.best.candidate == first.best.candidate
        assert second.study.state == "finished"
        report = load_report(store, "second")
        assert any("of earlier searches (first) reused" in note for note in notes(report))
        document = report_document(report)
        assert {trial["reused_from"]["study"] for trial in document["trials"]} == {"first"}
        assert document["baseline"]["number"] == 0
        # The dashboard has them all, and a third search has them from the first as well.
        theirs = frozen_trials(second.study, second.trials)
        assert {trial.user_attrs["stage"] for trial in theirs} == {"reused"}
        assert all(trial.user_attrs["reused_from"].endswith(" of first") for trial in theirs)
        fastest = max(trial.value for trial in theirs if trial.value is not None)
        assert fastest == pytest.approx(first.best.outcome.measurement.samples_per_second, rel=0.02)
        third = search(store, RecordedRunner(EFFECTIVE_64), study="third")
        assert {source.study for t in third.trials if (source := source_of(t.outcome))} == {"first"}

    def test_all_processes_of_a_candidate_answer(self, store: Store) -> None:
        """Not the latest alone: the second search promises what the first one did."""
        first = search(
            store, with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.5), study="first", cpu_affinity="off"
        )
        best = first.best.candidate
        count = [t.candidate for t in first.trials].count(best)
        assert count > 1
        second = search(store, RecordedRunner(EFFECTIVE_64), study="second", cpu_affinity="off")
        assert {trial.stage for trial in second.trials} == {"reused"}
        assert [t.candidate for t in second.trials].count(best) == count
        promised = [report_document(load_report(store, name))["next_run"] for name in ("first", "second")]
        assert promised[0]["samples_per_second"] == pytest.approx(promised[1]["samples_per_second"])
        assert promised[1]["processes_measured"] == count
        assert second.best.candidate == first.best.candidate

    @pytest.mark.parametrize(("slowdown", "is_used"), [(1.02, True), (3.0, False)])
    def test_speeds_of_another_hour_are_used_where_one_of_them_holds(
        self, store: Store, slowdown: float, is_used: bool
    ) -> None:
        """The machine is slower for all that is measured now; the first search measured fp32 only."""

        def runner(times: float) -> ComputedRunner:
            cost = {"bf16": 0.009, "fp32": 0.012}
            return ComputedRunner(lambda _: GIB, lambda c: times * c.samples_per_step * cost.get(c.arm.precision, 0.01))

        search(store, runner(1), study="first", precisions=("fp32",))
        now = runner(slowdown)
        second = search(store, now, study="second", precisions=("bf16", "fp32"))
        assert now.candidates[0] in {trial.candidate for trial in store.trials(store.existing_study("first").id)}
        assert any(trial.stage == "reused" for trial in second.trials) == is_used
        assert any("are not used: " in told for told in second.observer.notes) != is_used
        # None of the numbers is of one hour, and its rival's of another.
        assert load_report(store, "second").speedup == pytest.approx(12 / 9, rel=0.05)
        assert second.best.candidate.arm.precision == "bf16"

    @pytest.mark.parametrize(
        "changed", [{"driver": "600"}, {"measurement_revision": 99}, {"packages": {"torch": "2.14.0"}}]
    )
    def test_another_environment_measures_everything_anew(self, store: Store, changed: dict[str, Any]) -> None:
        first, second = RecordedRunner(EFFECTIVE_64), RecordedRunner(EFFECTIVE_64)
        search(store, first, study="first")
        search(store, second, given=with_environment(prepared(study="second"), **changed))
        assert second.candidates == first.candidates

    def test_fresh_measures_everything_anew(self, store: Store) -> None:
        first, second = RecordedRunner(EFFECTIVE_64), RecordedRunner(EFFECTIVE_64)
        search(store, first, study="first")
        search(store, second, study="second", fresh=True)
        assert second.candidates == first.candidates

    def test_another_machine_of_the_kind_proves_nothing(self, store: Store) -> None:
        """What it measured decides what is tried first; every number is measured here."""
        search(store, RecordedRunner(EFFECTIVE_64), study="first")
        here = RecordedRunner(EFFECTIVE_64)
        given = with_environment(prepared(study="second"), device_uuid="GPU-1")
        run = search(store, here, given=given)
        assert not [source for trial in run.trials if (source := source_of(trial.outcome))]
        assert run.best.candidate == Candidate(BF16, 32, 2)
        assert here.candidates[1] == run.best.candidate
        assert run.observer.notes == []

    def test_speeds_of_a_faster_machine_rule_nothing_out(self, store: Store, tmp_path: Path) -> None:
        """There bf16 was ten times as fast as here; the search here concludes what it would have concluded alone."""

        def runner(times: float) -> ComputedRunner:
            cost = {"bf16": 0.009 / times}
            return ComputedRunner(lambda _: GIB, lambda c: c.samples_per_step * cost.get(c.arm.precision, 0.01))

        options: dict[str, Any] = {"study": "second", "precisions": ("bf16", "fp32")}
        with new_store(tmp_path, "alone.db") as empty:
            alone = search(empty, runner(1), **options)
        search(store, runner(10), study="first", precisions=("bf16",), measure_baseline=False)
        found = search(store, runner(1), given=with_environment(prepared(**options), device_uuid="GPU-1"))
        assert found.study.left_out == alone.study.left_out
        assert {trial.candidate.arm for trial in found.trials} == {trial.candidate.arm for trial in alone.trials}
        assert found.best.candidate.arm == alone.best.candidate.arm

    def test_a_budget_counts_what_is_run(self, store: Store) -> None:
        options: dict[str, Any] = {"memory_limit_bytes": 16 * GIB, "trials": 2}
        search(store, RecordedRunner(EFFECTIVE_64), study="first", **options)
        runner = RecordedRunner(EFFECTIVE_64)
        second = search(store, runner, study="second", **options)
        assert len(runner.jobs) == 2
        assert [trial.stage == "reused" for trial in second.trials] == [True, True, False, False]

    @pytest.mark.parametrize("sampler", ["grid", "tpe", pytest.param("random", marks=pytest.mark.whole)])
    def test_with_any_sampler(self, store: Store, sampler: str) -> None:
        search(store, RecordedRunner(EFFECTIVE_64), study="first", sampler="grid")
        runner = RecordedRunner(EFFECTIVE_64)
        second = search(store, runner, study="second", sampler=sampler)
        assert runner.jobs == []
        assert second.study.state == "finished"

    def test_a_smaller_ceiling_uses_what_still_fits_and_what_surely_does_not(self, store: Store) -> None:
        search(store, RecordedRunner(EFFECTIVE_64), study="first", sampler="grid")
        options: dict[str, Any] = {"memory_limit_bytes": 16 * GIB, "fresh": True}
        alone = search(store, RecordedRunner(EFFECTIVE_64), study="alone", **options)
        runner = RecordedRunner(EFFECTIVE_64)
        second = search(store, runner, study="second", memory_limit_bytes=16 * GIB)
        assert second.best.candidate == alone.best.candidate
        assert len(runner.jobs) < len(alone.trials) / 2

    def test_a_larger_ceiling_tries_again_what_ran_out(self, store: Store) -> None:
        def runner() -> ComputedRunner:
            return ComputedRunner(
                lambda candidate: candidate.per_device_train_batch_size * GIB,
                lambda candidate: 0.1 * candidate.gradient_accumulation_steps + 0.01 * candidate.samples_per_step,
            )

        small, large = runner(), runner()
        search(store, small, study="first", memory_limit_bytes=12 * GIB)
        second = search(store, large, study="second", memory_limit_bytes=40 * GIB)
        # The first one shows that the machine is as fast as it was.
        control, *others = large.candidates
        assert control in small.candidates
        assert others
        assert all(candidate.per_device_train_batch_size > 8 for candidate in others)
        assert second.best.candidate.per_device_train_batch_size > 8

    def test_another_objective(self, store: Store) -> None:
        options: dict[str, Any] = {"effective_batch": None, "precisions": ("bf16",)}
        search(store, RecordedRunner(BATCHES, between=True), study="first", objective="max-batch", **options)
        runner = RecordedRunner(BATCHES, between=True)
        alone = search(
            store, RecordedRunner(BATCHES, between=True), study="a", objective="max-batch", fresh=True, **options
        )
        again = search(store, runner, study="b", objective="max-batch", **options)
        assert runner.jobs == []
        assert again.best.candidate == alone.best.candidate
        assert any("does not fit" in line for line in summary_lines(load_report(store, "b")))

    def test_another_effective_batch_is_worked_out_and_its_winner_run_in_full(
        self, store: Store, tmp_path: Path
    ) -> None:
        def timed() -> ComputedRunner:
            return with_measured(ComputedRunner(peak, step), optimizer_seconds=0.1)

        def peak(candidate: Candidate) -> float:
            return candidate.per_device_train_batch_size * (0.5 if candidate.arm.gradient_checkpointing else 1) * GIB

        def step(candidate: Candidate) -> float:
            slow = 1.3 if candidate.arm.gradient_checkpointing else 1.0
            micro = 0.2 + 0.01 * candidate.per_device_train_batch_size
            return 0.1 + micro * slow * candidate.gradient_accumulation_steps

        options: dict[str, Any] = {"precisions": ("bf16",), "effective_batch": 256}
        with new_store(tmp_path, "alone.db") as other:
            alone = timed()
            expected = search(other, alone, study="alone", **options)
        search(store, timed(), study="first", **{**options, "effective_batch": 128})
        runner = timed()
        second = search(store, runner, study="second", **options)
        assert second.best.candidate == expected.best.candidate
        assert second.best.stage == "final"
        assert len(runner.jobs) < len(alone.jobs)
        derived = [source for trial in second.trials if (source := source_of(trial.outcome)) and source.derived]
        assert derived
        assert second.trials[0].stage == "reused"
        assert any("baseline's speed is derived from trial" in note for note in notes(load_report(store, "second")))


def test_what_was_measured_before_shows_that_predictions_hold() -> None:
    ceiling = ceiling_of(CAP_BYTES)
    memory = MemoryModel(ceiling)
    earlier, now = Candidate(BF16, 16, 4), Candidate(BF16, 32, 2)
    predictions = tuple(
        MemoryPrediction(
            per_device_train_batch_size=candidate.per_device_train_batch_size,
            gradient_accumulation_steps=candidate.gradient_accumulation_steps,
            micro_batch_bytes=0,
            peak_allocated_bytes=predicted * GIB,
            peak_reserved_bytes=predicted * GIB,
            runs_out=False,
            fits=True,
            anatomy={},
        )
        for candidate, predicted in ((earlier, 8), (now, 14))
    )
    memory.add(Question(BF16, ((16, 4), (32, 2)), None), PredictionAnswer(predictions, None))
    assert not memory.trusted(now.arm)
    # Another cap: the trial answers nothing here, and its bytes are what they were.
    Library([past(earlier, completed(earlier, gib=8.25), 40 * GIB)], ceiling, memory)
    assert memory.trusted(now.arm)


def test_a_derived_peak_has_the_inputs_of_its_own_micro_steps() -> None:
    wide = dataclasses.replace(completed(Candidate(BF16, 8, 4), gib=9.0).measurement, micro_batch_bytes=MIB)
    derived = derive(wide, Candidate(BF16, 8, 4), Candidate(BF16, 8, 32))
    assert derived.peak_allocated_bytes == wide.peak_allocated_bytes + 28 * MIB
    assert derived.peak_reserved_bytes == wide.peak_reserved_bytes + 28 * MIB


def test_a_record_that_did_not_count_all_inputs_is_not_reused() -> None:
    candidate = Candidate(BF16, 8, 32)
    run = completed(candidate)
    partial = dataclasses.replace(run.measurement, micro_steps_run=3, micro_batch_bytes=None)
    for micro_batch_bytes, is_answered in ((None, False), (MIB, True)):
        known = dataclasses.replace(partial, micro_batch_bytes=micro_batch_bytes)
        library = Library([past(candidate, dataclasses.replace(run, measurement=known))], ceiling_of(CAP_BYTES))
        assert (library.answer(candidate, Effort()) is not None) == is_answered
    assert derive(partial, candidate, Candidate(BF16, 8, 16)) is None


class TestTheSameSearchAgain:
    """A search without a name goes on with the study of the same request, which answers with all its processes."""

    def differs(self, store: Store, device: Device = H200, **options: Any) -> str | None:
        known = store.study("first")
        asked = dataclasses.replace(request(**options), study=None, device=device)
        # Versions that the recorded search was told, and this process has none of.
        packages = dict(FACTS.software.packages)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(studies, "version_of", packages.get)
            return studies.what_differs(store, known, asked)

    def test_is_answered_from_the_study_of_the_first(self, store: Store) -> None:
        search(store, RecordedRunner(EFFECTIVE_64), study="first")
        assert self.differs(store) is None
        # More may be spent on it.
        assert self.differs(store, trials=50) is None

    def test_without_what_was_said_of_a_lever_it_is_another_search(self, store: Store) -> None:
        """Such a field is recorded only where it was given."""
        search(store, RecordedRunner(EFFECTIVE_64), study="first", unpadded="off")
        assert self.differs(store, unpadded="off") is None
        assert self.differs(store) == "unpadded: 'off', now not given"

    def test_of_anything_else_is_told_what_differs(self, store: Store) -> None:
        search(store, RecordedRunner(EFFECTIVE_64), study="first")
        assert self.differs(store, fresh=True) == "--fresh measures again"
        assert self.differs(store, effective_batch=32) == "effective_batch: 64, now 32"
        assert self.differs(store, dataclasses.replace(H200, uuid="GPU-1")) == "it was searched on another machine"
        assert self.differs(store, dataclasses.replace(H200, driver="600")) == "driver: '580.159.04', now '600'"
        less = dataclasses.replace(H200, memory_free_bytes=20 * GIB)
        assert self.differs(store, less) == "23.4 GiB could be reserved then, and 19.4 GiB can now"
        own = Workload.of_source(TrainingSource("script", "/run.py", "0", "/"))
        assert self.differs(store, workload=own) == "your own code may have changed"
