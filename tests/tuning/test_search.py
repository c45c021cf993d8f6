"""Test whole searches on recorded trials and a real database, which takes no more queries for many trials."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import EFFECTIVE_64, ComputedRunner, RecordedRunner, fault, out_of_memory, with_measured
from searching import RecordingObserver, Run, facts, interrupt_after, new_store, prepared, request, search
from sqlalchemy import event

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import NoResultError, NothingFitsError, TrialServerError
from autotune.core.inspection import OwnSettings
from autotune.core.messages import Progress
from autotune.core.outcome import Failed, Outcome, OutOfMemory
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB, MIB
from autotune.core.workload import Workload
from autotune.execution.executor import TrialJob
from autotune.results.json_document import report_document
from autotune.results.report import load_report
from autotune.results.text import summary_lines
from autotune.results.warnings import notes
from autotune.store.opening import open_store
from autotune.store.records import NOTHING_LEFT, StopReason
from autotune.store.repository import Store
from autotune.tuning.prepare import Prepared, prepare

BASELINE = Candidate(Arm("fp32"), 8, 8)


def fits_up_to(batch: int) -> ComputedRunner:
    """Trials that fit up to a per-device batch under the 24 GiB of the requests here."""
    return ComputedRunner(lambda candidate: 20 * GIB * candidate.per_device_train_batch_size / batch)


class TestFromEndToEnd:
    def test_the_example(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        run = search(store, runner)
        assert run.best.candidate.describe() == "32 × 2  bf16"
        assert run.study.state == "finished"
        assert (run.study.stop_reason, run.study.stopped_because) == (NOTHING_LEFT.reason, NOTHING_LEFT.sentence)
        assert [each.describe() for each in run.study.left_out] == [
            "fp16; tf32; all checkpointing: expected to be 0.97 × as fast as the best, or less: not worth a trial"
        ]
        assert run.study.seconds == pytest.approx(runner.seconds)
        assert runner.seconds < 30
        assert len(run.trials) <= 11
        assert sum(isinstance(trial.outcome, OutOfMemory) for trial in run.trials) <= 2
        assert len(set(runner.candidates)) == len(runner.candidates)
        # The baseline comes first, what was measured in full is not run again, and there is nothing to explain.
        assert run.observer.started[0][1:] == (BASELINE, "baseline")
        assert (run.observer.stages().count("baseline"), run.observer.stages().count("final")) == (1, 0)
        assert run.study.baseline_trial_id == run.trials[0].id
        assert run.observer.notes == []

    def test_everything_is_recorded_as_it_happened(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        run = search(store, runner)
        assert run.study == store.study("bert")
        assert [trial.candidate for trial in run.trials] == runner.candidates
        assert [trial.id for trial in run.trials] == [job.trial_id for job in runner.jobs]
        assert [trial.log_path for trial in run.trials] == [job.log_path for job in runner.jobs]
        assert run.trials == run.observer.ended
        assert [number for number, _, _ in run.observer.started] == [trial.number for trial in run.trials]
        assert all(trial.outcome is not None for trial in run.trials)
        assert sum(trial.seconds or 0 for trial in run.trials) == pytest.approx(runner.seconds)
        assert run.study.request == request().document()
        assert run.observer.records == [Progress("train")] * len(run.trials)
        assert run.observer.begun == 1

    def test_every_trial_gets_the_cap_the_seed_and_the_time_limit(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        search(store, runner, seed=7, trial_timeout_seconds=33.0)
        assert {(job.cap_bytes, job.seed, job.timeout_seconds) for job in runner.jobs} == {(23956 * MIB, 7, 33.0)}

    def test_several_devices_share_the_effective_batch(self, store: Store) -> None:
        runner = fits_up_to(64)
        run = search(store, runner, effective_batch=64, world_size=4, precisions=("bf16",))
        assert {candidate.samples_per_step for candidate in runner.candidates} == {16}
        assert run.best.candidate.samples_per_step == 16


class TestBaseline:
    def test_outside_the_space_is_measured_and_never_wins(self, store: Store) -> None:
        """The defaults are fp32; --precision bf16 does not search that."""
        # fp32 is by far the fastest here.
        runner = ComputedRunner(
            lambda _: GIB, lambda c: c.samples_per_step * (0.001 if c.arm.precision == "fp32" else 0.1)
        )
        run = search(store, runner, precisions=("bf16",))
        assert run.trials[0].candidate == BASELINE
        assert run.study.baseline_trial_id == run.trials[0].id
        assert run.best.candidate.arm.precision == "bf16"

    def test_alone_is_no_result(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        with pytest.raises(NoResultError, match="budget of 1 trial is") as caught:
            search(store, runner, precisions=("bf16",), trials=1)
        assert "--trials" in caught.value.hint
        assert len(runner.jobs) == 1

    def test_in_the_space_may_win(self, store: Store) -> None:
        runner = ComputedRunner(lambda _: GIB, lambda c: 0.1 * c.samples_per_step + c.per_device_train_batch_size)
        run = search(store, runner, precisions=("fp32",))
        assert run.best.candidate == BASELINE

    def test_is_left_out_on_request(self, store: Store) -> None:
        run = search(store, RecordedRunner(EFFECTIVE_64), measure_baseline=False)
        assert "baseline" not in run.observer.stages()
        assert run.study.baseline_trial_id is None

    def test_that_does_not_fit_is_no_obstacle(self, store: Store) -> None:
        runner = ComputedRunner(lambda c: GIB * (30 if c == BASELINE else c.per_device_train_batch_size))
        run = search(store, runner)
        assert isinstance(run.trials[0].outcome, OutOfMemory)
        assert run.study.baseline_trial_id is None
        assert run.study.best_trial_id is not None


class TestBudgets:
    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize("trials", [2, 3])
    def test_of_trials(self, store: Store, trials: int, slots: int) -> None:
        runner = RecordedRunner(EFFECTIVE_64, slots=slots)
        run = search(store, runner, trials=trials)
        assert len(runner.jobs) == trials
        assert run.study.stopped_because == f"the budget of {trials} trials is spent"
        assert run.study.stop_reason is StopReason.TRIALS
        assert run.study.state == "finished"

    def test_of_seconds_starts_no_trial_that_would_end_after_it(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        run = search(store, runner, time_budget_seconds=13, memory_limit_bytes=TestFinal.LIMIT)
        assert len(run.trials) > 1
        assert runner.seconds <= 13
        assert run.study.stopped_because == "the time budget of 13.0 s leaves no time for a trial"
        assert run.best is not None
        assert run.study.stop_reason is StopReason.TIME

    def test_of_seconds_spent_before_the_first_trial_is_no_verdict_on_memory(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.clock = iter(range(0, 1000, 10)).__next__  # type: ignore[assignment, method-assign]
        with pytest.raises(NoResultError, match="the time budget of 5") as caught:
            search(store, runner, time_budget_seconds=5)
        assert "--time-budget" in caught.value.hint
        assert not runner.jobs


class TestInterruption:
    def test_ends_after_the_running_trial_with_the_best_so_far(self, store: Store) -> None:
        observer, interruption = interrupt_after(3)
        run = search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
        assert len(run.trials) == 3
        assert (run.study.state, run.study.stopped_because) == ("interrupted", "interrupted")
        assert run.study.best_trial_id is not None

    def test_before_anything_fits_is_no_error(self, store: Store) -> None:
        observer, interruption = interrupt_after(1)
        run = search(store, fits_up_to(1), observer, interruption)
        assert run.study.best_trial_id is None

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), TrialServerError("the server is gone", "look")])
    def test_at_once_loses_only_the_running_trial(self, store: Store, error: BaseException) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[Candidate(Arm("bf16"), 32, 2)] = [error]
        with pytest.raises(type(error)):
            search(store, runner)
        study = store.study("bert")
        assert study.state == "interrupted"
        assert study.stopped_because == ("the server is gone" if isinstance(error, TrialServerError) else "interrupted")
        trials = store.trials(study.id)
        assert study.best_trial_id in {trial.id for trial in trials}
        *rest, last = trials
        assert last.outcome.reason == "interrupted"
        assert last.candidate == Candidate(Arm("bf16"), 32, 2)
        assert all(not isinstance(trial.outcome, Failed) for trial in rest)


class TestNothing:
    def test_only_what_was_ruled_out_by_hand_is_suggested(self, store: Store) -> None:
        with pytest.raises(NothingFitsError) as caught:
            search(store, ComputedRunner(lambda _: 30 * GIB), gradient_checkpointing="off", batch_multiple=8)
        assert "--gradient-checkpointing auto" in caught.value.hint
        assert "leave --batch-multiple out" in caught.value.hint

    def test_fits(self, store: Store) -> None:
        runner = ComputedRunner(lambda _: 30 * GIB)
        with pytest.raises(NothingFitsError) as caught:
            search(store, runner)
        assert "nothing fits under 22.7 GiB" in caught.value.message
        assert caught.value.hint == (
            "raise --memory-limit, or shorten --seq-len, or add --lever uncached_casts=on, "
            "or add --lever offload_activations=on"
        )
        study = store.study("bert")
        assert (study.state, study.best_trial_id) == ("finished", None)
        trials = store.trials(study.id)
        assert len(trials) == len(runner.jobs)
        assert all(isinstance(trial.outcome, OutOfMemory) for trial in trials)
        # It went all the way down before it gave up.
        assert min(c.per_device_train_batch_size for c in runner.candidates) == 1

    def test_fits_so_far_is_said_so_where_a_budget_ended_it(self, store: Store) -> None:
        with pytest.raises(NothingFitsError, match="nothing that was tried fits") as caught:
            search(store, ComputedRunner(lambda _: 30 * GIB), trials=2)
        assert "--trials" in caught.value.hint

    def test_stays_under_the_line_though_all_completed(self, store: Store) -> None:
        with pytest.raises(NothingFitsError, match="nothing fits"):
            search(store, ComputedRunner(lambda _: 23900 * MIB))

    def test_works(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        broken = fault("ValueError: no such kernel")
        runner.answer = lambda job: (broken, 1.0)  # type: ignore[method-assign]
        with pytest.raises(NoResultError, match="no such kernel") as caught:
            search(store, runner)
        assert "log" in caught.value.hint
        study = store.study("bert")
        trials = store.trials(study.id)
        assert all(isinstance(trial.outcome, Failed) for trial in trials)
        # Eight arms, each given up after a few batches.
        assert len(trials) < 60


class TestFaults:
    def test_one_arm_that_is_broken_does_not_end_the_search(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        broken = Failed("error", "RuntimeError: no bf16 here", during="train", traceback="Traceback …")
        for batch in (8, 16, 32, 64):
            runner.faults[Candidate(Arm("bf16"), batch, 64 // batch)] = [broken]
        run = search(store, runner)
        assert run.best.candidate.describe() == "32 × 2  fp16"
        failed = [trial for trial in run.trials if trial.state == "failed"]
        assert 1 <= len(failed) <= 3
        assert all(trial.outcome == broken for trial in failed)

    def test_an_arm_that_fails_does_not_keep_smaller_batches_of_another_from_being_tried(self, store: Store) -> None:
        """Only 4 × 8 without checkpointing fits, and checkpointing fails at every batch."""
        runner = fits_up_to(4)
        for batch in (1, 2, 4, 8, 16, 32):
            runner.faults[Candidate(Arm("bf16", gradient_checkpointing=True), batch, 32 // batch)] = [fault()] * 2
        run = search(store, runner, effective_batch=32, precisions=("bf16",))
        assert run.best.candidate == Candidate(Arm("bf16"), 4, 8)

    def test_host_memory_that_runs_out_rules_out_nothing_of_the_device(self, store: Store) -> None:
        best = Candidate(Arm("bf16"), 32, 2)
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[best] = [OutOfMemory("the kernel ended the trial", where="host")]
        run = search(store, runner)
        assert run.best.candidate.describe() == "32 × 2  fp16"


class TestFinal:
    """16 × 4 is the best below 15.5 GiB; its four micro-steps are first measured as three."""

    BEST = Candidate(Arm("bf16"), 16, 4)
    LIMIT = int(15.5 * GIB)

    def test_a_winner_measured_in_part_is_measured_in_full(self, store: Store) -> None:
        runner = with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95)
        run = search(store, runner, memory_limit_bytes=self.LIMIT)
        assert run.best.candidate == self.BEST
        assert run.best.stage == "final"
        assert run.observer.stages()[-2:] == ["search", "final"]
        assert runner.jobs[-1].effort.max_micro_steps == 4
        assert {job.effort.max_micro_steps for job in runner.jobs[:-1]} == {3}
        # Where it is noisy, what is promised is worth more time than what is only compared.
        assert runner.jobs[-1].effort.max_seconds > runner.jobs[-2].effort.max_seconds

    def test_a_host_bound_winner_is_tried_pinned_and_both_are_measured_in_alternation(self, store: Store) -> None:
        run = search(store, with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.5))
        late = [trial.candidate for trial in run.trials if trial.stage == "final"]
        pinned = [trial.candidate for trial in run.trials if trial.candidate.arm.cpu_affinity]
        assert len(pinned) >= 2
        assert {replace(candidate.arm, cpu_affinity=False) for candidate in pinned} == {run.best.candidate.arm}
        assert len(set(late)) == 2
        # Pinning changed nothing here, so it is not recommended.
        assert not run.best.candidate.arm.cpu_affinity

    def test_a_reused_trial_is_no_second_measurement(self, store: Store) -> None:
        """The first study measured the winner in one process; the second asks for another one."""
        search(store, with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95), study="first")
        noisy = with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95)
        best = Candidate(Arm("bf16"), 32, 2)
        library = search(store, noisy, study="second")
        assert noisy.jobs == []
        assert [trial.candidate for trial in library.trials].count(best) == 1

    def test_a_step_of_a_minute_is_not_run_whole_and_has_time(self, store: Store) -> None:
        """8 samples a second at effective batch 512: a whole final would take five minutes."""
        runner = ComputedRunner(lambda c: GIB * c.per_device_train_batch_size, lambda c: c.samples_per_step / 8)
        run = search(store, runner, effective_batch=512, precisions=("bf16",), trial_timeout_seconds=180.0)
        final = runner.jobs[-1]
        assert run.trials[-1].stage == "final"
        assert final.effort.max_micro_steps < final.candidate.gradient_accumulation_steps
        run_seconds = final.effort.max_micro_steps * final.candidate.per_device_train_batch_size / 8
        assert run_seconds <= 32
        assert final.timeout_seconds > 180 + 4 * run_seconds

    def test_takes_the_last_trial_of_the_budget(self, store: Store) -> None:
        run = search(store, RecordedRunner(EFFECTIVE_64), memory_limit_bytes=self.LIMIT, trials=6)
        assert run.observer.stages()[-1] == "final"
        assert len(run.trials) == 6

    @pytest.mark.parametrize("trials", [None, 4])
    def test_a_noisy_winner_is_measured_once_more(self, store: Store, trials: int | None) -> None:
        """32 × 2 runs whole steps, of which ± 6 % is too wide a promise; the budget's last trial is for that, too."""
        run = search(store, with_measured(RecordedRunner(EFFECTIVE_64), relative_spread=0.06), trials=trials)
        assert run.observer.stages().count("final") == 1
        assert run.best.stage == "final"
        assert run.trials[-1].id == run.best.id
        assert trials is None or len(run.trials) == trials

    @pytest.mark.parametrize("end", [out_of_memory(), fault(), Failed("timeout", "stopped")])
    def test_that_fails_is_not_tried_for_ever(self, store: Store, tmp_path: Path, end: Failed | OutOfMemory) -> None:
        runner = with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95)
        run = search(store, runner, memory_limit_bytes=self.LIMIT)
        with new_store(tmp_path, "other.db") as other:
            again = with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95)
            first = runner.jobs[runner.candidates.index(self.BEST)]
            outcome, _ = again.answer(first)
            again.faults[self.BEST] = [outcome, end]
            failing = search(other, again, memory_limit_bytes=self.LIMIT)
        assert again.candidates.count(self.BEST) <= 3
        # Once the best has run out, up to three others are worth a trial, each once.
        others = [candidate for candidate in again.candidates if candidate != self.BEST]
        assert len(others) == len(set(others))
        assert len(failing.trials) <= len(run.trials) + 3
        # What ran out once is not recommended; a fault says nothing against the first measurement.
        assert (failing.best.candidate == self.BEST) is isinstance(end, Failed)


