"""Test when a promise counts as kept, on invented figures, on which devices a study is verified, and how what ranks
measured is merged."""

import dataclasses
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from messages import check_messages
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.device import Device
from autotune.core.errors import DeviceError, PromiseMissedError, TrialServerError
from autotune.core.outcome import Completed, Measurement
from autotune.core.placement import Placement, RankDevices
from autotune.core.real_training import PeakBytes, StockResult, StockWork, Stretch
from autotune.core.schema import encode
from autotune.core.units import GIB
from autotune.execution.oneshot import run_fresh
from autotune.results.report import Report
from autotune.store.records import StudyRecord, TrialRecord
from autotune.verify.loss import reference_of
from autotune.verify.target import Interval, Target, Verdict, compare, describe_speed, mean_speed, placement_of, slack
from autotune.verify.throughput import Verification, notes, steps_of, verification_document, verification_lines
from autotune.worker.verify import torchrun
from autotune.worker.verify.torchrun import merge, run_with_torchrun

GPU = Device("cuda", 0, "GPU-1", "NVIDIA H200", 140 * GIB, None, 0, 140 * GIB)


def target(share: float = 0.03, busy: float | None = None, limit_bytes: int | None = 24 * GIB) -> Target:
    """A winner of 320 samples/s, ``share`` more or less in its next run, and 20 GiB."""
    candidate = Candidate(Arm("bf16"), 32, 2)
    measured = Measurement(0.2, (0.2,) * 3, 0.003, 320.0, 19 * GIB, 20 * GIB, gpu_busy_share=busy)
    best = TrialRecord("study", 1, candidate, "workload", "environment", outcome=Completed(measured))
    ceiling = Ceiling(limit_bytes, 140 * GIB, GIB // 2, Headroom())
    study = StudyRecord("mine", "workload", "environment", {"seed": 42}, encode(ceiling), "0", best_trial_id=best.id)
    environment = {"packages": {"torch": "2.13.0"}}
    workload = {
        "model": "bert",
        "config": {"model_type": "bert"},
        "task": "masked-lm",
        "seq_len": 8,
        "dtype": "float32",
    }
    report = Report(study, workload, environment, ceiling, (best,))
    promise = Interval(320.0, 320 * (1 - share), 320 * (1 + share))
    return Target(report, best, measured, promise, 1, {}, "sdpa", Placement.of(GPU))


def test_the_stock_run_is_told_where_the_winner_ran() -> None:
    free = target()
    assert free.work(20, evaluates=True).pinned is False
    arm = dataclasses.replace(free.best.candidate.arm, cpu_affinity=True)
    best = dataclasses.replace(free.best, candidate=dataclasses.replace(free.best.candidate, arm=arm))
    pinned = dataclasses.replace(free, best=best, promised=dataclasses.replace(free.promised, cpu_core=7))
    work = pinned.work(20, evaluates=True)
    assert (work.pinned, work.cpu_core) == (True, 7)


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.2, 100), (2.4, 50), (60.0, 10)])
def test_a_stock_run_takes_two_minutes_at_most_where_ten_steps_do(step_seconds: float, steps: int) -> None:
    promised = dataclasses.replace(target().promised, step_seconds=step_seconds)
    slow = dataclasses.replace(target(), promised=promised)
    assert steps_of(slow, None) == steps
    assert steps_of(slow, 300) == 300


def stretches(speeds: list[float], steps: int = 9, new_shapes: int = 0) -> tuple[Stretch, ...]:
    """Timed stretches of so many steps of 64 samples."""
    return tuple(Stretch(steps, 64 * steps, 64 * steps / speed, new_shapes) for speed in speeds)


def stock_result(speed: float = 320.0, peak: int = 20 * GIB, **changes: Any) -> StockResult:
    """What a stock run answers."""
    found = dict.fromkeys(("before", "evaluate", "save", "end"), PeakBytes(peak - GIB, peak))
    told = StockResult(
        "completed", stretches=stretches([speed] * 10), peak_bytes=found, packages={"torch": "2.13.0"}, skipped_steps=0
    )
    return dataclasses.replace(told, **changes)


