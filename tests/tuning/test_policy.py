"""Test what is tried next, on recorded and computed landscapes: the answer and its cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import (
    BATCHES,
    EFFECTIVE_64,
    ComputedRunner,
    RecordedRunner,
    count_out_of_memory,
    fault,
    measurement,
    run_candidate,
    run_policy,
)
from searching import CONTEXT_BYTES, arms, ceiling_of

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.outcome import Completed
from autotune.core.units import GIB, MIB
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.tuning.policy import Acquisition, ExhaustivePolicy, MaxBatchPolicy

CAP_BYTES = 24 * GIB - CONTEXT_BYTES
ALL_ARMS = arms()


def with_baseline(space: Space, runner: RecordedRunner | ComputedRunner, cap_bytes: int = CAP_BYTES) -> History:
    """A history that begins as a search's does."""
    history = History(ceiling_of(cap_bytes))
    run_candidate(space.baseline("sdpa"), runner, history)
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
        everything = run_policy(ExhaustivePolicy(space), RecordedRunner(EFFECTIVE_64), History(ceiling_of(CAP_BYTES)))
        assert describe_winner(history) == describe_winner(everything)
        assert len(history.tried) <= 6

    @pytest.mark.parametrize("gib", [8, 10, 12, 15.5, 18, 20, 23])
    def test_a_lower_limit_finds_what_the_whole_grid_finds(self, gib: float) -> None:
        cap_bytes = int(gib * GIB)
        runner = RecordedRunner(EFFECTIVE_64)
        space = Space(ALL_ARMS, Batches(64))
        history = run_policy(Acquisition(space), runner, with_baseline(space, runner, cap_bytes))
        grid = run_policy(ExhaustivePolicy(space), RecordedRunner(EFFECTIVE_64), History(ceiling_of(cap_bytes)))
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
        grid = run_policy(ExhaustivePolicy(space), runner, with_baseline(space, runner, cap_mib * MIB))
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
        assert [t.candidate.per_device_train_batch_size for t in history.tried if history.is_over(t)] == [32]
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
        runner.faults[space.baseline("sdpa")] = [
            Completed(measurement(space.baseline("sdpa"), 0.5 * bert_seconds(space.baseline("sdpa")), GIB, GIB))
        ]
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
        for policy in (Acquisition(space), ExhaustivePolicy(space)):
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
        for policy in (Acquisition(space), ExhaustivePolicy(space)):
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
        for policy in (Acquisition(space), ExhaustivePolicy(space)):
            history = run_policy(policy, runner, with_baseline(space, runner, 20 * GIB))
            assert [c.per_device_train_batch_size for c in (t.candidate for t in history.believed())] == [8, 4]

    def test_a_strict_multiple_is_never_left(self) -> None:
        runner = slow_and_large(5000 * MIB)
        for batches in (Batches(64, multiple=8), Batches(None, multiple=8)):
            space = Space(arms("bf16"), batches)
            for policy in (Acquisition(space), MaxBatchPolicy(space), ExhaustivePolicy(space)):
                history = run_policy(policy, runner, History(ceiling_of(20 * GIB)))
                assert history.tried
                assert history.winner() is None
                assert all(t.candidate.per_device_train_batch_size % 8 == 0 for t in history.tried)

    def test_a_lower_level_is_premature_until_all_above_is_known_not_to_fit(self) -> None:
        space = Space(arms("bf16", checkpointing="off"), Batches(16))
        history = History(ceiling_of(20 * GIB))
        four, eight = (space.candidate(Arm("bf16"), batch) for batch in (4, 8))
        runner = slow_and_large(5000 * MIB)
        judge = Judge(space, history)
        assert judge.refusal(four) is not None
        assert judge.refusal(eight) is None
        run_candidate(space.candidate(Arm("bf16"), 16), runner, history)
        assert judge.refusal(four) is not None
        runner.faults[eight] = [fault()]
        run_candidate(eight, runner, history)
        assert judge.refusal(four) is None


class TestExhaustive:
    def test_every_recorded_cell_but_those_known_not_to_fit(self) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        space = Space(ALL_ARMS, Batches(64))
        history = run_policy(ExhaustivePolicy(space), runner, with_baseline(space, runner))
        fitting = {candidate for candidate, cell in runner.recorded if cell["state"] == "ok"}
        assert {t.candidate for t in history.tried if t.measurement} == fitting
        assert len(fitting) == 26
        assert count_out_of_memory(history) <= 4
        assert describe_winner(history) == "32 × 2  bf16"

    def test_a_free_batch_ends_at_the_largest(self) -> None:
        space = Space(arms("bf16", checkpointing="off"), Batches(None))
        history = run_policy(ExhaustivePolicy(space), slow_and_large(1.0), History(ceiling_of(CAP_BYTES)))
        assert max(t.candidate.per_device_train_batch_size for t in history.tried) == LARGEST_FREE_BATCH
        assert len(history.tried) == 14
