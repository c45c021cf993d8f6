"""Watch a real training with a search's winner: its speed against the promise, its memory, its data, its GPU's clocks.

A step costs a few readings of the host's clock, and never waits for the GPU. All else is read when a ``Trainer`` logs,
which has then waited for its loss, and every ten seconds in other loops.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.core.real_training import Promise, WatchedRun
from autotune.core.schema import encode
from autotune.core.units import format_bytes, format_rate, format_seconds
from autotune.devices.nvml import current_session
from autotune.worker.private.torch import around_batches
from autotune.worker.trial.meter import growth_of
from autotune.worker.wrapping import around, on_import

# Steps after which a loop's data is known, steps after which a speed is judged, and how long they take. Choices.
_WARM_STEPS, _FEWEST_STEPS, _FEWEST_SECONDS = 10, 20, 5.0
# Seconds between judgements of a loop that is no ``Trainer``'s, whose logs are unknown. A choice.
_EVERY_SECONDS = 10.0
# After so many steps in a row with other data, this data counts as training data, too. A choice.
_STEPS_WITH_NEW_DATA = 3
# A share of time spent waiting for data above this is reported. A choice.
_LONG_WAIT = 0.2


class RunWatch:
    """Counts the steps of one training, and reports problems and the final speed, as against the promised one."""

    def __init__(self, promise: Promise, say: Callable[[str], None], clock: Callable[[], float] | None = None) -> None:
        self.promise, self._say, self.clock = promise, say, clock or time.perf_counter
        self._reported: set[str] = set()
        """The problems that were reported and go on."""
        self._held: list[tuple[int, int]] = []
        """Steps, and bytes that were allocated after them."""
        self.begin(1, torch.device("cpu"))

    def begin(self, samples: int, device: torch.device) -> None:
        """Forget all steps so far, and start the clock of the first one; steps have ``samples`` samples."""
        self._samples, self._device = samples, device
        self.is_on_cuda = device.type == "cuda"
        self._seen_steps = self.steps = self._judged_steps = 0
        self.seconds = self._waited = self._judged_seconds = self._judged_waited = 0.0
        self.step_wait_seconds = 0.0
        """Seconds that the batches of the step under way were waited for."""
        self.clock_began_at = self.clock()

    def step_ends(self) -> None:
        """Count a step and its time, unless it is one of the promise's warm-up steps."""
        now = self.clock()
        self._seen_steps += 1
        if self._seen_steps > self.promise.warm_steps:
            self.steps += 1
            self.seconds += now - self.clock_began_at
            self._waited += self.step_wait_seconds
        self.clock_began_at, self.step_wait_seconds = now, 0.0

    def catch_up(self) -> None:
        """Add the time since the last step to the counted time: the device was still busy with counted steps."""
        now = self.clock()
        self.seconds += now - self.clock_began_at if self.steps else 0.0
        self.clock_began_at = now

    def leave_out(self) -> None:
        """Exclude the time since the last step, such as that of an evaluation."""
        self.clock_began_at = self.clock()

    def speed(self) -> float:
        """Return the samples per second of the counted steps."""
        return self.steps * self._samples / max(self.seconds, 1e-9)

    def judge(self, step: int) -> None:
        """Report problems of memory, and of speed, data and clocks in the steps since these were last judged.

        Speed, data and clocks are judged after at least 20 steps and 5 seconds. ``step`` is the number to report.
        """
        steps, seconds = self.steps - self._judged_steps, self.seconds - self._judged_seconds
        if self.is_on_cuda:
            self._judge_memory(step)
        if steps < _FEWEST_STEPS or seconds < _FEWEST_SECONDS:
            return
        speed, wait = steps * self._samples / seconds, (self._waited - self._judged_waited) / seconds
        self._judged_steps, self._judged_seconds, self._judged_waited = self.steps, self.seconds, self._waited
        low, promised = self.promise.low, self.promise.samples_per_second
        slow = (
            f"{format_rate(speed)} samples/s, where {format_rate(promised)} were promised, at least {format_rate(low)}"
        )
        self._report_once("speed", step, slow if speed < low else None)
        waiting = f"{wait:.0%} of the time is spent waiting for data"
        self._report_once("data", step, waiting if wait > _LONG_WAIT else None)
        if self.is_on_cuda:
            uuid = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
            condition = current_session().condition(f"GPU-{uuid}") if uuid is not None else None
            slowdowns = condition.slowdowns if condition is not None else ()
            self._report_once("clocks", step, f"the GPU is slowed down: {', '.join(slowdowns)}" if slowdowns else None)

    def _judge_memory(self, step: int) -> None:
        """Report reserved memory above the promised limit, and memory that grows from one judgement to the next."""
        reserved, limit = torch.cuda.max_memory_reserved(self._device), self.promise.line_bytes
        over = f"{format_bytes(reserved)} are reserved, more than {format_bytes(limit)}"
        self._report_once("memory", step, over if reserved > limit else None)
        self._held.append((step, torch.cuda.memory_allocated(self._device)))
        growth, words = growth_of([held for _, held in self._held]), None
        if growth is not None:
            # It grows by so much from one call to the next, between which are many steps.
            step_growth = growth * (len(self._held) - 1) / max(1, step - self._held[0][0])
            left = max(0, limit - reserved) / step_growth
            words = (
                f"memory grows by {format_bytes(int(step_growth))} a step: the limit is reached after about "
                f"{left:,.0f} more"
            )
        self._report_once("growth", step, words)

    def _report_once(self, problem: str, step: int, words: str | None) -> None:
        """Report a problem by ``words`` when it begins, not while it goes on; ``None`` means that it is over."""
        if words is None:
            self._reported.discard(problem)
        elif problem not in self._reported:
            self._reported.add(problem)
            self._say(f"step {step:,}: {words}")

    def end(self, *, is_first: bool) -> None:
        """Report how the run went; the first process (``is_first``) records it. Does nothing after too few steps."""
        if self.steps < _FEWEST_STEPS:
            return
        speed, promise = self.speed(), self.promise
        low, high = promise.low, promise.high
        is_kept = speed >= low
        verdict = "more than promised" if speed > high else "as promised" if is_kept else "less than promised"
        peak = f"; {format_bytes(torch.cuda.max_memory_reserved(self._device))} at the peak" if self.is_on_cuda else ""
        self._say(
            f"{self.steps:,} steps at {format_rate(speed)} samples/s, {verdict} ({format_rate(low)} to "
            f"{format_rate(high)}); {self._waited / self.seconds:.1%} waiting for data{peak}; evaluations and "
            f"checkpoints left out, {format_seconds(self.seconds)} of steps"
        )
        if is_first and promise.runs_file is not None:
            run = WatchedRun(datetime.now(UTC).isoformat(), self.steps, speed, low, is_kept)
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(promise.runs_file), exist_ok=True)
                with open(promise.runs_file, "a", encoding="utf-8") as file:
                    file.write(json.dumps(encode(run)) + "\n")