@pytest.mark.parametrize(
    ("promised_share", "obtained_share", "verdict"),
    [
        pytest.param(0.03, 0.975, "kept", id="within the interval"),
        pytest.param(0.03, 0.965, "missed", id="below it"),
        pytest.param(0.06, 0.945, "kept", id="within a wider one"),
        pytest.param(0.03, 1.5, "faster", id="faster is no failure"),
        pytest.param(0.40, 0.75, "cannot_tell", id="a promise of little"),
    ],
)
def test_the_speed_is_compared_with_the_interval_of_the_next_run(
    promised_share: float, obtained_share: float, verdict: Verdict
) -> None:
    verification = Verification(target(promised_share), 100, stock_result(320 * obtained_share))
    assert verification.verdict() == verdict
    document = encode(verification_document(verification))
    assert (document["verdict"], document["kept"]) == (verdict, verdict in ("kept", "faster"))
    assert bool(document["why"]) == (verdict in ("cannot_tell", "faster"))
    if verdict == "missed":
        with pytest.raises(PromiseMissedError, match=r"below the promised 320.0, and below the 310.4 to 329.6"):
            verification.check()
    else:
        verification.check()


def test_both_intervals_are_told() -> None:
    document = encode(
        verification_document(Verification(target(), 100, stock_result(stretches=stretches([310.0, 330.0] * 5))))
    )
    promised, found = document["promised"], document["obtained"]
    assert promised["samples_per_second_low"] == pytest.approx(310.4)
    assert promised["samples_per_second_high"] == pytest.approx(329.6)
    # Student's t of nine degrees of freedom, not 1.96.
    half_width = 2.262 * 10.54 / math.sqrt(10) / 320
    assert found["relative_half_width"] == pytest.approx(half_width, rel=0.01)
    assert found["samples_per_second_low"] == pytest.approx(found["samples_per_second"] * (1 - half_width), rel=1e-3)


def test_messages_of_verifications() -> None:
    """Seconds a sample of ± 20 % are a lopsided interval of speeds; a stall of the host leaves it without an end."""

    def around(speed: float, **changes: Any) -> StockResult:
        return stock_result(stretches=stretches([0.99 * speed, 1.01 * speed] * 5), **changes)

    runs = {
        "kept": (target(), around(320.5)),
        "missed": (target(), around(300.0)),
        "faster": (target(), around(480.0)),
        "too wide to tell": (target(0.40), around(260.0)),
        "reaching into it": (target(0.01), stock_result(stretches=stretches([300.0, 324.0] * 5))),
        "lopsided": (target(0.01), stock_result(stretches=stretches([250.0, 430.0] * 5))),
        "stalled": (target(), stock_result(stretches=stretches([315.0] * 10 + [10.0] * 2, steps=3))),
        "more memory": (target(0.40), around(260.0, peak=22 * GIB)),
        "another torch": (target(), around(322.0, packages={"torch": "2.14.0"})),
    }
    cases = {}
    for name, (promised, run) in runs.items():
        seconds = {"evaluate": 1.0, "save": 2.0}
        found = Verification(promised, 100, dataclasses.replace(run, pause_seconds=seconds, evaluation_batch_size=8))
        cases[name] = [repr(found), *verification_lines(found), *found.misses(), found.verdict()]
    check_messages("verifications", cases)


def test_rows_of_packed_samples_are_called_rows() -> None:
    of_samples = target(0.01)
    workload = {**of_samples.report.workload, "data": {"packing": True}}
    packed = dataclasses.replace(of_samples, report=dataclasses.replace(of_samples.report, workload=workload))
    for speeds in ([250.0, 430.0], [200.0, 210.0], [400.0, 410.0], [320.0, 321.0]):
        seconds = {"evaluate": 1.0, "save": 1.0}
        timed = stock_result(stretches=stretches(speeds * 5), pause_seconds=seconds)
        verification = Verification(packed, 100, timed)
        text = "\n".join([repr(verification), *verification.misses(), *verification_lines(verification)])
        assert "rows/s" in text
        assert " rows, were timed" in text
        assert "sample" not in text


@pytest.mark.parametrize(("share", "kept"), [(1.019, True), (1.021, False), (0.5, True)])
def test_the_memory_that_is_kept(share: float, kept: bool) -> None:
    verification = Verification(target(), 100, stock_result(peak=round(20 * GIB * share)))
    assert (not verification.misses()) == kept


