"""Test what is tried next, in recorded and computed worlds: the answer and its cost, the model of speed, and the search
for the largest batch under the line, which the next one confirms."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import pytest
from histories import measured_at
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded import (
    BATCHES,
    EFFECTIVE_64,
    ComputedRunner,
    RecordedRunner,
    count_out_of_memory,
    fault,
    measurement,
    out_of_memory,
    run_candidate,
    run_policy,
)
from searching import CONTEXT_BYTES, arms, ceiling_of

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.outcome import Completed
from autotune.core.units import GIB, MIB
from autotune.estimate.chance import Chances
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried
from autotune.estimate.speed_model import SpeedModel
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.tuning.left_out import names_of_arms
from autotune.tuning.policy import Acquisition, MaxBatchPolicy, Policy

CAP_BYTES = 24 * GIB - CONTEXT_BYTES
ALL_ARMS = arms()


def with_baseline(space: Space, runner: RecordedRunner | ComputedRunner, cap_bytes: int = CAP_BYTES) -> History:
    """A history that begins as a search's does."""
    history = History(ceiling_of(cap_bytes))
    run_candidate(Candidate(Arm(), *space.batches.baseline()), runner, history)
    return history


def describe_winner(history: History) -> str:
    found = history.winner()
    return found.candidate.describe()


# BERT-large on an H200, as fitted to the recorded landscapes: MiB a sample, samples a second.
_MIB_A_SAMPLE = {"bf16": 514, "fp16": 514, "tf32": 809, "fp32": 809}
_CHECKPOINTED_MIB_A_SAMPLE = {"bf16": 78, "fp16": 78, "tf32": 91, "fp32": 91}
_SAMPLES_PER_SECOND = {"bf16": 310, "fp16": 305, "tf32": 124, "fp32": 43}


def bert_bytes(candidate: Candidate) -> float:
    """Peak bytes: a floor or a line, and gradients that outlive a micro-step."""
    arm = candidate.arm
    slope = (_CHECKPOINTED_MIB_A_SAMPLE if arm.gradient_checkpointing else _MIB_A_SAMPLE)[arm.precision]
    gradients = 1280 if candidate.accumulates else 0
    return (max(5200, 4200 + slope * candidate.per_device_train_batch_size) + gradients) * MIB


def bert_seconds(candidate: Candidate) -> float:
    """Seconds a step: a line above what launching the kernels takes."""
    arm = candidate.arm
    speed = _SAMPLES_PER_SECOND[arm.precision] * (0.82 if arm.gradient_checkpointing else 1.0)
    return candidate.gradient_accumulation_steps * max(0.05, 0.004 + candidate.per_device_train_batch_size / speed)


def bert_busy(candidate: Candidate) -> float:
    """The GPU's share of a step: all but what launching the kernels adds."""
    floor = bert_seconds(candidate) / candidate.gradient_accumulation_steps
    speed = _SAMPLES_PER_SECOND[candidate.arm.precision] * (0.82 if candidate.arm.gradient_checkpointing else 1.0)
    return candidate.per_device_train_batch_size / speed / floor


def slow_and_large(bytes_a_sample: float) -> ComputedRunner:
    """A model of which each sample takes so many bytes, whatever the arm."""
    return ComputedRunner(
        lambda candidate: GIB + bytes_a_sample * candidate.per_device_train_batch_size, bert_seconds, bert_busy
    )