class TestOwnSettingsThatFail:
    """The baseline of the user's own code raises an error: everything else may do so too."""

    WORKLOAD = Workload.of_source(TrainingSource("script", "/run.py", "0", "/"))
    OWN = Candidate(Arm("fp32", optim="own"), 8, 8)

    def search(self, store: Store, runner: ComputedRunner, observer: RecordingObserver) -> Run:
        own = OwnSettings(Arm(optim="own"), 8, 8)
        given = prepare(request(workload=self.WORKLOAD, optims=()), facts(own=own))
        return search(store, runner, observer, given=given)

    def test_the_search_ends_when_other_settings_fail_in_the_same_way(self, store: Store) -> None:
        runner, observer = fits_up_to(64), RecordingObserver()
        # The batch is in the message.
        runner.answer = lambda job: (  # type: ignore[method-assign]
            fault(f"AttributeError: no such thing (run.py:7) of {job.candidate.per_device_train_batch_size}"),
            1.0,
        )
        with pytest.raises(NoResultError, match=r"run\.py failed .*8 × 8  fp32.*no such thing \(run\.py:7\)") as caught:
            self.search(store, runner, observer)
        assert "trial-0002.log" in (caught.value.hint or "")
        assert observer.ended[0].candidate == self.OWN
        assert len(observer.ended) == 3
        study = store.study("bert")
        assert (study.state, study.stop_reason) == ("interrupted", StopReason.ERROR)

    def test_it_ends_where_memory_runs_out_before_the_first_step(self, store: Store) -> None:
        """As with all pairs of a data set, which no batch changes; within the training it is the batch."""
        runner, observer = fits_up_to(64), RecordingObserver()
        early = OutOfMemory("MemoryError: pairs = list(combinations(texts, 2)) (run.py:7)", during="script")
        runner.answer = lambda job: (early, 1.0)  # type: ignore[method-assign]
        with pytest.raises(
            NothingFitsError, match=r"before its first step.*combinations\(texts, 2\)\) \(run\.py:7"
        ) as caught:
            self.search(store, runner, observer)
        assert len(observer.ended) == 2
        assert "--memory-limit" in (caught.value.hint or "")

    def test_it_goes_on_without_a_reference_where_others_do_not(self, store: Store) -> None:
        runner, observer = fits_up_to(64), RecordingObserver()
        runner.faults[self.OWN] = [fault("run.py ended before enough steps were measured")]
        found = self.search(store, runner, observer)
        assert found.best.candidate.arm.precision == "bf16"
        assert found.study.baseline_trial_id is None
        assert runner.candidates.count(self.OWN) == 1
        said = "\n".join(summary_lines(load_report(store, "bert")))
        assert (
            "did not complete (failed: run.py ended before enough steps were measured), so the speed-up is not known"
            in said
        )

    @pytest.mark.parametrize("outcome", [out_of_memory(1), Failed("timeout", "took longer than 180 s")])
    def test_it_goes_on_after_any_other_end(self, store: Store, outcome: OutOfMemory | Failed) -> None:
        runner = fits_up_to(64)
        runner.faults[self.OWN] = [outcome]
        assert self.search(store, runner, RecordingObserver()).study.state == "finished"