def watch_trainer(trainer: Any, watch: RunWatch) -> Any:
    """Watch a ``Trainer`` before it trains; return a callback that adds values to its logs."""
    # Other loops need no transformers.
    from transformers import TrainerCallback

    class Watches(TrainerCallback):  # type: ignore[misc]
        """Tells ``watch`` of the steps, and adds speed, utilization and time left to the logs of the training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begin(args.train_batch_size * args.gradient_accumulation_steps * args.world_size, args.device)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_wait_seconds = watch.clock() - watch.clock_began_at

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_ends()

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.leave_out()

        on_save = on_evaluate

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is None or "loss" not in logs or not watch.steps:
                return
            # The Trainer has waited for the GPU since the last step.
            watch.catch_up()
            speed, promise = watch.speed(), watch.promise
            found = {"samples_per_second": round(speed, 3)}
            if promise.tokens_per_sample:
                found["tokens_per_second"] = round(speed * promise.tokens_per_sample, 1)
            if promise.utilization is not None:
                found["mfu"] = round(promise.utilization * speed / promise.samples_per_second, 4)
            left = (state.max_steps - state.global_step) * watch.seconds / watch.steps
            found["seconds_left"] = round(left, 1)
            logs.update(found)
            # The Trainer's own record was written just before.
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1].update(found)
            watch.judge(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.end(is_first=args.process_index == 0)

    callback = Watches()
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class LoopWatch:
    """Watches a loop that is no Trainer's: its steps end with an optimizer's, and its data comes from a ``DataLoader``.

    A dataset counts as training data where more than half of the first steps load batches of it. A batch of other data
    begins an evaluation, which the next training batch ends. Meanwhile the loop is away from training, and the time is
    excluded, as is that of checkpoints.
    """

    def __init__(self, watch: RunWatch, samples: int) -> None:
        self._watch, self._samples = watch, samples
        self._optimizer: Any = None
        """The first that stepped: its steps are counted."""
        self._loaded_data: dict[int, Any] = {}
        """The datasets of the step under way, by their ids."""
        self._training_data: dict[int, Any] = {}
        """The training data, by the ids of its datasets."""
        self._steps_with: Counter[int] = Counter()
        """The number of first steps that loaded a dataset, by its id."""
        self._is_away = False
        self._steps = self._left_at_step = self._new_data_steps = 0
        self._judged_at = watch.clock()
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Watch this process from now on."""
        around_batches(self.next_batch)
        register_optimizer_step_post_hook(self.updated)
        around(torch, "save", self.save)
        on_import("safetensors.torch", lambda module: around(module, "save_file", self.save))

    def end(self) -> None:
        """Report how the run went."""
        self._watch.end(is_first=os.environ.get("RANK", "0") == "0")

    def next_batch(self, load: Callable[[Any], Any], batches: Iterator[Any], data: Any) -> Any:
        """Return ``load(batches)``, the next batch of a dataset; exclude the time of data that is not for training."""
        if threading.get_ident() != self._thread:
            return load(batches)
        self._loaded_data[id(data)] = data
        if self._steps >= _WARM_STEPS and id(data) not in self._training_data:
            self._leave()
            return load(batches)
        if self._is_away:
            self._watch.leave_out()
            self._is_away = False
        asked_at = self._watch.clock()
        batch = load(batches)
        self._watch.step_wait_seconds += self._watch.clock() - asked_at
        return batch

    def save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``save``, which writes a checkpoint, and exclude its time."""
        if self._steps >= _WARM_STEPS and threading.get_ident() == self._thread:
            self._leave()
        return save(*args, **kwargs)

    def _leave(self) -> None:
        """Exclude the time from now on. Wait for the device first, unless this was done less than 20 steps ago."""
        if self._is_away:
            return
        self._is_away = True
        if self._steps >= self._left_at_step + _FEWEST_STEPS and self._watch.is_on_cuda:
            torch.cuda.synchronize()
        self._left_at_step = self._steps
        self._watch.catch_up()

    def updated(self, optimizer: Any, *_: Any) -> None:
        """Count a step of the first optimizer that stepped; exclude its time where it began away from training."""
        if torch.compiler.is_compiling():
            # Traced, not run.
            return
        watch = self._watch
        if self._optimizer is None:
            self._optimizer = optimizer
            device = next((each.device for group in optimizer.param_groups for each in group["params"]), None)
            watch.begin(self._samples, device or torch.device("cpu"))
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        self._classify_data()
        if self._is_away:
            self._is_away = False
            watch.leave_out()
            return
        watch.step_ends()
        if watch.clock_began_at - self._judged_at > _EVERY_SECONDS:
            self._judged_at = watch.clock_began_at
            watch.judge(self._steps)

    def _classify_data(self) -> None:
        """Decide which datasets are the training's, from those that were loaded in the step that ends."""
        loaded = self._loaded_data
        self._loaded_data = {}
        if self._steps <= _WARM_STEPS:
            self._steps_with.update(loaded.keys())
            self._training_data |= loaded
        if self._steps == _WARM_STEPS:
            data, counts = self._training_data, self._steps_with
            self._training_data = {key: data[key] for key in data if 2 * counts[key] > _WARM_STEPS}
        self._new_data_steps = self._new_data_steps + 1 if loaded.keys() - self._training_data.keys() else 0
        if self._new_data_steps == _STEPS_WITH_NEW_DATA:
            # For example, a script may make a new dataset object in each epoch.
            self._training_data |= loaded