class TestThroughputOnRecords:
    @pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
    def test_each_precision_alone_finds_its_best(self, precision: Precision) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        space = Space(arms(precision), Batches(64))
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        everything = run_policy(Policy(space), RecordedRunner(EFFECTIVE_64), History(ceiling_of(CAP_BYTES)))
        assert describe_winner(history) == describe_winner(everything)
        assert len(history.tried) <= 6

    @pytest.mark.parametrize("gib", [8, 10, 12, 15.5, 18, 20, 23])
    def test_a_lower_limit_finds_what_the_whole_grid_finds(self, gib: float) -> None:
        cap_bytes = int(gib * GIB)
        runner = RecordedRunner(EFFECTIVE_64)
        space = Space(ALL_ARMS, Batches(64))
        history = run_policy(Acquisition(space), runner, with_baseline(space, runner, cap_bytes))
        grid = run_policy(Policy(space), RecordedRunner(EFFECTIVE_64), History(ceiling_of(cap_bytes)))
        best, of_all = history.winner(), grid.fastest()
        assert best.measurement.samples_per_second >= 0.97 * of_all.measurement.samples_per_second
        assert len(history.tried) <= 18
        assert runner.seconds < 75

    def test_a_free_batch(self) -> None:
        runner = RecordedRunner(BATCHES, between=True)
        space = Space(arms("bf16", "tf32"), Batches(None))
        history = run_policy(Acquisition(space), runner, with_baseline(space, runner))
        assert describe_winner(history) == "32 × 1  bf16"
        assert len(history.tried) <= 11
        assert count_out_of_memory(history) <= 4
        assert runner.seconds < 28

    @pytest.mark.parametrize(("samples", "largest"), [(1, 1), (5, 4), (30, 16), (64, 64), (100, 64)])
    def test_a_free_batch_grows_no_larger_than_the_data(self, samples: int, largest: int) -> None:
        runner = ComputedRunner(lambda _: GIB, lambda candidate: 0.5 + 1e-6 * candidate.per_device_train_batch_size)
        space = Space(arms("bf16", checkpointing="off"), Batches(None, samples=samples))
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        assert max(tried.candidate.per_device_train_batch_size for tried in history.tried) == largest

    def test_nor_towards_a_batch_beyond_the_data_that_did_not_fit(self) -> None:
        runner = slow_and_large(50 * MIB)
        space = Space(arms("bf16", checkpointing="off"), Batches(None, samples=100))
        history = History(ceiling_of(CAP_BYTES))
        run_candidate(space.candidate(space.arms[0], 512), runner, history)
        run_policy(Acquisition(space), runner, history)
        assert count_out_of_memory(history) == 1
        tried = [t.candidate.per_device_train_batch_size for t in history.tried[1:]]
        assert 64 in tried
        assert max(tried) <= 100

    def test_a_free_batch_with_checkpointing_grows_until_it_no_longer_pays(self) -> None:
        runner = RecordedRunner(BATCHES, between=True)
        space = Space(arms("bf16", checkpointing="on"), Batches(None))
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        best = history.fastest()
        # The most that was recorded, at 240 × 1.
        assert best.measurement.samples_per_second >= 0.97 * 266.25
        assert len(history.tried) <= 7


