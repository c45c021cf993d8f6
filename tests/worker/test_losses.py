"""Test losses that are not finite, updates skipped by fp16's gradient scaler, and comparable loss curves."""

from typing import Any

import pytest
import torch
from server_client import ServerClient
from test_settling import Scaling
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.worker.trial.build import build_model
from autotune.worker.trial.look import turn_off_dropout
from autotune.worker.trial.step_checks import LossWatch, ScalerWatch, skipped_steps


class _Trainer:
    """As much of a ``Trainer`` as is watched."""

    def __init__(self, losses: list[float]) -> None:
        self._losses = losses

    def training_step(self, *_: Any) -> torch.Tensor:
        return torch.tensor(self._losses.pop(0), requires_grad=True)


@pytest.mark.parametrize(("losses", "problem"), [([], None), ([float("nan"), 1.0], None), ([1.0, float("nan")], "nan")])
def test_the_last_loss_counts(losses: list[float], problem: str | None) -> None:
    """One that was left out by the scaler before is no problem."""
    trainer = _Trainer(list(losses))
    watch = LossWatch(trainer)
    for loss in losses:
        returned = trainer.training_step(None, None)
        assert returned.requires_grad, "what the Trainer gets is what it got before"
        assert float(returned) == pytest.approx(loss, nan_ok=True)
    found = watch.problem()
    assert found is None if problem is None else problem in (found or "")


def test_updates_that_the_scaler_left_out_are_counted() -> None:
    scaling = Scaling()
    for overflows in (True, False, True):
        scaling.step(overflows)
    assert skipped_steps(scaling.scaler, 3) == 2
    assert skipped_steps(None, 3) == 0
    assert skipped_steps(torch.amp.GradScaler("cpu", enabled=False), 3) == 0


def test_how_many_were_left_out_is_not_known_once_the_scale_has_grown() -> None:
    scaling, found = Scaling(), []
    scaling.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    for step in range(1, 7):
        scaling.step(overflows=step == 2)
        found.append(skipped_steps(scaling.scaler, step))
    # After four good ones, the scale is what it was.
    assert found == [0, 1, 1, None, None, None]
    assert scaling.scaler.get_scale() == 2.0**16


class DeepSpeedOptimizerWrapper:
    """As much of accelerate's class as is asked."""

    def __init__(self, *skipped: bool) -> None:
        self._skipped = list(skipped)

    @property
    def step_was_skipped(self) -> bool:
        return self._skipped.pop(0)


def test_updates_that_deepspeed_skips_are_counted_without_a_scaler() -> None:
    watch = ScalerWatch(DeepSpeedOptimizerWrapper(True, False, True))
    assert [watch.step_was_skipped() for _ in range(3)] == [True, False, True]
    from accelerate.utils import deepspeed

    assert isinstance(deepspeed.DeepSpeedOptimizerWrapper.step_was_skipped, property)
    assert not ScalerWatch(object()).step_was_skipped()


def test_a_non_finite_loss_disqualifies_a_trial(trial_server: ServerClient) -> None:
    """Weights so large that the first sum overflows; the Trainer itself would log a loss of 0."""
    workload = tiny_workload("bert-tiny", config={"initializer_range": 1e30})
    outcome = trial_server.trial(workload, Candidate(Arm(), 4)).outcome
    assert outcome.reason == "non_finite"
    assert outcome.message == "the loss of the last step is nan"
    assert outcome.during == "train"


@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "t5-tiny", "vit-tiny", "llama-tiny"])
def test_dropout_is_off_whatever_its_name(model: str) -> None:
    """No module of the model then drops anything in a look."""
    built = build_model(tiny_workload(model), "eager", torch.device("cpu"))
    turn_off_dropout(built)
    dropouts = [module for module in built.modules() if isinstance(module, torch.nn.Dropout)]
    assert all(module.p == 0 for module in dropouts)
    drops = {key: value for key, value in built.config.to_dict().items() if "drop" in key and value}
    assert not drops
