"""Test what a search concludes from its trials: what cannot fit, what is best, and how far its next run may be off."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from histories import CAP_BYTES, completed, history_of, ran_out, tried_with
from hypothesis import given
from hypothesis import strategies as st
from recorded import BATCHES, EFFECTIVE_64, RecordedRunner, fault, measurement, out_of_memory, run_candidate
from searching import ceiling_of

from autotune.core.candidate import PRECISIONS, Arm, Candidate
from autotune.core.outcome import Completed, OutOfMemory
from autotune.core.units import GIB, MIB
from autotune.estimate.history import History
from autotune.estimate.pooling import Pool, Speed, Tried, deviations
from autotune.space.arms import memory_class

BF16 = Arm("bf16")
FP16 = Arm("fp16")
TF32 = Arm("tf32")
FP32 = Arm("fp32")
CHECKPOINTED = Arm("bf16", gradient_checkpointing=True)


class TestLineAndCap:
    LINE_BYTES = ceiling_of(CAP_BYTES).line_bytes

    @pytest.mark.parametrize(("above", "feasible"), [(-1, True), (0, True), (1, False)])
    def test_a_trial_is_feasible_up_to_the_line_itself(self, above: int, feasible: bool) -> None:
        trial = completed(BF16, 32, peak_bytes=self.LINE_BYTES + above)
        history = history_of(trial)
        assert history.is_feasible(trial) is feasible
        assert history.is_over(trial) is not feasible
        assert bool(history.feasible()) is feasible
        assert (history.winner() is not None) is feasible

    def test_over_the_line_rules_out_as_out_of_memory_does(self) -> None:
        history = history_of(completed(BF16, 32, peak_bytes=CAP_BYTES))
        assert history.ruled_out_by(Candidate(BF16, 40, 1)) is history.tried[0]
        assert history.ruled_out_by(Candidate(BF16, 24, 1)) is None

    def test_a_fault_says_nothing_of_memory(self) -> None:
        trial = tried_with(Candidate(BF16, 32, 1), fault())
        history = history_of(trial)
        assert not history.is_over(trial)
        assert not history.is_feasible(trial)
        assert history.ruled_out_by(Candidate(BF16, 64, 1)) is None

    def test_a_candidate_that_fits_rules_nothing_out(self) -> None:
        assert history_of(completed(BF16, 32)).ruled_out_by(Candidate(FP32, 4096, 2)) is None


class TestRuledOut:
    @pytest.mark.parametrize(
        ("failed", "candidate", "expected"),
        [
            # Larger batches of the same arm, itself among them.
            ((BF16, 32, 1), (BF16, 32, 1), True),
            ((BF16, 32, 1), (BF16, 64, 1), True),
            ((BF16, 32, 1), (BF16, 24, 1), False),
            # Accumulating keeps gradients alive: at the same batch it needs more, never less.
            ((BF16, 32, 1), (BF16, 32, 2), True),
            ((BF16, 32, 2), (BF16, 32, 4), True),
            # 8 × 8 can peak above 16 × 1.
            ((BF16, 8, 8), (BF16, 16, 1), False),
            ((BF16, 32, 2), (BF16, 64, 1), False),
            # Keeping activations needs at least what recomputing them does, not the other way round.
            ((CHECKPOINTED, 32, 1), (BF16, 32, 1), True),
            ((BF16, 32, 1), (CHECKPOINTED, 32, 1), False),
            ((BF16, 32, 1), (CHECKPOINTED, 4096, 1), False),
            # Two that need the same bytes.
            ((BF16, 32, 1), (FP16, 32, 1), True),
            ((FP16, 32, 1), (BF16, 32, 1), True),
            ((TF32, 32, 1), (FP32, 32, 1), True),
            ((Arm("fp16", gradient_checkpointing=True), 32, 1), (BF16, 32, 1), True),
            # With 16-bit autocast there are copies of the weights, so neither says anything of the other.
            ((BF16, 32, 1), (TF32, 32, 1), False),
            ((TF32, 32, 1), (BF16, 32, 1), False),
            ((BF16, 32, 1), (Arm("bf16", attn_implementation="eager"), 32, 1), False),
            ((BF16, 32, 1), (Arm("bf16", optim="adafactor"), 32, 1), False),
        ],
    )
    def test_by_an_out_of_memory(
        self, failed: tuple[Arm, int, int], candidate: tuple[Arm, int, int], expected: bool
    ) -> None:
        history = history_of(ran_out(*failed))
        asked = Candidate(*candidate)
        assert (history.ruled_out_by(asked) is not None) is expected
        smallest = history.smallest_over(asked.arm, accumulates=asked.accumulates)
        assert (smallest is not None and smallest <= asked.per_device_train_batch_size) is expected

    @pytest.mark.parametrize("path", [EFFECTIVE_64, BATCHES], ids=lambda path: path.stem)
    def test_no_recorded_cell_that_fits_is_ever_ruled_out(self, path: Path) -> None:
        runner = RecordedRunner(path)
        history = History(ceiling_of(runner.cap_bytes, headroom=0))
        for candidate, _ in runner.recorded:
            run_candidate(candidate, runner, history)
        assert any(isinstance(t.outcome, OutOfMemory) for t in history.tried)
        for trial in history.tried:
            by = history.ruled_out_by(trial.candidate)
            assert history.is_over(trial) or by is None, f"{trial.candidate.describe()} by {by}"

    def test_recorded_peaks_of_two_arms_of_one_memory_class_are_the_same(self) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        peaks: dict[tuple[Arm, int], list[int]] = {}
        for candidate, cell in runner.recorded:
            if cell["state"] == "ok":
                key = memory_class(candidate.arm), candidate.per_device_train_batch_size
                peaks.setdefault(key, []).append(cell["peak_reserved_mib"])
        assert len(peaks) == 13
        assert all(max(found) - min(found) <= 2 for found in peaks.values())


class TestBelieved:
    def test_a_measurement_in_full_goes_before_one_in_part(self) -> None:
        in_part = completed(BF16, 8, 8, speed=110, run=3)
        in_full = dataclasses.replace(completed(BF16, 8, 8, speed=100), trial_id="another process")
        for order in itertools.permutations((in_part, in_full)):
            history = history_of(*order)
            assert history.believed() == [in_full]
            speed = history.speed(in_full.candidate)
            assert (speed.processes, history.pool.processes(in_full.candidate)) == (1, 2)

    def test_else_the_latest_counts(self) -> None:
        first, second = completed(BF16, 32, speed=110), completed(BF16, 32, speed=100)
        assert history_of(first, second).believed() == [second]

    @pytest.mark.parametrize("again", [out_of_memory(), None])
    def test_what_ran_over_once_is_not_recommended(self, again: OutOfMemory | None) -> None:
        fits = completed(BF16, 8, 8, speed=200, run=3)
        over = tried_with(fits.candidate, again) if again else completed(BF16, 8, 8, speed=200, peak_bytes=CAP_BYTES)
        other = completed(BF16, 4, 16, speed=100)
        for order in itertools.permutations((fits, over, other)):
            history = history_of(*order)
            assert history.believed() == [other]
            assert history.winner() is other

    def test_a_fault_does_not_take_a_measurement_back(self) -> None:
        fits = completed(BF16, 8, 8, run=3)
        assert history_of(fits, tried_with(fits.candidate, fault())).winner() is fits


class TestWinner:
    def test_the_fastest_outside_the_tolerance(self) -> None:
        slow, fast = completed(BF16, 32, speed=100), completed(FP32, 32, speed=103, peak_bytes=2 * GIB)
        assert history_of(slow, fast).winner() is fast

    @pytest.mark.parametrize(
        ("preferred", "other"),
        [
            (completed(BF16, 32, speed=100), completed(FP16, 32, speed=101)),
            (completed(FP16, 32, speed=100), completed(TF32, 32, speed=101)),
            (completed(TF32, 32, speed=100), completed(FP32, 32, speed=101)),
            (completed(BF16, 32, speed=100, peak_bytes=3 * GIB), completed(CHECKPOINTED, 32, speed=101)),
            # In this order: precision, then checkpointing.
            (completed(CHECKPOINTED, 32, speed=100, peak_bytes=3 * GIB), completed(FP16, 32, speed=101)),
        ],
    )
    def test_within_the_tolerance_the_more_comfortable(self, preferred: Tried, other: Tried) -> None:
        assert history_of(preferred, other).winner() is preferred
        assert history_of(other, preferred).winner() is preferred

    @pytest.mark.parametrize(("speed", "error", "is_smaller"), [(100.4, 0.002, True), (100.4, 0.03, False)])
    def test_headroom_counts_where_it_is_expected_to_lose_no_more_than_the_tolerance(
        self, speed: float, error: float, is_smaller: bool
    ) -> None:
        smaller, larger = completed(BF16, 32, speed=100), completed(BF16, 64, speed=speed, peak_bytes=2 * GIB)
        steps = [1 - error, 1 + error, 1 - error, 1 + error]
        measured = [
            tried_with(
                t.candidate,
                Completed(dataclasses.replace(m, step_seconds_each=tuple(m.step_seconds * s for s in steps))),
            )
            for t in (smaller, larger)
            if (m := t.measurement)
        ]
        found = history_of(*measured).winner()
        assert found.candidate == (smaller if is_smaller else larger).candidate

    @pytest.mark.parametrize(("speed", "is_own"), [(103.0, True), (130.0, False)])
    def test_ones_own_settings_where_nothing_is_distinguishably_faster(self, speed: float, is_own: bool) -> None:
        own, fast = completed(FP32, 8, 8, speed=100, run=8), completed(BF16, 32, 2, speed=speed, run=2)
        history = history_of(own, fast)
        assert history.winner() is fast
        history.own = own.candidate
        assert history.winner() is (own if is_own else fast)
        assert history.winner([fast.candidate]) is fast

    def test_only_among_those_asked_for(self) -> None:
        fast, slow = completed(BF16, 32, speed=200), completed(FP32, 8, speed=100)
        history = history_of(fast, slow)
        assert history.winner([slow.candidate]) is slow
        assert history.fastest([slow.candidate]) is slow
        assert history.largest([slow.candidate]) is slow
        assert history.winner([]) is None

    def test_of_nothing_is_nothing(self) -> None:
        history = history_of(ran_out(BF16, 8), tried_with(Candidate(FP32, 8, 1), fault()))
        assert (history.winner(), history.fastest(), history.largest()) == (None, None, None)

    @given(st.lists(st.tuples(st.sampled_from(PRECISIONS), st.booleans(), st.floats(50, 300)), min_size=1, max_size=8))
    def test_is_never_slower_than_the_fastest_by_more_than_the_tolerance(
        self, cells: list[tuple[str, bool, float]]
    ) -> None:
        trials = [
            completed(Arm(precision, checkpointing), 64, speed=speed)  # type: ignore[arg-type]
            for precision, checkpointing, speed in cells
        ]
        history = history_of(*trials)
        winner, fastest = history.winner(), history.fastest()
        assert winner.measurement.samples_per_second >= fastest.measurement.samples_per_second * 0.99


class TestLargest:
    def test_the_largest_batch_and_of_several_the_fastest(self) -> None:
        small, slow = completed(BF16, 64, speed=300), completed(CHECKPOINTED, 128, speed=100)
        fast, over = completed(BF16, 128, speed=200), completed(BF16, 256, peak_bytes=CAP_BYTES)
        assert history_of(small, slow, fast, over, ran_out(BF16, 512)).largest() is fast


def test_outcomes_of_a_candidate_are_in_order() -> None:
    first, other, second = completed(BF16, 8), completed(BF16, 16), ran_out(BF16, 8)
    assert history_of(first, other, second).outcomes_of(Candidate(BF16, 8, 1)) == [first, second]


@pytest.mark.parametrize(("run", "in_full"), [(8, True), (3, False)])
def test_a_trial_that_added_micro_steps_up_was_not_in_full(run: int, in_full: bool) -> None:
    assert completed(BF16, 8, 8, run=run, peak_bytes=MIB).in_full is in_full
    assert ran_out(BF16, 8, 8).in_full


REPLAYED = Arm("bf16", torch_compile=True, torch_compile_mode="reduce-overhead")
GRAPHS = Arm("bf16", cuda_graphs=True)


def process(speed: float, arm: Arm = BF16, busy: float | None = 0.97, steps: Sequence[float] = ()) -> Tried:
    """A trial at so many samples a second; ``steps`` are the times of its steps, relative to their mean."""
    candidate = Candidate(arm, 32)
    found = measurement(candidate, 32 / speed, GIB, GIB)
    each = tuple(32 / speed * step for step in steps) or found.step_seconds_each
    found = dataclasses.replace(found, gpu_busy_share=busy, step_seconds_each=each)
    return Tried(f"{speed} {arm}", candidate, Completed(found))


def pooled(*trials: Tried) -> Speed:
    return Pool(trials).speed(trials[0].candidate)


def test_a_winner_that_replays_cuda_graphs_is_promised_by_what_was_measured_of_it() -> None:
    """bert-base on an H200: two processes that agree to 4 %. Launched kernel by kernel, it might deviate by 18 %."""
    noisy, steady = (0.95, 1.05) * 3, (0.99, 1.01) * 3
    replayed = [process(2132, REPLAYED, 0.58, noisy), process(2225, REPLAYED, 0.58, steady)]
    launched = [process(2132, BF16, 0.58, noisy), process(2225, BF16, 0.58, steady)]
    assert 0.05 < pooled(*replayed).next_process.half_width() < 0.1
    assert pooled(*launched).next_process.half_width() > 0.15


@pytest.mark.parametrize("arm", [REPLAYED, GRAPHS])
def test_how_launched_steps_deviate_says_nothing_of_replayed_ones(arm: Arm) -> None:
    launched = [process(1000, BF16, 0.5), process(700, BF16, 0.5)]
    replayed = [process(2000, arm, 0.5), process(2040, arm, 0.5)]
    assert {kind.graphs: found.degrees for kind, found in deviations([launched, replayed]).items()} == {
        False: 1,
        True: 1,
    }
    pool = Pool([*launched, *replayed])
    assert pool.speed(replayed[0].candidate) == pooled(*replayed)


def test_the_third_process_of_a_new_machine_has_the_prior_yield() -> None:
    """Two deviations of 5 %: of Student's t with two degrees of freedom, 4.3 standard errors and no less."""
    speeds = (1000.0, 1050.0, 950.0)
    assert pooled(process(1000)).next_process.half_width() == pytest.approx(0.03, abs=0.007)
    assert pooled(*map(process, speeds)).next_process.half_width() > 4.0 * 0.05