class TestThroughputOnFormulas:
    @pytest.mark.parametrize(
        ("effective_batch", "expected", "most_trials", "most_ooms"),
        [
            (8, "8 × 1  bf16", 5, 0),
            (64, "32 × 2  bf16", 12, 3),
            (256, "32 × 8  bf16", 16, 4),
            (1024, "32 × 32  bf16", 17, 6),
            (4096, "32 × 128  bf16", 18, 7),
        ],
    )
    def test_the_cost_does_not_explode_with_the_effective_batch(
        self, effective_batch: int, expected: str, most_trials: int, most_ooms: int
    ) -> None:
        runner = ComputedRunner(bert_bytes, bert_seconds, bert_busy)
        space = Space(ALL_ARMS, Batches(effective_batch))
        history = run_policy(Acquisition(space), runner, with_baseline(space, runner))
        assert describe_winner(history) == expected
        assert len(history.tried) <= most_trials
        assert count_out_of_memory(history) <= most_ooms

    @given(st.integers(1, 600), st.integers(20, 3000), st.integers(0, 4000), st.integers(6000, 40000))
    @settings(max_examples=60)
    def test_any_card_and_model_ends_with_the_best_of_an_arm_or_near_it(
        self, effective_batch: int, mib_a_sample: int, gradients_mib: int, cap_mib: int
    ) -> None:
        def peak_bytes(candidate: Candidate) -> float:
            gradients = gradients_mib if candidate.accumulates else 0
            return (4000 + mib_a_sample * candidate.per_device_train_batch_size + gradients) * MIB

        runner = ComputedRunner(peak_bytes, bert_seconds, bert_busy)
        space = Space(arms("bf16", checkpointing="off"), Batches(effective_batch))
        history = run_policy(Acquisition(space), runner, with_baseline(space, runner, cap_mib * MIB))
        grid = run_policy(Policy(space), runner, with_baseline(space, runner, cap_mib * MIB))
        among = [t.candidate for t in grid.tried if space.contains(t.candidate)]
        found, best = history.fastest(among), grid.fastest(among)
        assert (found is None) is (best is None)
        assert len(history.tried) <= 16
        if found is not None and best is not None:
            # Where a lower multiple fits only, its batches are the ones that count for both.
            assert found.measurement.samples_per_second >= 0.9 * best.measurement.samples_per_second

    def test_what_only_fits_without_accumulation_is_found(self) -> None:
        """Gradients of 8 GiB, samples of 100 MiB: 64 × 1 fits where 32 × 2 does not."""

        def peak_bytes(candidate: Candidate) -> float:
            return (13 if candidate.accumulates else 5) * GIB + 100 * MIB * candidate.per_device_train_batch_size

        space = Space(arms("bf16", checkpointing="on"), Batches(64))
        history = run_policy(
            Acquisition(space), ComputedRunner(peak_bytes, bert_seconds, bert_busy), History(ceiling_of(16 * GIB))
        )
        assert all(t.candidate.per_device_train_batch_size == 32 for t in history.tried if history.is_over(t))
        assert describe_winner(history) == "64 × 1  bf16, checkpointing"

    def test_a_checkpointed_arm_is_not_asked_where_its_twin_has_measured_as_much(self) -> None:
        runner = slow_and_large(MIB)
        space = Space(arms("bf16"), Batches(64))
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        assert not any(t.candidate.arm.gradient_checkpointing for t in history.tried)

    def test_fp32_is_not_asked_where_tf32_fits(self) -> None:
        runner = ComputedRunner(bert_bytes, bert_seconds, bert_busy)
        space = Space(arms("tf32", "fp32", checkpointing="off"), Batches(64))
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        assert {t.candidate.arm.precision for t in history.tried} == {"tf32"}

    def test_a_baseline_that_is_not_searched_is_no_yardstick(self) -> None:
        """Where everything recomputes, the defaults are faster; that is no reason not to grow the batch."""
        runner = ComputedRunner(lambda _: GIB, bert_seconds)
        space = Space(arms("fp32", checkpointing="on"), Batches(1024))
        baseline = Candidate(Arm(), *space.batches.baseline())
        runner.faults[baseline] = [Completed(measurement(baseline, 0.5 * bert_seconds(baseline), GIB, GIB))]
        alone = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        beside = run_policy(Acquisition(space), runner, with_baseline(space, runner))
        answers = [h.fastest(t.candidate for t in h.tried if space.contains(t.candidate)) for h in (alone, beside)]
        assert [answer.candidate.per_device_train_batch_size for answer in answers] == [1024, 1024]

    def test_an_arm_that_fails_at_its_largest_batches_is_asked_for_its_smaller_ones(self) -> None:
        runner = ComputedRunner(bert_bytes, bert_seconds, bert_busy)
        space = Space(arms("bf16", "tf32", checkpointing="off"), Batches(256))
        runner.faults = {space.candidate(Arm("bf16"), batch): [fault()] * 2 for batch in (32, 64, 128, 256)}
        history = run_policy(Acquisition(space), runner, History(ceiling_of(CAP_BYTES)))
        assert describe_winner(history) == "16 × 16  bf16"