@pytest.mark.parametrize(("ranks", "kept"), [(1, False), (2, True)])
def test_ddp_may_hold_small_gradients_a_second_time(ranks: int, kept: bool) -> None:
    """By chance, in one step: up to a hundredth of the memory, above which a search has it keep its buckets."""
    promised = target()
    best = dataclasses.replace(
        promised.best,
        candidate=dataclasses.replace(promised.best.candidate, arm=Arm("bf16", strategy="ddp", ranks=ranks)),
    )
    measured = dataclasses.replace(promised.promised, ranks=ranks)
    found = Verification(
        dataclasses.replace(promised, best=best, promised=measured), 100, stock_result(peak=int(20.5 * GIB))
    )
    assert (found.misses() == []) == kept


@pytest.mark.parametrize("setting", ["expandable_segments", "cuda_graphs"])
def test_with_segments_that_expand_and_with_graphs_what_is_allocated_counts(setting: str) -> None:
    """Reserved bytes then depend on more than the training; 19 GiB were allocated."""
    plain = target()
    arm = dataclasses.replace(plain.best.candidate.arm, **{setting: True})
    best = dataclasses.replace(plain.best, candidate=dataclasses.replace(plain.best.candidate, arm=arm))
    expanding = dataclasses.replace(plain, best=best)
    found = dict.fromkeys(("before", "end"), PeakBytes(19 * GIB, 23 * GIB))
    run = Verification(expanding, 100, stock_result(peak_bytes=found))
    assert run.misses() == []
    told = [note for note in notes(run) if "23.0 GiB reserved for CUDA graphs" in note]
    assert len(told) == (setting == "cuda_graphs")
    # The pool of a graph is not freed where memory runs out.
    assert not any("frees" in note for note in told)
    assert Verification(plain, 100, stock_result(peak_bytes=found)).misses()


def target_with_data(**promised: Any) -> Target:
    """The same winner, found on data of the user's own."""
    plain = target()
    report = dataclasses.replace(plain.report, workload={**plain.report.workload, "data": {"source": "x.jsonl"}})
    return dataclasses.replace(plain, report=report, promised=dataclasses.replace(plain.promised, **promised))


def test_lengths_that_are_new_are_part_of_what_is_promised() -> None:
    """20 steps of 0.2 s in the first stretch, in which 8 lengths of 0.5 s are new, and 20 in the second."""
    answer = stock_result(stretches=(Stretch(20, 1280, 8.0, 8), Stretch(20, 1280, 4.0, 0)))
    run = Verification(target_with_data(new_shape_seconds=0.5), 100, answer)
    assert run.samples_per_second == pytest.approx(2560 / 12)
    assert run.promise.mean == pytest.approx(2560 / 12)
    assert run.promise.relative_half_width == pytest.approx(0.03)
    assert run.misses() == []
    assert run.speed.relative_half_width == pytest.approx(0), "it is known why the stretches differ"
    document = encode(verification_document(run))
    assert document["promised"]["samples_per_second"] == pytest.approx(320.0)
    assert document["promised"]["samples_per_second_with_new_lengths"] == pytest.approx(2560 / 12)
    assert document["samples_per_second_ratio"] == pytest.approx(1)
    assert "8 padded lengths were new to the GPU" in document["notes"][0]
    unknown = Verification(target_with_data(), 100, answer)
    assert unknown.promise.mean == 320.0, "nothing is promised of what no trial has seen"


def test_steps_with_fewer_samples_count_for_what_they_have() -> None:
    """An epoch ends with 8 samples in place of 64, in a tenth of a step's time."""
    run = Verification(target_with_data(), 100, stock_result(stretches=(Stretch(3, 136, 0.425, 0),)))
    assert run.samples_per_second == pytest.approx(320)
    assert (run.steps_timed, run.samples_timed) == (3, 136)


@pytest.mark.parametrize(("allocated_gib", "kept"), [(19.0, True), (19.3, True), (19.5, False)])
def test_on_data_of_all_lengths_what_is_allocated_counts(allocated_gib: float, kept: bool) -> None:
    """The allocator keeps what other lengths have left, up to the cap, which is said: 23 GiB, 19 promised."""
    allocated = int(allocated_gib * GIB)
    found = dict.fromkeys(("before", "end"), PeakBytes(allocated, 23 * GIB))
    run = Verification(target_with_data(), 100, stock_result(peak_bytes=found))
    assert (run.misses() == []) == kept
    document = encode(verification_document(run))
    assert document["obtained"]["peak_reserved_bytes"] == 23 * GIB
    assert document["obtained"]["peak_allocated_bytes"] == allocated
    assert (document["peak_judged"], document["peak_ratio"]) == ("allocated", allocated / (19 * GIB))
    assert any("the allocator kept 23.0 GiB" in note for note in document["notes"])