@pytest.mark.parametrize(("busy", "later"), [(0.97, 0.069), (None, 0.069), (0.5, 0.098)])
def test_a_later_run_may_be_faster_or_slower_than_all_processes_of_a_search(busy: float | None, later: float) -> None:
    found = pooled(process(1000, busy=busy))
    assert found.relative_half_width == pytest.approx(math.hypot(found.next_process.half_width(), later), rel=0.01)


def test_steps_that_explain_how_processes_differ_leave_less_between_them() -> None:
    noisy, steady = (0.97, 1.03) * 4, (0.999, 1.001) * 4
    found = [deviations([[process(speed, steps=steps) for speed in (1000.0, 1020.0)]]) for steps in (noisy, steady)]
    explained, unexplained = (next(iter(each.values())).sum_of_squares for each in found)
    assert unexplained == pytest.approx(0.0198**2 / 2, rel=0.02)
    assert explained == pytest.approx(unexplained / 2, rel=0.02)


def test_a_process_that_timed_few_steps_of_other_lengths_says_little_of_how_processes_differ() -> None:
    """Llama-3.2-1B on an H200: after three steps 45.9 samples/s, known to 15 %; a second process had 57.8."""

    def of(speed: float, steady_error: float) -> Tried:
        tried = process(speed, steps=(0.9, 1.0, 1.1))
        found = dataclasses.replace(tried.measurement, batches_vary=True, steady_error=steady_error)
        return dataclasses.replace(tried, outcome=Completed(found))

    unknown, known = (
        next(iter(deviations([[of(45.9, error), of(57.8, 0.004)]]).values())).sum_of_squares for error in (0.15, 0.004)
    )
    assert unknown < 0.6 * known