class TestLevels:
    @pytest.mark.parametrize(
        ("mib_a_sample", "batch", "levels"),
        [(1024, 16, {8}), (2048, 8, {8}), (2600, 4, {8, 4}), (5000, 2, {8, 4, 2}), (10000, 1, {8, 4, 2, 1})],
    )
    def test_a_lower_multiple_only_when_nothing_above_fits(
        self, mib_a_sample: int, batch: int, levels: set[int]
    ) -> None:
        runner = slow_and_large(mib_a_sample * MIB)
        space = Space(arms("bf16"), Batches(16))
        for policy in (Acquisition(space), Policy(space)):
            history = run_policy(policy, runner, History(ceiling_of(20 * GIB)))
            best = history.winner()
            assert best.candidate.per_device_train_batch_size == batch
            tried = {space.batches.level(t.candidate.per_device_train_batch_size) for t in history.tried}
            assert tried == levels

    @pytest.mark.parametrize("effective_batch", [1, 2, 3, 4, 6, 12, 20, 36, 63])
    def test_where_no_multiple_of_8_divides_every_arm_is_asked_at_the_next(self, effective_batch: int) -> None:
        runner = ComputedRunner(bert_bytes, bert_seconds, bert_busy)
        space = Space(arms("bf16", "fp32", checkpointing="off"), Batches(effective_batch))
        level = next(multiple for multiple in (8, 4, 2, 1) if space.batches.at_level(multiple))
        for policy in (Acquisition(space), Policy(space)):
            history = run_policy(policy, runner, with_baseline(space, runner))
            asked = [t.candidate for t in history.tried[1:]]
            assert {candidate.arm.precision for candidate in asked} >= {"bf16"}
            assert {space.batches.level(candidate.per_device_train_batch_size) for candidate in asked} == {level}
            assert "bf16" in describe_winner(history)

    def test_a_baseline_outside_the_space_does_not_stop_the_descent(self) -> None:
        def peak_bytes(candidate: Candidate) -> float:
            return GIB * candidate.per_device_train_batch_size * (1 if candidate.arm.precision == "fp32" else 3)

        runner = ComputedRunner(peak_bytes)
        space = Space(arms("bf16", checkpointing="off"), Batches(64))
        for policy in (Acquisition(space), Policy(space)):
            history = run_policy(policy, runner, with_baseline(space, runner, 20 * GIB))
            assert [c.per_device_train_batch_size for c in (t.candidate for t in history.believed())] == [8, 4]

    def test_a_strict_multiple_is_never_left(self) -> None:
        runner = slow_and_large(5000 * MIB)
        for batches in (Batches(64, multiple=8), Batches(None, multiple=8)):
            space = Space(arms("bf16"), batches)
            for policy in (Acquisition(space), MaxBatchPolicy(space), Policy(space)):
                history = run_policy(policy, runner, History(ceiling_of(20 * GIB)))
                assert history.tried
                assert history.winner() is None
                assert all(t.candidate.per_device_train_batch_size % 8 == 0 for t in history.tried)

    def test_a_lower_level_is_premature_until_all_above_is_known_not_to_fit(self) -> None:
        space = Space(arms("bf16", checkpointing="off"), Batches(16))
        history = History(ceiling_of(20 * GIB))
        one, two, four, eight = (space.candidate(Arm("bf16"), batch) for batch in (1, 2, 4, 8))
        runner = slow_and_large(5000 * MIB)
        judge = Judge(space, history)
        assert not judge.is_in_turn(four)
        assert judge.is_in_turn(eight)
        run_candidate(space.candidate(Arm("bf16"), 16), runner, history)
        assert not judge.is_in_turn(four)
        runner.faults[eight] = [fault()]
        run_candidate(eight, runner, history)
        assert judge.is_in_turn(four)
        for failed, last in ((two, one), (one, None)):
            history.add(Tried("", failed, fault()))
            assert Judge(space, history).last_resort() == last, "a batch below all that failed"


class TestExhaustive:
    def test_every_recorded_cell_but_those_known_not_to_fit(self) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        space = Space(ALL_ARMS, Batches(64))
        history = run_policy(Policy(space), runner, with_baseline(space, runner))
        fitting = {candidate for candidate, cell in runner.recorded if cell["state"] == "ok"}
        assert {t.candidate for t in history.tried if t.measurement} == fitting
        assert len(fitting) == 26
        assert count_out_of_memory(history) <= 4
        assert describe_winner(history) == "32 × 2  bf16"

    def test_a_free_batch_ends_at_the_largest(self) -> None:
        space = Space(arms("bf16", checkpointing="off"), Batches(None))
        history = run_policy(Policy(space), slow_and_large(1.0), History(ceiling_of(CAP_BYTES)))
        assert max(t.candidate.per_device_train_batch_size for t in history.tried) == LARGEST_FREE_BATCH
        assert len(history.tried) == 14


