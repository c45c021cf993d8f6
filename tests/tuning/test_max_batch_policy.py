"""Test the search for the largest batch under the line: found in few trials, and confirmed by the next one."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded import BATCHES, ComputedRunner, RecordedRunner, count_out_of_memory, fault, run_policy
from searching import CONTEXT_BYTES, arms, ceiling_of

from autotune.core.candidate import Arm, Candidate
from autotune.core.units import GIB, MIB
from autotune.estimate.history import History
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.tuning.policy import MaxBatchPolicy

CAP_BYTES = 24 * GIB - CONTEXT_BYTES


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
        ("headroom", "expected", "most_trials", "most_ooms"), [(0.03, {216}, 4, 0), (0, {240, 248}, 7, 1)]
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
        assert len(history.tried) <= 5
        asked = {t.candidate.arm for t in history.tried}
        assert asked == {Arm("bf16", gradient_checkpointing=True), Arm("tf32", gradient_checkpointing=True)}


class TestOnFormulas:
    @given(
        base_mib=st.integers(100, 20000),
        mib_a_sample=st.floats(0.5, 4000),
        multiple=st.sampled_from([1, 3, 8, 24, 64]),
    )
    @settings(max_examples=150)
    def test_an_affine_peak_is_met_exactly(self, base_mib: int, mib_a_sample: float, multiple: int) -> None:
        runner = with_peaks(lambda batch: (base_mib + mib_a_sample * batch) * MIB)
        history = search(Space(arms("bf16", checkpointing="on"), Batches(None, multiple=multiple)), runner)
        line = ceiling_of(CAP_BYTES).line_bytes
        fitting = [b for b in range(multiple, 50000, multiple) if int((base_mib + mib_a_sample * b) * MIB) <= line]
        assert largest_batch_found(history) == max(fitting, default=None)
        assert len(history.tried) <= 9
        if fitting:
            assert is_proven(history, max(fitting), multiple)

    @given(
        floor_mib=st.integers(1000, 23000),
        base_mib=st.integers(-20000, 10000),
        mib_a_sample=st.floats(2, 500),
        tooth_mib=st.integers(0, 300),
    )
    @example(floor_mib=5200, base_mib=-200000, mib_a_sample=223, tooth_mib=0)
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
        fitting = [b for b in range(8, LARGEST_FREE_BATCH, 8) if int(peak_mib(b) * MIB) <= line]
        found = largest_batch_found(history)
        if fitting:
            assert found == max(fitting)
            assert is_proven(history, max(fitting))
        else:
            assert found is None or found < 8
        # Thousands of batches lie on the flattest of these floors; halving alone would take 13 after climbing.
        assert len(history.tried) <= 24

    @given(st.lists(st.integers(0, 1500), min_size=100, max_size=100), st.integers(60, 800))
    @settings(max_examples=60)
    def test_an_unsteady_peak_still_ends_with_a_proof(self, noise_mib: list[int], mib_a_sample: int) -> None:
        runner = with_peaks(lambda batch: (4000 + mib_a_sample * batch + noise_mib[batch // 8 % 100]) * MIB)
        history = search(ONE_ARM, runner)
        found = largest_batch_found(history)
        assert found is not None
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
        assert tried == {32, 16, 8, *(b for b in (4, 2, 1) if b >= (expected or 1))}

    def test_an_arm_that_is_broken_is_replaced_by_one_of_its_memory_class(self) -> None:
        runner = with_peaks(lambda batch: (4000 + 100 * batch) * MIB)
        bf16, fp16 = (Arm(p, gradient_checkpointing=True) for p in ("bf16", "fp16"))  # type: ignore[arg-type]
        space = Space((bf16, fp16), Batches(None))
        runner.faults = {Candidate(bf16, batch, 1): [fault()] for batch in (24, 32)}
        history = search(space, runner)
        assert largest_batch_found(history) == 192
        assert [t.candidate.arm for t in history.tried].count(bf16) <= 4

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
