"""Where the steps of a loop begin and end, and which of them count; no process is started."""

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_meter import FakeClock, FakeMeter, unwatched

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.loop import LoopConfig, listen, step, steps
from autotune.core.outcome import Effort, Measurement
from autotune.worker.trial import measure
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.loop_steps import LoopSteps, batch_samples

WORDS = {
    "begin": "begin", "step_begins": "step", "micro_step_ends": "micro", "step_ends": "whole",
    "step_is_dropped": "dropped",
}  # fmt: skip


def steps_told(
    accumulation: int | None, batches: list[int], every: int, count: int, *, may_skip: bool = False, skips: int = 0
) -> list[str]:
    """Go over ``count`` batches of these sizes with an optimizer that steps each ``every``; what was told."""
    told = Mock()
    loop = LoopSteps("train.py:train", accumulation, told, may_skip=may_skip)
    given = loop.batches([torch.zeros(size) for size in batches])
    for number, _ in enumerate(itertools.islice(given, count), start=1):
        loop.backward_begins((torch.ones(1),))
        if number % every == 0 and number // every > skips:
            loop.optimizer_begins(None)
            loop.optimizer_ends(None)
    given.close()
    return [WORDS[name] for name, _, _ in told.method_calls if name in WORDS]


def test_a_step_ends_with_the_batch_in_which_the_optimizer_steps() -> None:
    assert steps_told(2, [4] * 8, 2, 4) == ["begin", "step", "micro", "whole", "step", "micro", "whole"]
    assert steps_told(1, [4] * 8, 1, 2) == ["begin", "step", "whole", "step", "whole"]


def test_as_many_batches_as_come_are_a_step_where_it_is_not_known_how_many_should() -> None:
    assert steps_told(None, [4] * 8, 3, 3) == ["begin", "step", "micro", "micro", "whole"]


def test_a_step_that_the_data_cuts_short_is_dropped() -> None:
    """For want of batches, or of samples in the last."""
    assert steps_told(2, [4, 4, 4], 2, 4)[-1] == "dropped"
    assert steps_told(1, [4, 4, 2], 1, 3) == ["begin", "step", "whole", "step", "whole", "step", "dropped"]


def test_the_batches_never_end() -> None:
    assert steps_told(1, [4, 4], 1, 7).count("whole") == 7


def test_a_step_that_the_gradient_scaler_leaves_out_is_dropped() -> None:
    said = steps_told(2, [4] * 8, 2, 6, may_skip=True, skips=2)
    assert [word for word in said if word in ("whole", "dropped")] == ["dropped", "dropped", "whole"]


def test_an_optimizer_that_torch_knows_nothing_of_steps_by_the_count() -> None:
    assert steps_told(2, [4] * 8, 100, 4).count("whole") == 2


def test_steps_of_another_length_than_asked_are_an_error() -> None:
    with pytest.raises(UserCodeError, match="steps its optimizer after 1 batches, asked was 4"):
        steps_told(4, [4] * 100, 1, 100)


def test_batches_without_a_backward_pass_are_an_error() -> None:
    loop = LoopSteps("evaluate.py:evaluate", 1, Mock())
    with pytest.raises(UserCodeError, match=r"evaluate.py:evaluate made no backward pass in 50 batches") as raised:
        for _ in loop.batches([1, 2, 3]):
            pass
    assert "training loop alone" in raised.value.hint


def test_batches_that_a_loop_leaves_out_now_and_then_are_none() -> None:
    loop, told = LoopSteps("train.py:train", 1, Mock()), 0
    for told, _ in enumerate(loop.batches([1, 2, 3]), start=1):
        if told % 2:
            loop.backward_begins(None)
        if told == 130:
            break
    assert told == 130


def test_data_without_a_batch_ends() -> None:
    assert list(LoopSteps("train.py:train", 1, Mock()).batches([])) == []


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ({"text": ["a"], "ids": torch.zeros(5, 2)}, 5),
        ((torch.zeros(2), torch.zeros(7)), 2),
        (torch.tensor(1), None),
        ("text", None),
    ],
)
def test_a_batch_has_the_samples_of_its_first_tensor(batch: Any, samples: int | None) -> None:
    assert batch_samples(batch) == samples


def test_by_themselves_steps_are_the_batches_of_the_loader() -> None:
    listen_to_nobody()
    assert list(steps([1, 2])) == [1, 2]
    with step():
        pass


def listen_to_nobody() -> None:
    """As in a process that is no trial's."""
    from autotune.core import loop

    loop._listeners.clear()


def test_the_listener_is_told_of_both_ways_to_mark_a_step() -> None:
    told = Mock()
    listen(LoopSteps("train.py:train", 1, told))
    try:
        with step():
            pass
        assert next(iter(steps([1]))) == 1
    finally:
        listen_to_nobody()
    assert [call[0] for call in told.method_calls[:2]] == ["begin", "step_begins"]


def test_a_config_remembers_what_was_read_and_refuses_what_is_none() -> None:
    config = LoopConfig(4, 2, "bf16")
    assert "bf16" in repr(config)
    assert config.was_read == set()
    assert config.per_device_batch_size * config.gradient_accumulation_steps == 8
    assert config.was_read == {"per_device_batch_size", "gradient_accumulation_steps"}
    with config.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with LoopConfig().autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with pytest.raises(InvalidRequestError, match="precision 'int8' is not known"):
        LoopConfig(precision="int8")  # type: ignore[arg-type]


def test_waits_for_data_within_a_step_count_as_such(clock: FakeClock) -> None:
    found: list[Measurement] = []
    effort = Effort(warmup_steps=0, min_steps=2, target_spread=0.1, max_steps=2, max_seconds=1000.0)
    candidate, meter = Candidate(Arm(), 8, 3), FakeMeter(clock)
    measuring = measure.StepTimer(meter, candidate, effort, found.append, lambda _: None, unwatched())
    measuring.begin()
    for _ in range(2):
        measuring.step_begins()
        for wait_seconds in (0.25, 0.25, 0.0):
            # Computes, and waits for the next batch.
            clock.sleep(1.0)
            if wait_seconds:
                measuring.micro_step_ends()
            clock.sleep(wait_seconds)
        begun = measuring.mark()
        clock.sleep(0.5)
        measuring.step_ends((begun, measuring.mark()), 0.5)
    assert found[0].step_seconds == pytest.approx(4.0)
    assert found[0].data_seconds == pytest.approx(0.5)