PLAIN = Arm("bf16")
GRAPHED = replace(PLAIN, cuda_graphs=True)
COMPILED = replace(PLAIN, torch_compile=True, regional_compilation=True)


def history_of(busy_share: float) -> History:
    """A batch of 16 at 160 samples a second, of which the GPU computes for a share."""
    candidate, history = Candidate(PLAIN, 16), History(ceiling_of(24 * GIB))
    history.add(measured_at(candidate, 0.1, 4 * GIB, gpu_busy_share=busy_share))
    return history


def test_a_larger_batch_promises_what_the_gpu_does_not_compute_yet() -> None:
    waits, computes = (
        float(SpeedModel(history_of(share)).expected([Candidate(PLAIN, 32)], 160.0)[0][0]) for share in (0.5, 0.95)
    )
    assert waits == pytest.approx(math.log(2), abs=0.1)
    assert computes < 0.1


def test_two_levers_that_pay_only_together_promise_it_together() -> None:
    """Graphs leave what the GPU computes, compiling what the host launches: each alone stops at the other."""
    both = replace(COMPILED, cuda_graphs=True)
    among = [Candidate(arm, 16) for arm in (GRAPHED, COMPILED, both)]
    graphed, compiled, together = SpeedModel(history_of(0.88)).expected(among, 160.0)[0]
    assert together > 1.3 * max(graphed, compiled)


def test_a_lever_that_failed_alone_is_not_tried_again_and_one_of_two_may_be() -> None:
    both, history = replace(COMPILED, cuda_graphs=True), history_of(0.5)
    history.add(Tried("b", Candidate(both, 16), fault("no capture")))
    assert 0.2 < Chances(history).runs(Candidate(GRAPHED, 16)) < 0.7
    history.add(Tried("c", Candidate(GRAPHED, 16), fault("no capture")))
    assert Chances(history).runs(Candidate(GRAPHED, 16)) < 0.01
    assert Chances(history).runs(Candidate(PLAIN, 16)) > 0.9


def test_what_is_never_faster_and_beside_a_trial_that_promises_as_much_is_not_tried() -> None:
    """fp32 where tf32 was measured; and while bf16 is under way, what is not expected to beat it."""
    space = Space((Arm("tf32"), Arm("fp32")), Batches(16))
    history, measured = History(ceiling_of(24 * GIB)), Candidate(Arm("tf32"), 16)
    history.add(measured_at(measured, 1.0))
    proposed = Acquisition(space).next(history)
    assert proposed is None or proposed.arm.precision == "tf32"
    space = Space((Arm("bf16"), Arm("fp16"), Arm("tf32")), Batches(16))
    first = Acquisition(space).next(history)
    assert first == Candidate(Arm("bf16"), 16)
    history.pending.append(first)
    beside = Acquisition(space).next(history)
    assert beside is None or beside.arm.precision == "bf16"


def test_other_machines_of_the_kind_decide_what_is_first() -> None:
    space, history = Space((Arm("bf16"), Arm("tf32")), Batches(64)), History(ceiling_of(24 * GIB))
    history.elsewhere[Candidate(Arm("tf32"), 16, 4)] = 100.0
    assert Acquisition(space).next(history) == Candidate(Arm("tf32"), 16, 4)


