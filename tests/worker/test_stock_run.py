"""Test what a stock run times: its steps, and neither the evaluation nor the checkpoint between them."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.core.real_training import PeakBytes
from autotune.worker.verify import stock


class _Meter:
    """Answers as a device without work."""

    def synchronize(self) -> None:
        pass

    def peaks(self) -> PeakBytes:
        return PeakBytes(1, 2)

    def energy_joules(self) -> None:
        return None

    def mark(self) -> float:
        return stock.time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize("unsaved_bytes", [None, 10**11])
def test_a_rank_does_not_time_the_checkpoint_that_another_writes(
    monkeypatch: pytest.MonkeyPatch, unsaved_bytes: int | None
) -> None:
    """Each step takes a second; the first rank then writes for 100 s, for which this one waits."""
    now = 0.0
    monkeypatch.setattr(stock, "time", SimpleNamespace(perf_counter=lambda: now))

    def wait_for_ranks() -> None:
        nonlocal now
        now += 100.0

    watch: Any = stock._Watch(_Meter(), 20, True, wait_for_ranks)  # type: ignore[arg-type]
    watch.unsaved_bytes = unsaved_bytes
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_evaluate=False)
    for step in range(1, 21):
        state.global_step, now = step, now + 1.0
        control.should_evaluate = False
        watch.on_step_end(None, state, control)
        if control.should_evaluate:
            assert control.should_save is (unsaved_bytes is None)
            watch.on_evaluate(None, state, control)
            if control.should_save:
                watch.on_save(None, state, control)
    assert {stretch.seconds / stretch.steps for stretch in watch.stretches} == {1.0}


def test_a_step_that_begins_with_an_idle_device_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is not ahead of the device then. Its samples have used energy, too."""
    now = 0.0
    monkeypatch.setattr(stock, "time", SimpleNamespace(perf_counter=lambda: now))
    watch: Any = stock._Watch(_Meter(), 45, False, lambda: None)  # type: ignore[arg-type]
    for step in range(1, 46):
        watch.count({"input_ids": torch.zeros(4, 8)}, None)
        now += 3.0 if step == 6 else 1.0
        watch.on_step_end(None, SimpleNamespace(global_step=step), SimpleNamespace())
    assert {stretch.seconds / stretch.steps for stretch in watch.stretches} == {1.0}
    assert (sum(stretch.samples for stretch in watch.stretches), watch.untimed_samples) == (39 * 4, 4)


@pytest.mark.parametrize(("readings", "joules"), [((500, 800), 300), ((None, 800), None), ((500, None), None)])
def test_energy_is_unknown_where_either_reading_is(
    monkeypatch: pytest.MonkeyPatch, readings: tuple[int | None, ...], joules: int | None
) -> None:
    meter, said = _Meter(), iter((*readings, 900))
    monkeypatch.setattr(meter, "energy_joules", lambda: next(said))
    watch: Any = stock._Watch(meter, 8, False, lambda: None)  # type: ignore[arg-type]
    for step in range(1, 9):
        watch.on_step_end(None, SimpleNamespace(global_step=step), SimpleNamespace())
    assert watch.joules == joules


def test_a_checkpoint_has_weights_and_two_moments() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False))
    assert stock.checkpoint_bytes(model, only_trained=False) == 200 * 12
    model[0].requires_grad_(False)
    assert [stock.checkpoint_bytes(model, only_trained=only) for only in (False, True)] == [1600, 1200]


def test_rows_are_counted_where_an_epoch_ends_with_fewer() -> None:
    """Nine rows in batches of eight: five epochs in ten steps."""
    work: Any = SimpleNamespace(arguments={"per_device_train_batch_size": 8}, devices=SimpleNamespace(ranks=1))
    watch: Any = stock._Watch(_Meter(), 10, False, lambda: None, stock._row_counts(9, work))  # type: ignore[arg-type]
    for _ in range(10):
        watch.count({"input_ids": torch.zeros(1, 30), "cu_seq_lens_q": torch.arange(12)}, None)
    assert watch._samples == 45


def test_new_lengths_are_counted_after_the_warm_up() -> None:
    """And a last batch with fewer samples is no new length."""
    watch: Any = stock._Watch(_Meter(), 8, False, lambda: None)  # type: ignore[arg-type]
    for step, shape in enumerate([(4, 8), (4, 9), (4, 9), (4, 10), (4, 8), (3, 9), (4, 11), (4, 12)], start=1):
        watch.count({"input_ids": torch.zeros(shape)}, None)
        watch.on_step_end(None, SimpleNamespace(global_step=step), SimpleNamespace())
    assert sum(stretch.new_shapes for stretch in watch.stretches) == 3
    assert sum(stretch.samples for stretch in watch.stretches) == 23


@pytest.mark.parametrize("is_read", [True, False])
def test_a_job_is_not_begun_where_nobody_waits_for_its_result(is_read: bool) -> None:
    """The parent may die while the process imports torch, too early for the kernel to end it with its parent."""
    read_fd, write_fd = os.pipe()
    if not is_read:
        os.close(read_fd)
    code = "from autotune.worker.process import serve_one_job as serve\nserve(dict, lambda work, _: print('ran', work))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(write_fd)],
        input='{"work": {}, "output_dir": ""}\n',
        pass_fds=[write_fd],
        capture_output=True,
        text=True,
        timeout=240,
    )
    os.close(write_fd)
    if is_read:
        os.close(read_fd)
    assert (ended.returncode, ended.stdout) == ((0, "ran {}\n") if is_read else (1, "")), ended.stderr
