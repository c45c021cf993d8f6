"""Test which candidates are measured again before a search ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recorded import ComputedRunner, measurement
from searching import BERT_LARGE, H200, ceiling_of, new_store, request, search

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface
from autotune.core.outcome import Completed, Failed, Outcome
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB
from autotune.estimate.chance import Chances
from autotune.estimate.feasibility import LEAST_CHANCE
from autotune.estimate.history import History, Tried
from autotune.estimate.pooling import deviations
from autotune.execution.executor import TrialJob
from autotune.tuning.effort import effort_of, timeout_seconds
from autotune.tuning.policy import to_measure_again

COMFORTABLE = Candidate(Arm("bf16"), 32, 2)
RIVAL = Candidate(Arm("bf16"), 64, 1)
ALL = [COMFORTABLE, RIVAL]


@dataclass
class Told:
    """A history that is told speeds, in samples a second; the smaller batch leaves more memory free."""

    history: History = field(default_factory=lambda: History(ceiling_of(24 * GIB)))

    def measured(
        self,
        candidate: Candidate,
        speed: float,
        run: int | None = None,
        spread: float | None = None,
        busy_share: float | None = 0.97,
    ) -> Told:
        peak = candidate.per_device_train_batch_size * GIB // 8
        found = measurement(candidate, candidate.samples_per_step / speed, peak, peak, run)
        found = dataclasses.replace(found, gpu_busy_share=busy_share)
        outcome = Completed(found if spread is None else dataclasses.replace(found, relative_spread=spread))
        in_full = run is None
        self.history.add(Tried(str(len(self.history.tried)), candidate, outcome, in_full))
        return self

    def winner(self) -> Candidate:
        found = self.history.winner(ALL)
        return found.candidate


def test_one_that_is_slower_beyond_what_processes_differ_by_is_no_rival() -> None:
    assert to_measure_again(Told().measured(COMFORTABLE, 100.0).measured(RIVAL, 98.5).history, ALL) == []


def test_where_the_host_limits_the_same_difference_leaves_it_open() -> None:
    told = Told().measured(COMFORTABLE, 100.0, busy_share=0.5).measured(RIVAL, 98.5, busy_share=0.5)
    assert set(to_measure_again(told.history, ALL)) == {COMFORTABLE, RIVAL}


def test_winner_and_rival_are_measured_in_alternation_a_bounded_number_of_times() -> None:
    told = Told().measured(COMFORTABLE, 100.0, busy_share=0.4).measured(RIVAL, 99.0, busy_share=0.4)
    order = []
    while owed := to_measure_again(told.history, ALL):
        order.append(owed[0])
        told.measured(owed[0], 100.0 if owed[0] == COMFORTABLE else 99.0, busy_share=0.4)
        assert len(order) < 10
    assert len(order) == 4
    assert {*order[:2]} == {*order[2:]} == {COMFORTABLE, RIVAL}


def test_all_measurements_count_together() -> None:
    told = Told().measured(COMFORTABLE, 100.0).measured(RIVAL, 103.0)
    told.measured(COMFORTABLE, 100.0).measured(RIVAL, 95.0)
    assert told.winner() == COMFORTABLE
    speed = told.history.speed(RIVAL)
    assert speed.processes == 2
    assert speed.samples_per_second == pytest.approx((103 * 95) ** 0.5)


def test_a_host_bound_winner_is_measured_in_two_processes() -> None:
    told = Told().measured(COMFORTABLE, 100.0, busy_share=0.5)
    assert to_measure_again(told.history, ALL) == [COMFORTABLE]
    told.measured(COMFORTABLE, 90.0, busy_share=0.5)
    assert to_measure_again(told.history, ALL) == []


def test_a_winner_measured_in_part_is_owed_a_whole_measurement_once() -> None:
    told = Told().measured(COMFORTABLE, 100.0, run=1)
    assert to_measure_again(told.history, ALL) == [COMFORTABLE]
    told.history.add(Tried("fault", COMFORTABLE, Failed("error", "broken")))
    assert to_measure_again(told.history, ALL) == []


@pytest.mark.parametrize(("spread", "is_owed"), [(0.049, False), (0.051, True)])
def test_a_winner_less_certain_than_is_promised_is_measured_once_more(spread: float, is_owed: bool) -> None:
    told = Told().measured(COMFORTABLE, 100.0, spread=spread)
    assert to_measure_again(told.history, ALL) == ([COMFORTABLE] if is_owed else [])
    told.measured(COMFORTABLE, 98.0, spread=spread)
    assert to_measure_again(told.history, ALL) == []


def test_what_compiles_is_not_compiled_again_for_that() -> None:
    compiled = Candidate(Arm("bf16", torch_compile=True), 64, 1)
    assert to_measure_again(Told().measured(compiled, 100.0, spread=0.2).history, [compiled]) == []


def test_the_winner_is_measured_again_where_that_is_cheap_and_tells_something() -> None:
    told = Told().measured(COMFORTABLE, 100.0)

    def is_measured(told: Told, trial_seconds: float) -> bool:
        return bool(to_measure_again(told.history, [COMFORTABLE], share=trial_seconds / 100.0))

    # Until the machine has shown two deviations, a trial may take a tenth of the search.
    assert (is_measured(told, 9.0), is_measured(told, 11.0)) == (True, False)
    told.measured(COMFORTABLE, 100.0)
    assert is_measured(told, 9.0)
    told.measured(COMFORTABLE, 100.0)
    assert not is_measured(told, 1.0)
    # Earlier searches have measured twice what deviates alike: afterwards a twentieth, and one process.
    twice = Told().measured(RIVAL, 100.0).measured(RIVAL, 101.0).history.tried
    told = Told(History(ceiling_of(24 * GIB), before=deviations([twice] * 2))).measured(COMFORTABLE, 100.0)
    assert (is_measured(told, 4.0), is_measured(told, 6.0)) == (True, False)
    assert not is_measured(told.measured(COMFORTABLE, 100.0), 4.0)
    told = Told(History(ceiling_of(24 * GIB), before=deviations([twice] * 12))).measured(COMFORTABLE, 100.0)
    assert not is_measured(told, 1.0)


@pytest.mark.parametrize(("trial_seconds", "gpus", "count"), [(12.0, 1, 4), (60.0, 1, 2), (40.0, 1, 2), (40.0, 2, 4)])
def test_measuring_again_ends_where_it_takes_as_long_as_the_search(
    trial_seconds: float, gpus: int, count: int, tmp_path: Path
) -> None:
    """Two precisions are nearly as fast as each other, where the host decides."""
    runner = ComputedRunner(lambda c: GIB, slots=gpus)
    steps = {"bf16": 1.0, "tf32": 1.01}

    def noisy(job: TrialJob) -> tuple[Outcome, float]:
        one = job.candidate
        seconds = steps[one.arm.precision] if one.per_device_train_batch_size == 64 else 1.5
        found = measurement(one, seconds, GIB, GIB)
        is_again = [each.candidate for each in runner.jobs].count(one) > 1
        return Completed(dataclasses.replace(found, gpu_busy_share=0.4)), trial_seconds if is_again else 10.0

    runner.answer = noisy  # type: ignore[method-assign]
    with new_store(tmp_path) as store:
        options = {"precisions": ("bf16", "tf32"), "gradient_checkpointing": "off", "cpu_affinity": "off"}
        beside = tuple(dataclasses.replace(H200, uuid=f"GPU-{index}") for index in range(1, gpus))
        run = search(store, runner, effective_batch=64, beside=beside, **options)
    again = [trial.seconds or 0.0 for trial in run.trials if trial.stage == "final"]
    assert len(again) == count


def test_nothing_is_owed_where_nothing_is_known() -> None:
    assert to_measure_again(History(ceiling_of(24 * GIB)), ALL) == []


class TestTimeLimit:
    """The limit of a trial whose speed is not known yet."""

    @staticmethod
    def seconds(parameters: int, seq_len: int, limit: float | None = None, told: Told | None = None) -> float:
        asked = request(workload=dataclasses.replace(BERT_LARGE, seq_len=seq_len), trial_timeout_seconds=limit)
        history = (told or Told()).history
        return timeout_seconds(asked, parameters, Candidate(Arm("bf16"), 1, 64), asked.effort, history)

    def test_a_small_model_gets_the_usual_time(self) -> None:
        assert 180 < self.seconds(4_000_000, 128) < 185

    def test_code_that_compiles_gets_the_time_for_that(self) -> None:
        source = TrainingSource("script", "/x/train.py", "0", "/x", interface=CodeInterface(compiles=True))
        asked = request(workload=dataclasses.replace(BERT_LARGE, source=source))
        limit = timeout_seconds(asked, 4_000_000, Candidate(Arm("bf16"), 1, 64), asked.effort, Told().history)
        assert limit > 180 + 180

    def test_a_large_model_with_a_long_context_gets_more(self) -> None:
        assert self.seconds(7_000_000_000, 512) > 180 + 140
        # Five steps of three micro-steps, of 20 s each on a fast GPU.
        assert self.seconds(7_000_000_000, 32_768) > 180 + 5 * 3 * 20

    def test_one_that_hangs_is_given_up_after_an_hour(self) -> None:
        assert self.seconds(70_000_000_000, 131_072) == 3600

    @pytest.mark.parametrize("arm", [Arm("bf16"), Arm("bf16", torch_compile=True)])
    def test_what_was_asked_for_stays(self, arm: Arm) -> None:
        """Also of a candidate that compiles, or a compiler that hangs would have minutes more."""
        asked, history = request(trial_timeout_seconds=60.0), Told().history
        assert timeout_seconds(asked, 7_000_000_000, Candidate(arm, 1, 64), asked.effort, history) == 60

    def test_measured_steps_always_have_their_time(self) -> None:
        slow = Told().measured(Candidate(Arm("bf16"), 1, 64), 0.1)
        assert self.seconds(4_000_000, 128, limit=60.0, told=slow) > 60 + 4 * 4 * 30


def test_a_timeout_counts_as_one_failure() -> None:
    history, arm = Told().history, Arm("bf16")
    for failures, batch in enumerate((64, 32, 16), start=1):
        history.add(Tried(str(batch), Candidate(arm, batch, 64 // batch), Failed("timeout", "too slow")))
        waits = Chances(history).runs(Candidate(arm, batch // 2, 128 // batch)) < LEAST_CHANCE
        assert waits == (failures == 3), "a batch waits after three failures at larger ones"


@pytest.mark.parametrize(("is_own", "steps"), [(False, 0), (True, 1)], ids=["the defaults", "a script's own settings"])
def test_a_baseline_is_asked_for_the_gpus_share_where_a_search_begins_with_it(is_own: bool, steps: int) -> None:
    source = TrainingSource("script", "/x/train.py", "0", "/x", interface=CodeInterface()) if is_own else None
    asked = dataclasses.replace(request(), workload=dataclasses.replace(BERT_LARGE, source=source), device=H200)
    history = History(ceiling_of(24 * GIB))
    assert effort_of(asked, Candidate(Arm("bf16"), 8, 8), "baseline", None, history).busy_steps == steps
