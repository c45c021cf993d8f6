"""Test that steps whose update fp16's gradient scaler skips are not measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_meter import FakeClock, FakeMeter, unwatched
from test_measure import Drive

from autotune.core.candidate import Arm, Candidate
from autotune.core.lengths import PlannedRun
from autotune.core.outcome import Effort
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.trial.measure import StepTimer, most_steps
from autotune.worker.trial.step_checks import ScalerWatch
from autotune.worker.user.trainer_trial import _WholeSteps

FP16 = Candidate(Arm("fp16"), 8)
# A skipped step takes a second, any other one two.
SKIPPED, WHOLE = 1.0, 2.0


class Scaling:
    """A real scaler and optimizer, whose gradients overflow in the steps that the test says."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")
        self._weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.AdamW([self._weight])

    def step(self, overflows: bool) -> None:
        """One update, left out where the gradient is no number."""
        self.scaler.scale(self._weight.sum()).backward()
        assert self._weight.grad is not None
        if overflows:
            self._weight.grad.fill_(float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    @property
    def has_state(self) -> bool:
        return bool(self.optimizer.state)


def run(clock: FakeClock, effort: Effort, overflows: tuple[bool, ...], **batches: Any) -> Drive:
    """Steps until the timer has enough; those beyond ``overflows`` are whole."""
    scaling, drive = Scaling(), Drive(FP16, effort, clock, **batches)
    drive.timer.begin(SimpleNamespace(scaler=scaling.scaler))
    while not drive.timer.is_finished:
        done = len(drive.steps)
        assert done < most_steps(FP16, effort), "it needs more steps than the Trainer is given"
        skips = done < len(overflows) and overflows[done]
        scaling.step(skips)
        drive.step(micro=(SKIPPED if skips else WHOLE,))
    assert scaling.has_state
    return drive


EFFORT = Effort(warmup_steps=2, min_steps=3, max_steps=3, max_seconds=1000.0)


@pytest.mark.parametrize(
    "overflows", [(), (True, True, True, True, True), (False, False, True, True), (True, False, False, False, True)]
)
def test_no_measured_step_was_skipped(clock: FakeClock, overflows: tuple[bool, ...]) -> None:
    measured = run(clock, EFFORT, overflows).measured
    assert measured.step_seconds_each == pytest.approx([WHOLE] * 3)
    assert measured.skipped_steps == sum(overflows)


def test_two_whole_steps_come_before_the_measured_ones(clock: FakeClock) -> None:
    measured = run(clock, EFFORT, (True, True, True)).measured
    assert measured.warmup_step_seconds == pytest.approx([SKIPPED] * 3 + [WHOLE] * 2)


def test_the_costs_of_measured_batches_stay_with_them(clock: FakeClock) -> None:
    # The third step is skipped, so that the ones after it count; all are of the mean.
    lengths, run_of = (5, 5, 45, 5, 5, 5), PlannedRun(step_tokens=40.0, varies=True)
    shapes = BatchShapes(settles=0)
    measured = run(clock, EFFORT, (False, False, True), run_of=run_of, shapes=shapes, lengths=lengths).measured
    assert measured.step_seconds == pytest.approx(WHOLE)
    assert measured.step_seconds_each == pytest.approx([WHOLE] * 3)


def test_the_users_own_trainer_tells_of_its_scaler_too(clock: FakeClock) -> None:
    scaling, meter = Scaling(), FakeMeter(clock)
    timer = StepTimer(meter, FP16, EFFORT, lambda _: None, lambda _: None, unwatched())
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=1, world_size=1)
    _WholeSteps(timer, lambda _: None).on_train_begin(
        args, None, None, optimizer=SimpleNamespace(scaler=scaling.scaler)
    )
    scaling.step(overflows=True)
    assert timer._scaler.step_was_skipped()


def test_another_scale_to_begin_with_is_counted_too() -> None:
    scaling = Scaling()
    scaling.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watch = ScalerWatch(scaling)
    for overflows in (True, False, True):
        scaling.step(overflows)
        assert watch.step_was_skipped() is overflows