def test_what_the_evaluation_needs_is_told_apart() -> None:
    """It is no miss of the training's promise; but what training reserves beyond it later is."""
    sizes = {"before": 20, "evaluate": 23, "save": 23, "end": 23}
    found = {name: PeakBytes(size * GIB, size * GIB) for name, size in sizes.items()}
    verification = Verification(target(), 100, stock_result(peak_bytes=found))
    assert verification.training_peak_bytes == 20 * GIB
    assert encode(verification_document(verification))["obtained"]["peak_reserved_with_evaluation_bytes"] == 23 * GIB
    grown = Verification(target(), 100, stock_result(peak_bytes={**found, "end": PeakBytes(23 * GIB, 24 * GIB)}))
    assert grown.training_peak_bytes == 24 * GIB
    assert grown.misses()


def test_out_of_memory_and_a_loss_that_is_no_number_are_misses() -> None:
    out = StockResult("out_of_memory", "CUDA out of memory", "evaluate")
    assert Verification(target(), 100, out).misses() == ["memory ran out during the evaluation: CUDA out of memory"]
    assert encode(verification_document(Verification(target(), 100, out)))["obtained"]["samples_per_second"] is None
    with pytest.raises(PromiseMissedError) as raised:
        Verification(target(), 100, dataclasses.replace(out, during="train")).check()
    assert "more --headroom" in raised.value.hint
    bad = Verification(target(), 100, stock_result(loss_problem="the loss of the last step is nan"))
    assert bad.misses() == ["the loss of the last step is nan"]


def test_the_cap_is_the_one_that_was_emulated() -> None:
    assert target().work(100, evaluates=True).cap_bytes == 24 * GIB - GIB // 2
    assert target(limit_bytes=None).work(100, evaluates=True).cap_bytes is None


def test_a_process_that_says_nothing_is_an_error(tmp_path: Path, cpu: Device) -> None:
    """Its last words are in the message; none of it is left."""
    with pytest.raises(TrialServerError, match="No module named"):
        run_fresh("autotune.no_such_module", {}, dict, Placement.of(cpu), tmp_path / "log", 60.0, offline=True)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps_for_long.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(TrialServerError, match="no answer came within 1 s"):
        run_fresh("sleeps_for_long", {}, dict, Placement.of(cpu), tmp_path / "log", 1.0, offline=True)
    assert not list((tmp_path / "temporary").iterdir())


def test_the_reference_is_the_baseline_at_as_many_samples() -> None:
    """The optimizer was asked for, so that it stays."""
    arm = Arm("bf16", gradient_checkpointing=True, optim="adafactor")
    assert reference_of(Candidate(arm, 32, 2), Arm()) == Candidate(Arm(optim="adafactor"), 8, 8)
    assert reference_of(Candidate(arm, 20, 1), Arm()) == Candidate(Arm(optim="adafactor"), 5, 4)


def around(mean: float, share: float) -> Interval:
    return Interval(mean, mean * (1 - share), mean * (1 + share))


@pytest.mark.parametrize(
    ("promised", "obtained", "verdict"),
    [
        pytest.param(around(100, 0.02), around(99, 0.005), "kept", id="within"),
        pytest.param(around(100, 0.02), around(150, 0.005), "faster", id="above"),
        pytest.param(around(100, 0.02), around(103, 0.02), "faster", id="above, but reaching into it"),
        pytest.param(around(100, 0.02), around(105, 0.30), "cannot_tell", id="above, in a run that shows little"),
        pytest.param(around(100, 0.02), around(98.5, 0.01), "kept", id="its speed within, its interval not quite"),
        pytest.param(around(100, 0.02), around(97, 0.005), "missed", id="wholly below"),
        pytest.param(around(100, 0.02), around(97, 0.02), "cannot_tell", id="below, but reaching into it"),
        pytest.param(around(100, 0.40), around(85, 0.01), "cannot_tell", id="a promise that promises little"),
        pytest.param(around(100, 0.40), around(55, 0.01), "missed", id="less than a promise of little"),
        pytest.param(around(100, 0.40), around(105, 0.01), "kept", id="surely as fast as the promised speed"),
        pytest.param(around(100, 0.02), around(101, 0.40), "cannot_tell", id="a run that shows little"),
        pytest.param(around(100, 0.02), Interval(100, 0, math.inf), "cannot_tell", id="a single stretch"),
    ],
)
def test_two_intervals_are_compared(promised: Interval, obtained: Interval, verdict: Verdict) -> None:
    assert compare(promised, obtained) == verdict
    assert compare(promised.scaled(3), obtained.scaled(3)) == verdict