class TestLevels:
    @pytest.mark.parametrize(
        ("largest", "effective_batch", "best", "reasons"),
        [
            (2, 64, (2,), [f"no multiple of {n} fits; going down to multiples of {n // 2}" for n in (8, 4)]),
            (64, 12, (4, 12),
             ["no multiple of 8 divides what a device gets of effective batch 12; going down to multiples of 4"]),
        ],
    )  # fmt: skip
    def test_going_down_is_said_with_the_reason(
        self, store: Store, largest: int, effective_batch: int, best: tuple[int, ...], reasons: list[str]
    ) -> None:
        run = search(store, fits_up_to(largest), effective_batch=effective_batch)
        assert run.best.candidate.per_device_train_batch_size in best
        assert [note for note in run.observer.notes if "multiple" in note] == reasons

    def test_failures_are_not_told_as_a_lack_of_memory(self, store: Store) -> None:
        def answer(job: TrialJob) -> tuple[Outcome, float]:
            outcome, seconds = fits(job)
            return (fault() if job.candidate.per_device_train_batch_size % 8 == 0 else outcome), seconds

        runner = fits_up_to(64)
        fits, runner.answer = runner.answer, answer  # type: ignore[method-assign]
        run = search(store, runner)
        told = [note for note in run.observer.notes if "multiple" in note]
        assert told[0].startswith("no multiple of 8 completed; going down")
        told = [note for note in notes(load_report(store, run.study.name)) if "multiple" in note]
        assert [note.partition(": ")[2] for note in told] == ["none of those completed"]


