"""Test what is seen of a real training with a winner: by a clock of the test's own, and in a process of its own."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reported import completed, report, trial
from server_client import ServerClient
from test_real_training import FIELDS, TRAINER, inspected, run
from transformers import TrainerControl, TrainerState, TrainingArguments

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.real_training import Promise, RealTraining
from autotune.core.training_source import find_script
from autotune.core.units import GIB
from autotune.results.training import promise_of, watched_line
from autotune.space.training_arguments import training_arguments
from autotune.worker.user.run_watch import LoopWatch, RunWatch, watch_trainer

PROMISE = Promise(100.0, 90.0, 110.0, GIB, tokens_per_sample=50.0, utilization=0.4)


class Watched:
    """A training of eight samples a step, of which the test says how long each part takes."""

    def __init__(self, folder: Path, promise: Promise = PROMISE) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.logs: dict[str, Any] = {}
        self._arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, per_device_train_batch_size=8)
        self._state, self._control = TrainerState(max_steps=1000), TrainerControl()
        trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))
        self._watch = watch_trainer(trainer, RunWatch(promise, self.said.append, lambda: self.now))
        self._call("on_train_begin")

    def _call(self, event: str, **others: Any) -> None:
        getattr(self._watch, event)(self._arguments, self._state, self._control, **others)

    def steps(self, count: int, seconds: float, wait: float = 0.0) -> None:
        """Train so many steps, and log."""
        for _ in range(count):
            self.now += wait
            self._call("on_step_begin")
            self.now += seconds - wait
            self._state.global_step += 1
            self._call("on_step_end")
        self.logs = {"loss": 1.0}
        self._call("on_log", logs=self.logs)

    def evaluate(self, seconds: float) -> None:
        """Evaluate between two steps."""
        self.now += seconds
        self._call("on_evaluate")

    def end(self) -> None:
        """End the training."""
        self._call("on_train_end")


@pytest.mark.parametrize(
    ("batches_vary", "arm", "warm_steps"),
    [
        (False, Arm("bf16", cuda_graphs=True), 10),
        (True, Arm("bf16"), 10),
        (True, Arm("bf16", cuda_graphs=True), 100),
        (True, Arm("bf16", torch_compile=True), 100),
    ],
)
def test_steps_in_which_lengths_are_compiled_or_captured_are_not_judged(
    batches_vary: bool, arm: Arm, warm_steps: int, tmp_path: Path
) -> None:
    done = completed(100.0)
    winner = trial(1, arm, 8, replace(done, measurement=replace(done.measurement, batches_vary=batches_vary)))
    promise = promise_of(report(trial(0, Arm("fp32"), 8, completed(20.0)), winner), None)
    assert promise.warm_steps == warm_steps
    watched = Watched(tmp_path, replace(PROMISE, warm_steps=warm_steps))
    watched.steps(warm_steps, 0.5)
    watched.steps(100, 0.08)
    watched.end()
    (summary,) = watched.said
    assert "100 steps at 100.0 samples/s, as promised" in summary


def test_logs_get_speed_utilization_and_the_time_left_without_evaluations(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.steps(10, 3.0)
    watched.steps(100, 0.08)
    watched.evaluate(60.0)
    watched.steps(100, 0.08)
    left = pytest.approx(790 * 0.08, abs=0.1)
    assert watched.logs == {
        "loss": 1.0, "samples_per_second": 100.0, "tokens_per_second": 5000.0, "mfu": 0.4, "seconds_left": left,
    }  # fmt: skip
    watched.end()
    (summary,) = watched.said
    assert "200 steps at 100.0 samples/s, as promised (90.0 to 110.0)" in summary


def test_what_is_off_is_said_once_until_it_is_over(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.steps(110, 0.1)
    watched.steps(100, 0.1, wait=0.03)
    watched.steps(100, 0.08)
    watched.steps(100, 0.1)
    slow = "80.0 samples/s, where 100.0 were promised, at least 90.0"
    assert watched.said == [
        f"step 110: {slow}", "step 210: 30% of the time is spent waiting for data", f"step 410: {slow}"
    ]  # fmt: skip


def test_runs_are_recorded_with_whether_the_promise_was_kept(tmp_path: Path) -> None:
    file = str(tmp_path / "logs" / "runs.jsonl")
    assert watched_line(file) is None
    for seconds in (0.08, 0.08, 0.2):
        watched = Watched(tmp_path, replace(PROMISE, runs_file=file))
        watched.steps(110, seconds)
        watched.end()
    assert "less than promised" in watched.said[-1]
    assert watched_line(file) == "speed kept in 2 of 3 runs of autotune run, 200 steps"


def test_a_real_training_is_watched(tmp_path: Path) -> None:
    candidate = Candidate(Arm(optim="adamw_torch"), 8, 2)
    fields = dict(training_arguments(candidate, FIELDS, "cpu"))
    promise = replace(PROMISE, low=1e-3, high=1e9, runs_file=str(tmp_path / "runs.jsonl"))
    ran = run(RealTraining("s", find_script([*TRAINER, "watched"]), candidate, fields, promise=promise), tmp_path)
    assert ran.returncode == 0, ran.stderr
    logged = next(line for line in ran.stdout.splitlines() if line.startswith("logged"))
    assert all(f"'{name}'" in logged for name in ("samples_per_second", "tokens_per_second", "mfu", "seconds_left"))
    assert "autotune: 30 steps at" in ran.stderr
    (line,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["steps"] == 30


class WatchedLoop:
    """A loop of eight samples a step, of which the test says how long each part takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.watch = RunWatch(PROMISE, self.said.append, lambda: self.now)
        self.loop = LoopWatch(self.watch, 8)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def load(self, data: object, seconds: float) -> None:
        """Take a batch of some data, and use it so long."""
        self.loop.next_batch(lambda _: None, iter(()), data)
        self.now += seconds

    def train(self, steps: int, *data: object) -> None:
        """Train so many steps of 0.08 s, each with batches of all of the data."""
        for _ in range(steps):
            for each in data:
                self.load(each, 0.06 / len(data))
            self.loop.updated(self.optimizer)
            # It waits for its loss.
            self.now += 0.02