def test_the_slack_is_the_slowest_speed_that_is_not_missed() -> None:
    promised, noise = around(100, 0.05), 0.03
    slowest = 100 * (1 - slack(promised, around(100, noise)))
    assert compare(promised, around(slowest * 1.001, noise)) != "missed"
    assert compare(promised, around(slowest * 0.999, noise)) == "missed"


def test_few_stretches_have_the_interval_of_few_values() -> None:
    """Student's t of two degrees of freedom is 4.30, not 1.96."""
    interval = mean_speed(100.0, [99.0, 100.0, 101.0])
    assert interval.relative_half_width == pytest.approx(4.303 / math.sqrt(3) / 100, rel=1e-3)
    assert mean_speed(100.0, [100.0]).high == math.inf
    assert mean_speed(100.0, [100.0]).low == 0.0


def test_the_interval_covers_the_mean_of_a_drifting_run() -> None:
    """Steps that are slow together, in stretches of ten: nine of ten intervals or more hold the true speed."""
    generator = random.Random(1)
    covered = 0
    for _ in range(400):
        seconds, state = [], 0.0
        for _ in range(100):
            state = 0.7 * state + generator.gauss(0, 0.02)
            seconds.append(1 + state)
        stretches = [10 / sum(seconds[start : start + 10]) for start in range(0, 100, 10)]
        interval = mean_speed(100 / sum(seconds), stretches)
        covered += interval.low <= 1.0 <= interval.high
    assert covered / 400 > 0.9


def test_a_promise_that_holds_is_hardly_ever_missed() -> None:
    """The next run of a host-bound configuration: processes differ by 7 %, the promise says so."""
    generator = random.Random(2)
    missed = 0
    for _ in range(1000):
        promised = around(100, 2.13 * 0.07)
        run = 100 * math.exp(generator.gauss(0, 0.07))
        missed += compare(promised, around(run, 0.01)) == "missed"
    assert missed / 1000 < 0.04


# A stock run of BERT-large on two H200, 22 November 2026: samples/s of stretches of three steps. In the seventh, one
# rank waited 3.2 s for the other, which wrote the checkpoint.
STALLED = [530.75, 525.22, 530.74, 519.33, 539.92, 551.23, 54.22, 546.39, 546.47, 550.24, 542.13, 552.07]


def run_of(speeds: list[float]) -> Interval:
    return mean_speed(len(speeds) / sum(1 / speed for speed in speeds), speeds)


def test_one_stall_refutes_nothing_and_a_real_shortfall_beside_it_is_missed() -> None:
    promised = Interval(561.05, 546.30, 576.20)
    stalled = run_of(STALLED)
    assert stalled.mean < 320
    assert compare(promised, stalled) == "cannot_tell"
    assert compare(promised, run_of([0.95 * speed for speed in STALLED])) == "missed"
    assert compare(promised, run_of([0.95 * speed for speed in STALLED if speed > 100])) == "missed"
    assert compare(Interval(540, 525, 555), run_of([speed for speed in STALLED if speed > 100])) == "kept"


def test_several_stalls_are_part_of_the_speed() -> None:
    """Every other stretch takes twice as long: the run is slower, whatever the reason."""
    assert compare(around(100, 0.02), run_of([100.0, 50.0] * 6)) == "missed"


def test_an_interval_with_unequal_sides_is_shown_with_both_ends() -> None:
    assert describe_speed(around(320, 0.012)) == "320.0 ± 1.2%"
    assert describe_speed(run_of(STALLED)) == "309.0 (159.2 to 555.8)"
    assert describe_speed(Interval(320, 0.0, math.inf)) == "320.0 (0.00 or more)"


