"""Watch a real training with a winner: its speed against the promise, its memory, its data, its GPU's clocks.

Nothing waits for the GPU: a step is two readings of the host's clock, and all else is read when the ``Trainer`` logs,
by which time it has waited for its loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from transformers import TrainerCallback

from autotune.core.real_training import Promise, WatchedRun
from autotune.core.schema import encode
from autotune.core.units import format_bytes, format_rate, format_seconds
from autotune.devices.nvml import device_condition
from autotune.worker.trial.meter import growth_of

# Steps that are left out at the start, those after which a speed is judged, and the seconds that they take. Choices.
_WARM_STEPS, _FEWEST_STEPS, _FEWEST_SECONDS = 10, 20, 5.0
# Share of the time that is waited for data above which it is told. A choice.
_LONG_WAIT = 0.2


class RunWatch(TrainerCallback):  # type: ignore[misc]
    """Watches one training; puts what it sees into the logs, and says what is off."""

    def __init__(self, promise: Promise, say: Callable[[str], None], clock: Callable[[], float] | None = None) -> None:
        self._promise, self._say, self._clock = promise, say, clock or time.perf_counter
        self._is_off: set[str] = set()
        self._held: list[int | None] = []
        self._begin()

    def _begin(self) -> None:
        self._seen = self._steps = self._judged_steps = 0
        self._seconds = self._waited = self._judged_seconds = self._judged_waited = 0.0
        self._tokens: int | None = None
        self._since = self._clock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin anew."""
        self._begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note how long the step's batches were waited for."""
        self._wait = self._clock() - self._since

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        now = self._clock()
        self._seen += 1
        if self._seen > _WARM_STEPS:
            self._steps += 1
            self._seconds += now - self._since
            self._waited += self._wait
        self._since = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the time since the last step."""
        self._since = self._clock()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the time since the last step."""
        self._since = self._clock()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add what is known by now to the logs of the training, and say what is off."""
        if logs is None or "loss" not in logs or not self._steps:
            return
        # The Trainer has waited for the GPU since the last step.
        now = self._clock()
        self._seconds += now - self._since
        self._since = now
        speed = self._speed(args, self._steps, self._seconds)
        found = {"samples_per_second": round(speed, 3)}
        if self._promise.tokens_per_sample:
            found["tokens_per_second"] = round(speed * self._promise.tokens_per_sample, 1)
        if self._promise.utilization is not None:
            found["mfu"] = round(self._promise.utilization * speed / self._promise.samples_per_second, 4)
        left = (state.max_steps - state.global_step) * self._seconds / self._steps
        found["seconds_left"] = round(left, 1)
        logs.update(found)
        # The Trainer's own record was written just before.
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(found)
        self._judge(args, state.global_step)

    def _speed(self, args: Any, steps: int, seconds: float) -> float:
        samples: int = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return steps * samples / max(seconds, 1e-9)

    def _judge(self, args: Any, step: int) -> None:
        steps, seconds = self._steps - self._judged_steps, self._seconds - self._judged_seconds
        if args.device.type == "cuda":
            self._judge_memory(step)
        if steps < _FEWEST_STEPS or seconds < _FEWEST_SECONDS:
            return
        speed, wait = self._speed(args, steps, seconds), (self._waited - self._judged_waited) / seconds
        self._judged_steps, self._judged_seconds, self._judged_waited = self._steps, self._seconds, self._waited
        low, promised = self._promise.low, self._promise.samples_per_second
        slow = (
            f"{format_rate(speed)} samples/s, where {format_rate(promised)} were promised, at least {format_rate(low)}"
        )
        self._tell("speed", step, slow if speed < low else None)
        self._tell("data", step, f"{wait:.0%} of the time is spent waiting for data" if wait > _LONG_WAIT else None)
        if args.device.type == "cuda":
            uuid = getattr(torch.cuda.get_device_properties(args.device), "uuid", None)
            condition = device_condition(f"GPU-{uuid}") if uuid is not None else None
            slowdowns = condition.slowdowns if condition is not None else ()
            self._tell("clocks", step, f"the GPU is slowed down: {', '.join(slowdowns)}" if slowdowns else None)

    def _judge_memory(self, step: int) -> None:
        reserved = torch.cuda.max_memory_reserved()
        over = f"{format_bytes(reserved)} are reserved, more than {format_bytes(self._promise.line_bytes)}"
        self._tell("memory", step, over if reserved > self._promise.line_bytes else None)
        self._held.append(torch.cuda.memory_allocated())
        growth = growth_of(self._held)
        self._tell(
            "growth", step, None if growth is None else f"memory grows by {format_bytes(growth)} from log to log"
        )

    def _tell(self, what: str, step: int, words: str | None) -> None:
        """Say what is off once, until it is over."""
        if words is None:
            self._is_off.discard(what)
        elif what not in self._is_off:
            self._is_off.add(what)
            self._say(f"step {step:,}: {words}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how the run went, and record it."""
        if self._steps < _FEWEST_STEPS:
            return
        speed, promise = self._speed(args, self._steps, self._seconds), self._promise
        low, high = promise.low, promise.high
        kept = speed >= low
        verdict = "as promised" if low <= speed <= high else "more than promised" if kept else "less than promised"
        peak = f"; {format_bytes(torch.cuda.max_memory_reserved())} at the peak" if args.device.type == "cuda" else ""
        self._say(
            f"{self._steps:,} steps at {format_rate(speed)} samples/s, {verdict} ({format_rate(low)} to "
            f"{format_rate(high)}); {self._waited / self._seconds:.1%} waiting for data{peak}; evaluations and "
            f"checkpoints left out, {format_seconds(self._seconds)} of steps"
        )
        if args.process_index == 0 and promise.runs_file is not None:
            run = WatchedRun(datetime.now(UTC).isoformat(), self._steps, speed, low, kept)
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(promise.runs_file), exist_ok=True)
                with open(promise.runs_file, "a", encoding="utf-8") as file:
                    file.write(json.dumps(encode(run)) + "\n")


def watch(trainer: Any, promise: Promise, say: Callable[[str], None]) -> None:
    """Watch a ``Trainer`` that is about to train; its other callbacks see what is added to the logs."""
    trainer.callback_handler.callbacks.insert(0, RunWatch(promise, say))