def test_evaluations_and_checkpoints_of_a_loop_are_left_out() -> None:
    watched, train, evaluated = WatchedLoop(), object(), object()
    watched.train(110, train)
    for _ in range(5):
        watched.load(evaluated, 10.0)
    watched.train(100, train)
    watched.loop.save(lambda: setattr(watched, "now", watched.now + 60.0))
    watched.train(100, train)
    watched.loop.end()
    assert watched.watch.steps == 300
    assert watched.watch.speed() == pytest.approx(100.0, rel=0.01)
    assert "300 steps at" in watched.said[-1]
    assert "as promised" in watched.said[-1]


def test_a_loop_over_two_loaders_at_once_evaluates_nothing() -> None:
    watched, one, other = WatchedLoop(), object(), object()
    watched.train(110, one, other)
    # Another object in each epoch.
    watched.train(100, object(), other)
    assert watched.watch.speed() == pytest.approx(100.0, rel=0.02)
    assert watched.watch.steps == 200


def test_a_real_loop_is_watched(trial_server: ServerClient, folder: Path) -> None:
    source = inspected(trial_server, "--num_train_epochs", "8")
    promise = replace(PROMISE, low=1e-3, high=1e9, runs_file=str(folder / "runs.jsonl"))
    ran = run(RealTraining("s", source, Candidate(Arm(optim=OWN_OPTIM), 32, 1), {}, promise=promise), folder)
    assert "autotune: 54 steps at" in ran.stderr
    assert json.loads((folder / "runs.jsonl").read_text())["kept"]