def test_a_free_batch_grows_by_doubling_and_halves_the_last_step() -> None:
    space, history = Space((Arm("bf16"),), Batches(None)), History(ceiling_of(24 * GIB))
    acquisition = Acquisition(space)
    while (candidate := acquisition.next(history)) is not None and len(history.tried) < 20:
        batch = candidate.per_device_train_batch_size
        found = measurement(candidate, 0.01 + 0.001 * batch, batch * GIB // 8, batch * GIB // 8)
        outcome = Completed(found) if batch <= 180 else out_of_memory(24 * GIB)
        history.add(Tried(str(batch), candidate, outcome))
    tried = [t.candidate.per_device_train_batch_size for t in history.tried]
    assert len(tried) <= 8
    assert max(t.candidate.per_device_train_batch_size for t in history.believed()) >= 128
    assert all(batch & (batch - 1) == 0 for batch in tried[:2])


@pytest.mark.parametrize(("slower", "best"), [(1.3, "64 × 1  fp32"), (3.0, "64 × 1  fp32"), (0.9, "64 × 1  bf16")])
def test_where_nobody_knows_the_gpus_share_a_precision_may_be_slow(slower: float, best: str) -> None:
    """As on a CPU: bf16 so many times slower than fp32, after the baseline in fp32 at 8 and bf16 at 64."""

    def seconds(candidate: Candidate) -> float:
        micro = 0.05 + 0.01 * candidate.per_device_train_batch_size
        return candidate.gradient_accumulation_steps * micro * (slower if candidate.arm.precision == "bf16" else 1)

    space = Space((PLAIN, Arm("fp32")), Batches(64))
    runner = ComputedRunner(lambda _: GIB, seconds)
    history = History(ceiling_of(24 * GIB))
    run_candidate(Candidate(Arm("fp32"), 8, 8), runner, history)
    run_policy(Acquisition(space), runner, history)
    winner = history.winner()
    assert winner.candidate.describe() == best
    assert len(history.tried) <= 4


def largest_batch_found(history: History) -> int | None:
    """The largest batch that was found."""
    largest = history.largest()
    return largest.candidate.per_device_train_batch_size if largest else None


def is_proven(history: History, batch: int, multiple: int = 8) -> bool:
    """Whether a trial shows that the next multiple does not fit."""
    return any(
        history.is_over(tried) and tried.candidate.per_device_train_batch_size == batch + multiple
        for tried in history.tried
    )


def search(space: Space, runner: RecordedRunner | ComputedRunner, headroom: float = 0.03) -> History:
    return run_policy(MaxBatchPolicy(space), runner, History(ceiling_of(CAP_BYTES, headroom)))


def with_peaks(of_batch: Callable[[int], float]) -> ComputedRunner:
    """Trials that differ in their batch alone."""
    return ComputedRunner(lambda candidate: of_batch(candidate.per_device_train_batch_size))


ONE_ARM = Space(arms("bf16", checkpointing="on"), Batches(None))


class TestOnRecords:
    @pytest.mark.parametrize(
        ("headroom", "expected", "most_trials", "most_ooms"), [(0.03, {216}, 5, 1), (0, {240, 248}, 8, 2)]
    )
    def test_sdpa_bf16_checkpointed(
        self, headroom: float, expected: set[int], most_trials: int, most_ooms: int
    ) -> None:
        runner = RecordedRunner(BATCHES, between=True)
        history = search(ONE_ARM, runner, headroom)
        found = largest_batch_found(history)
        assert found in expected
        assert is_proven(history, found)
        assert len(history.tried) <= most_trials
        assert count_out_of_memory(history) <= most_ooms

    def test_all_arms_ask_the_others_only_whether_they_beat_the_best(self) -> None:
        runner = RecordedRunner(BATCHES, between=True)
        history = search(Space(arms(), Batches(None)), runner)
        assert largest_batch_found(history) == 216
        assert len(history.tried) <= 6
        asked = {t.candidate.arm for t in history.tried}
        assert asked == {Arm("bf16", gradient_checkpointing=True), Arm("tf32", gradient_checkpointing=True)}


class TestOnFormulas:
    @given(
        base_mib=st.integers(100, 20000), mib_a_sample=st.floats(0.5, 4000), multiple=st.sampled_from([1, 3, 8, 24, 64])
    )
    @settings(max_examples=150)
    def test_an_affine_peak_is_met_exactly(self, base_mib: int, mib_a_sample: float, multiple: int) -> None:
        runner = with_peaks(lambda batch: (base_mib + mib_a_sample * batch) * MIB)
        history = search(Space(arms("bf16", checkpointing="on"), Batches(None, multiple=multiple)), runner)
        line = ceiling_of(CAP_BYTES).line_bytes
        batches = range(multiple, 50000, multiple)
        fitting = batches[: bisect_right(batches, line, key=lambda b: int((base_mib + mib_a_sample * b) * MIB))]
        assert largest_batch_found(history) == (fitting[-1] if fitting else None)
        assert len(history.tried) <= 11
        if fitting:
            assert is_proven(history, fitting[-1], multiple)

    @given(
        floor_mib=st.integers(1000, 23000),
        base_mib=st.integers(-20000, 10000),
        mib_a_sample=st.floats(2, 500),
        tooth_mib=st.integers(0, 300),
    )
    @example(floor_mib=5200, base_mib=-200000, mib_a_sample=223, tooth_mib=0)
    @example(floor_mib=22943, base_mib=0, mib_a_sample=2.0, tooth_mib=0)
    @settings(max_examples=150)
    def test_a_floor_and_a_saw_tooth_are_met_exactly_where_peaks_grow(
        self, floor_mib: int, base_mib: int, mib_a_sample: float, tooth_mib: int
    ) -> None:
        """The optimizer's floor at small batches; what a caching allocator adds, in steps."""

        def peak_mib(batch: int) -> float:
            grown = base_mib + mib_a_sample * batch
            step = tooth_mib * math.ceil(batch / 56)
            return max(floor_mib, grown + step)

        runner = with_peaks(lambda batch: peak_mib(batch) * MIB)
        history = search(ONE_ARM, runner)
        line = ceiling_of(CAP_BYTES).line_bytes
        batches = range(8, LARGEST_FREE_BATCH, 8)
        fitting = batches[: bisect_right(batches, line, key=lambda b: int(peak_mib(b) * MIB))]
        found = largest_batch_found(history)
        if fitting:
            assert found == fitting[-1]
            assert is_proven(history, fitting[-1])
        else:
            assert found is None or found < 8
        # Thousands of batches lie on the flattest of these floors; halving alone would take 13 after climbing.
        assert len(history.tried) <= 32

    @given(st.lists(st.integers(0, 1500), min_size=100, max_size=100), st.integers(60, 800))
    @settings(max_examples=60)
    def test_an_unsteady_peak_still_ends_with_a_proof(self, noise_mib: list[int], mib_a_sample: int) -> None:
        runner = with_peaks(lambda batch: (4000 + mib_a_sample * batch + noise_mib[batch // 8 % 100]) * MIB)
        history = search(ONE_ARM, runner)
        found = largest_batch_found(history)
        assert is_proven(history, found)
        assert len(history.tried) <= 16

    @pytest.mark.parametrize("multiple", [None, 1, 3, 1000, LARGEST_FREE_BATCH])
    def test_where_everything_fits_it_ends_at_the_largest_batch_there_is(self, multiple: int | None) -> None:
        space = Space(arms("bf16"), Batches(None, multiple=multiple))
        history = search(space, with_peaks(lambda batch: GIB + batch))
        assert largest_batch_found(history) == LARGEST_FREE_BATCH // (multiple or 8) * (multiple or 8)
        assert len(history.tried) <= 12

    @pytest.mark.parametrize(("samples", "expected"), [(1, 1), (5, 4), (8, 8), (30, 24), (1000, 1000)])
    def test_where_the_data_ends_first_it_ends_there(self, samples: int, expected: int) -> None:
        history = search(Space(arms("bf16"), Batches(None, samples=samples)), with_peaks(lambda batch: GIB + batch))
        assert largest_batch_found(history) == expected
        assert max(tried.candidate.per_device_train_batch_size for tried in history.tried) <= samples

    @pytest.mark.parametrize(("mib_a_sample", "expected"), [(3000, 4), (6000, 2), (12000, 1), (30000, None)])
    def test_below_8_it_goes_down_through_4_2_and_1(self, mib_a_sample: int, expected: int | None) -> None:
        history = search(ONE_ARM, with_peaks(lambda batch: GIB + mib_a_sample * MIB * batch))
        assert largest_batch_found(history) == expected
        tried = {t.candidate.per_device_train_batch_size for t in history.tried}
        assert tried == {48, 8, *(b for b in (4, 2, 1) if b >= (expected or 1))}

    def test_an_arm_that_is_broken_is_replaced_by_one_of_its_memory_class(self) -> None:
        runner = with_peaks(lambda batch: (4000 + 100 * batch) * MIB)
        bf16, fp16 = (Arm(p, gradient_checkpointing=True) for p in ("bf16", "fp16"))  # type: ignore[arg-type]
        space = Space((bf16, fp16), Batches(None))
        runner.faults = {Candidate(bf16, batch, 1): [fault()] for batch in (24, 32)}
        history = search(space, runner)
        assert largest_batch_found(history) == 192
        assert [t.candidate.arm for t in history.tried].count(bf16) <= 5

    def test_one_fault_does_not_break_an_arm(self) -> None:
        runner = with_peaks(lambda batch: (4000 + 100 * batch) * MIB)
        bf16 = Arm("bf16", gradient_checkpointing=True)
        runner.faults[Candidate(bf16, 32, 1)] = [fault()]
        history = search(Space((bf16,), Batches(None)), runner)
        assert largest_batch_found(history) == 192

    def test_an_arm_with_less_to_keep_can_beat_the_first(self) -> None:
        """The eager arm comes first here, though it needs more."""

        def peak_bytes(candidate: Candidate) -> float:
            mib_a_sample = 200 if candidate.arm.attn_implementation == "eager" else 80
            return (4000 + mib_a_sample * candidate.per_device_train_batch_size) * MIB

        eager, sdpa = (arms("bf16", checkpointing="on", attention=name)[0] for name in ("eager", "sdpa"))
        history = search(Space((eager, sdpa), Batches(None)), ComputedRunner(peak_bytes))
        largest = history.largest()
        assert largest.candidate == Candidate(sdpa, 240, 1)
        assert is_proven(history, 240)
        assert len(history.tried) <= 9


class TestEffectiveBatch:
    @given(st.integers(1, 30), st.integers(20, 5000), st.integers(0, 8000))
    @settings(max_examples=100)
    def test_the_largest_divisor_that_fits(self, eights: int, mib_a_sample: int, gradients_mib: int) -> None:
        """Accumulating keeps gradients alive, so that the whole batch at once may need less than half of it twice."""

        def peak_bytes(candidate: Candidate) -> float:
            gradients = gradients_mib if candidate.accumulates else 0
            return (4000 + gradients + mib_a_sample * candidate.per_device_train_batch_size) * MIB

        space = Space(arms("bf16", checkpointing="on"), Batches(8 * eights))
        history = search(space, ComputedRunner(peak_bytes))
        line = ceiling_of(CAP_BYTES).line_bytes
        arm = space.arms[0]
        by_level = (space.batches.at_level(level) for level in space.batches.levels())
        fitting = ([b for b in rungs if peak_bytes(space.candidate(arm, b)) <= line] for rungs in by_level)
        assert largest_batch_found(history) == max(next(filter(None, fitting), []), default=None)
        assert len(history.tried) <= 10


ONE_GPU = [Arm(precision, checkpointing) for precision in ("bf16", "fp16", "tf32") for checkpointing in (False, True)]
RANKS = [
    Arm(precision, checkpointing, strategy=strategy, ranks=2, sync_each_batch=sync)
    for precision in ("bf16", "fp16")
    for strategy, sync in (("ddp", False), ("fsdp", False), ("fsdp", True))
    for checkpointing in (False, True)
]


def test_all_of_a_precision_have_one_name() -> None:
    assert names_of_arms(ONE_GPU[1:4], ONE_GPU, ONE_GPU) == ("bf16, checkpointing", "all fp16")
    assert names_of_arms(ONE_GPU[:1], ONE_GPU, ONE_GPU) == ("bf16",)


def test_what_several_ranks_have_in_common() -> None:
    synced = [arm for arm in RANKS if arm.sync_each_batch]
    others = [arm for arm in RANKS if not arm.sync_each_batch]
    fp16 = [arm for arm in others if arm.precision == "fp16"]
    fsdp = [arm for arm in others if arm.strategy == "fsdp" and arm.precision == "bf16"]
    assert names_of_arms(synced, RANKS, RANKS) == ("all sync each batch",)
    assert names_of_arms(fp16, others, RANKS) == ("all other fp16",)
    assert names_of_arms(fsdp, others, RANKS) == ("all other bf16, fsdp × 2",)
    assert names_of_arms(fsdp + fp16[:1], others, RANKS) == ("all other bf16, fsdp × 2", "fp16, ddp × 2")