def test_only_the_devices_that_are_given_are_used() -> None:
    """A search of a service has devices of its own; on others of its machine other searches run."""
    plain = target().report
    environment = {
        **plain.environment,
        "device_kind": "cuda",
        "device_name": GPU.name,
        "device_uuid": GPU.uuid,
        "device_memory_bytes": GPU.memory_total_bytes,
    }
    report = dataclasses.replace(plain, environment=environment)
    other = dataclasses.replace(GPU, uuid="GPU-2", index=1)
    assert placement_of(report, [other, GPU]).device == GPU
    assert placement_of(report, [other]).device == other
    with pytest.raises(DeviceError, match="was measured on NVIDIA H200; this machine has cuda:1"):
        placement_of(report, [dataclasses.replace(other, name="NVIDIA L4")])


def answer_of_rank(seconds: float, peak: int, **changes: Any) -> StockResult:
    """What one rank says."""
    stretch = Stretch(steps=5, samples=40, seconds=seconds, new_shapes=0)
    peaks = {"end": PeakBytes(peak, 2 * peak)}
    said = StockResult("completed", stretches=(stretch,), peak_bytes=peaks, skipped_steps=0)
    return dataclasses.replace(said, **changes)


RANK = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
told = json.loads((folder / "work.json").read_text())["arguments"]
assert os.environ["WORLD_SIZE"] == "2" and os.listdir(folder / "training") == []
if rank in told["silent"]:
    sys.exit(3)
(folder / f"rank-{rank}.json").write_text(json.dumps(told["answer"]))
"""


@pytest.mark.parametrize("silent", [[], pytest.param([1], marks=pytest.mark.whole)])
def test_torchrun_starts_the_ranks(silent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering_rank.py").write_text(RANK)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(torchrun, "_RANK_MODULE", "answering_rank")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    told = {"answer": encode(answer_of_rank(1.0, 300)), "silent": silent}
    devices = RankDevices("cpu", ("cpu", "cpu"))
    work = StockWork(tiny_workload("bert-tiny"), devices, told, "eager", 42, 20, context_parallel=2)
    merged = run_with_torchrun(work, str(tmp_path / "job"))
    if silent:
        assert merged.message == "rank 1 gave no answer, and torchrun ended with exit code 1"
    else:
        assert merged == merge([answer_of_rank(1.0, 300)] * 2, 0, shared_by=2)


def test_samples_of_all_time_of_the_slowest_peak_of_the_largest() -> None:
    merged = merge([answer_of_rank(1.0, 300), answer_of_rank(1.5, 200)], 0)
    assert merged.stretches == (Stretch(steps=5, samples=80, seconds=1.5, new_shapes=0),)
    assert merged.peak_bytes == {"end": PeakBytes(300, 600)}
    assert merged.joules_per_sample is None
    thrifty, wasteful = (answer_of_rank(1.0, 1, joules_per_sample=joules) for joules in (2.0, 4.0))
    assert merge([thrifty, wasteful], 0).joules_per_sample == 3


def test_a_sample_that_ranks_share_counts_once() -> None:
    """Each of four ranks had 40 samples, in two pairs, and each GPU drew 3 joules for each of its samples."""
    merged = merge([answer_of_rank(1.0, 300, joules_per_sample=3.0)] * 4, 0, shared_by=2)
    assert merged.stretches[0].samples == 80
    assert merged.joules_per_sample == 6


def test_skipped_updates_that_are_not_known_are_not_none_at_all() -> None:
    for skipped, told in (((2, 2), 2), ((None, None), None)):
        assert merge([answer_of_rank(1.0, 1, skipped_steps=each) for each in skipped], 0).skipped_steps == told


def test_a_rank_that_failed_speaks_for_all() -> None:
    lost = StockResult("failed", "connection closed", "train")
    full = StockResult("out_of_memory", "no memory", "train")
    assert merge([lost, full], 1).message == "rank 1: no memory"
    assert merge([answer_of_rank(1.0, 1), lost], 1).message == "rank 1: connection closed"
    silent = merge([answer_of_rank(1.0, 1), None], 1)
    assert silent.message == "rank 1 gave no answer, and torchrun ended with exit code 1"