STUDY = "many"
TRIALS = 25


def prepared_at_random(trials: int) -> Prepared:
    """A search at random over any batch, which never runs out of candidates."""
    return prepared(effective_batch=None, batch_multiple=1, sampler="random", trials=trials, study=STUDY)


def runner() -> ComputedRunner:
    return ComputedRunner(lambda candidate: GIB + candidate.per_device_train_batch_size * 0.01 * GIB)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    with new_store(folder, "many.db") as store:
        search(store, runner(), given=prepared_at_random(TRIALS))
    return folder / "many.db"


@pytest.fixture
def many(written: Path, tmp_path: Path) -> Iterator[Store]:
    with open_store(str(shutil.copy(written, tmp_path / "many.db"))) as opened:
        yield opened


@contextmanager
def counted_statements(store: Store) -> Iterator[list[str]]:
    """The statements that the store sends meanwhile."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(store.engine, "before_cursor_execute", note)
    yield statements
    event.remove(store.engine, "before_cursor_execute", note)


LOOKS: list[tuple[str, Callable[[Store], Any], int]] = [
    ("show", lambda store: report_document(load_report(store, STUDY)), 10),
    ("studies", lambda store: store.studies(), 8),
    ("repeat", lambda store: search(store, runner(), given=prepared_at_random(TRIALS)), 46),
]


@pytest.mark.parametrize(("look", "most"), [look[1:] for look in LOOKS], ids=[look[0] for look in LOOKS])
def test_few_queries(many: Store, look: Callable[[Store], Any], most: int) -> None:
    with counted_statements(many) as statements:
        look(many)
    assert 0 < len(statements) <= most, statements


def test_asking_goes_on_at_the_end(many: Store) -> None:
    run = search(many, runner(), given=prepared_at_random(TRIALS + 2))
    assert [trial.number for trial in run.trials] == list(range(TRIALS + 2))
