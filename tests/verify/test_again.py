"""Test what a repeated trial shows beside a promise and a stock run, on invented and recorded figures."""

import dataclasses
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from test_comparison import around
from test_throughput_promise import GPU, stock_result, stretches, target

from autotune.core.errors import DeviceError, PromiseMissedError, TrialServerError
from autotune.core.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory
from autotune.core.schema import encode
from autotune.core.units import GIB
from autotune.core.verification import StockResult
from autotune.devices.lock import FOLDER_VARIABLE, Holder, Lock
from autotune.verify import again as module
from autotune.verify import throughput
from autotune.verify.again import Again, Finding, NotMeasured, find, measure_again
from autotune.verify.comparison import Interval, Verdict, compare
from autotune.verify.json_document import verification_document
from autotune.verify.text import verification_lines
from autotune.verify.throughput import Verification, verify

# gpt2-medium on two H200, 22 November 2026: what was promised, and what a stock run reached.
GPT2_PROMISE, GPT2_RUN = Interval(140.8, 123.8, 160.2), around(110.5, 0.05)


@pytest.mark.parametrize(
    ("promise", "run", "again", "finding"),
    [
        pytest.param(GPT2_PROMISE, GPT2_RUN, around(111, 0.01), "machine_slower", id="as slow as the run"),
        pytest.param(GPT2_PROMISE, GPT2_RUN, around(139, 0.01), "run_differs", id="as fast as promised"),
        pytest.param(GPT2_PROMISE, GPT2_RUN, around(127, 0.01), "between", id="compatible with both"),
        pytest.param(GPT2_PROMISE, GPT2_RUN, around(90, 0.01), "machine_varies", id="much slower than both"),
        pytest.param(GPT2_PROMISE, around(60, 0.05), around(111, 0.01), "machine_varies", id="between the two"),
        pytest.param(GPT2_PROMISE, around(60, 0.05), around(139, 0.01), "run_differs", id="the run much slower"),
        pytest.param(GPT2_PROMISE, around(139, 0.01), around(142, 0.01), "agrees", id="all three alike"),
        pytest.param(around(100, 0.02), around(105, 0.005), around(101, 0.005), "machine_varies", id="the run faster"),
        pytest.param(around(100, 0.02), around(97, 0.02), around(99, 0.005), "agrees", id="none of it is certain"),
        pytest.param(GPT2_PROMISE, GPT2_RUN, around(111, 0.3), "between", id="an uncertain trial"),
        pytest.param(GPT2_PROMISE, GPT2_RUN, Interval(139, 0, float("inf")), "between", id="a single step"),
    ],
)
def test_a_repeated_trial_tells_a_slower_machine_from_a_slower_run(
    promise: Interval, run: Interval, again: Interval, finding: Finding
) -> None:
    assert find(promise, run, again) == finding
    assert find(promise.scaled(3), run.scaled(3), again.scaled(3)) == finding


@pytest.mark.parametrize(
    ("run", "again", "finding", "wrong"),
    [
        pytest.param(0.8, 0.8, "machine_slower", "run_differs", id="the machine is 20 % slower"),
        pytest.param(0.8, 1.0, "run_differs", "machine_slower", id="the run alone is 20 % slower"),
    ],
)
@pytest.mark.parametrize(("deviation", "least_found"), [(0.01, 0.95), (0.03, 0.95), (0.06, 0.5)])
def test_a_cause_is_hardly_ever_taken_for_the_other(
    run: float, again: float, finding: Finding, wrong: Finding, deviation: float, least_found: float
) -> None:
    """Processes differ by up to 6 %, as those of host-bound steps; the promise comes from two of them."""
    generator = random.Random(3)

    def process(speed: float) -> float:
        return speed * math.exp(generator.gauss(0, deviation))

    found: list[Finding] = []
    for _ in range(1000):
        promised = 100 * math.exp(generator.gauss(0, deviation / math.sqrt(2)))
        # Student's t of the few processes whose deviation a search knows, about 2.6.
        width = 2.6 * deviation * math.sqrt(1.5)
        promise = Interval(promised, promised * math.exp(-width), promised * math.exp(width))
        obtained = around(process(100 * run), 0.03)
        if compare(promise, obtained) != "kept":
            found.append(find(promise, obtained, around(process(100 * again), 0.01)))
    assert found.count(finding) / len(found) > least_found
    assert found.count(wrong) / len(found) < 0.02


PAUSES = {"evaluate": 1.0, "save": 2.0}


def measurement_at(speed: float, *, spread: float = 0.01, **changes: Any) -> Measurement:
    """A trial of 64 samples a step at this speed."""
    step = 64 / speed
    return Measurement(step, (step,) * 3, spread, speed, 19 * GIB, 20 * GIB, **changes)


def verification_of(run: float, again: float, *, busy: float | None = None, **changes: Any) -> Verification:
    """A stock run at one speed and a repeated trial at another; 320 samples/s ± 5 % were promised."""
    answer = stock_result(run, pause_seconds=PAUSES, **changes)
    return Verification(target(0.05, busy=busy), 100, answer, Again(measurement_at(again)))


def test_a_run_and_a_trial_above_the_promise_show_that_the_search_measured_low() -> None:
    found = verification_of(400.0, 396.0)
    assert (found.verdict(), found.finding) == ("faster", "machine_faster")
    found.check()
    assert "this machine is faster now than in the search" in found.again_lines()[0]
    assert verification_of(400.0, 320.0).finding == "machine_varies"


SLOWER = "measured again just now as in the search: 253.0 ± 1.0% samples/s, 20.9% below the search's 320.0"


def hint_of_miss(verification: Verification) -> str:
    with pytest.raises(PromiseMissedError) as raised:
        verification.check()
    return raised.value.hint


def test_a_machine_that_is_slower_is_told_and_the_promise_stays_missed() -> None:
    found = verification_of(250.0, 253.0)
    lines = verification_lines(found)
    assert f"  {SLOWER}: this machine is slower now" in lines
    assert "  the stock run is 1.2% below that" in lines
    assert found.verdict() == "missed"
    assert "where it stays so, search again with --fresh" in hint_of_miss(found)
    assert f"; {SLOWER}: this machine is slower now" in str(found)
    document = encode(verification_document(found))
    assert (document["verdict"], document["not_measured_again"]) == ("missed", None)
    assert document["measured_again"] == {
        "samples_per_second": 253.0,
        "samples_per_second_low": pytest.approx(253 / 1.01),
        "samples_per_second_high": pytest.approx(253 / 0.99),
        "peak_allocated_bytes": 19 * GIB,
        "peak_reserved_bytes": 20 * GIB,
        "samples_per_second_ratio": pytest.approx(253 / 320),
        "stock_ratio": pytest.approx(250 / 253),
        "disturbed": [],
        "finding": "machine_slower",
    }
    assert f"{SLOWER}: this machine is slower now" in document["why"]


@pytest.mark.parametrize(
    ("again", "changes", "told", "hint"),
    [
        pytest.param(
            253.0, {"busy": 0.46}, f"{SLOWER}: this host is slower now",
            "this host is slower than at the time of the search", id="where the host limits the step",
        ),
        pytest.param(
            253.0, {"packages": {"torch": "2.14.0"}},
            f"{SLOWER}: this machine is slower now, or its other versions of libraries are",
            "search again with these versions of the libraries", id="other libraries",
        ),
        pytest.param(
            318.0, {}, "the stock run is 21.4% below that: it was disturbed, or differs from a trial",
            "verify again", id="the run alone is slower",
        ),
        pytest.param(
            200.0, {}, "the stock run is 25.0% above that: the speed of this machine changes from minute to minute",
            "verify again on an idle machine", id="the machine varies",
        ),
    ],
)  # fmt: skip
def test_what_made_the_run_slower_is_told(again: float, changes: dict[str, Any], told: str, hint: str) -> None:
    found = verification_of(250.0, again, **changes)
    assert told in found.again_lines()
    assert hint_of_miss(found).startswith(hint)


def test_a_trial_between_the_two_decides_nothing() -> None:
    found = verification_of(293.0, 308.0)
    assert found.finding == "between"
    assert "too little to tell" in found.again_lines()[1]
    assert "search again on an idle machine" in hint_of_miss(found)


def test_memory_that_is_missed_as_well_keeps_its_hint() -> None:
    assert "more --headroom" in hint_of_miss(verification_of(250.0, 253.0, peak=22 * GIB))


def test_what_agrees_is_told_without_a_conclusion() -> None:
    found = verification_of(320.0, 320.0)
    assert found.again_lines() == [
        "measured again just now as in the search: 320.0 ± 1.0% samples/s, as fast as the search's 320.0",
        "the stock run is as fast as that",
    ]
    document = encode(verification_document(found))
    assert (document["verdict"], document["why"], document["measured_again"]["finding"]) == ("kept", [], "agrees")


def test_what_disturbed_the_trial_is_told() -> None:
    disturbed = Again(measurement_at(253.0), ("process 71 took 30 % of the GPU",))
    lines = dataclasses.replace(verification_of(250.0, 253.0), again=disturbed).again_lines()
    assert lines[-1] == "this trial was disturbed: process 71 took 30 % of the GPU"


def test_the_time_of_new_lengths_is_part_of_the_comparison() -> None:
    """20 steps of 0.2 s in each of two stretches, in which 8 lengths of 0.5 s are new: 213 of 320 samples/s."""
    plain = target(0.05)
    report = dataclasses.replace(plain.report, workload={**plain.report.workload, "data": {"source": "x.jsonl"}})
    promised = dataclasses.replace(plain.promised, new_length_seconds=0.5)
    with_data = dataclasses.replace(plain, report=report, promised=promised)
    timed = tuple(dataclasses.replace(each, seconds=6.0) for each in stretches([320.0] * 2, 20, new_shapes=4))
    found = Verification(with_data, 100, stock_result(stretches=timed), Again(measurement_at(320.0)))
    assert found.again_lines()[1] == "the stock run is as fast as that"


FAILURES = [
    (KeyboardInterrupt(), "it was interrupted"),
    (TrialServerError("the trial server did not start"), "the trial server did not start"),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (OutOfMemory("CUDA out of memory"), "memory ran out: CUDA out of memory"),
    (Failed("killed", "killed by SIGKILL"), "killed by SIGKILL"),
]


@pytest.mark.parametrize(("came", "why"), FAILURES, ids=[type(came).__name__ for came, _ in FAILURES])
def test_a_trial_that_fails_loses_nothing_of_the_run(
    came: BaseException | Outcome, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_to_end(*_: Any) -> Outcome:
        if isinstance(came, BaseException):
            raise came
        return came

    monkeypatch.setattr(module, "_outcome", run_to_end)
    again = measure_again(target(), tmp_path / "verify.log", lambda text: None)
    assert again == NotMeasured(why)
    found = Verification(target(), 100, stock_result(250.0, pause_seconds=PAUSES), again)
    assert f"  the winner's trial could not be measured again: {why}" in verification_lines(found)
    assert "search again on an idle machine" in hint_of_miss(found)
    document = encode(verification_document(found))
    assert (document["verdict"], document["measured_again"]) == ("missed", None)
    assert document["not_measured_again"] == why


def test_a_gpu_that_a_search_holds_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    with Lock(GPU.uuid) as lock:
        assert lock.acquire("other") is None
        with pytest.raises(DeviceError, match=r"is in use by process .*study other, since ") as caught:
            verify(target(), 100, tmp_path / "mine" / "verify.log")
    assert caught.value.hint == "verify again when that has ended"
    assert not (tmp_path / "mine").exists()


def test_no_search_begins_between_the_stock_run_and_the_repeated_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders: list[Holder | None] = []

    def look(*_: object) -> NotMeasured:
        with Lock(GPU.uuid) as other:
            holders.append(other.acquire("other"))
        return NotMeasured("nothing is run here")

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(throughput, "run_fresh", lambda *_, **__: stock_result(250.0))
    monkeypatch.setattr(throughput, "measure_again", look)
    verify(target(), 100, tmp_path / "verify.log")
    (holder,) = holders
    assert holder.pid == os.getpid()


@pytest.mark.parametrize(
    ("answer", "asked", "verdict", "is_measured"),
    [
        pytest.param(stock_result(250.0), False, "missed", True, id="missed"),
        pytest.param(
            stock_result(stretches=stretches([270.0, 350.0] * 5)), False, "cannot_tell", True, id="cannot tell"
        ),
        pytest.param(stock_result(320.0), False, "kept", False, id="kept"),
        pytest.param(stock_result(400.0), False, "faster", True, id="faster than promised"),
        pytest.param(stock_result(320.0), True, "kept", True, id="kept, and asked for"),
        pytest.param(stock_result(320.0, peak=22 * GIB), False, "missed", False, id="memory alone is missed"),
        pytest.param(StockResult("out_of_memory", "none left", "train"), True, "missed", False, id="out of memory"),
    ],
)
def test_the_winner_is_measured_again_where_the_speed_is_not_kept(
    answer: StockResult, asked: bool, verdict: Verdict, is_measured: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(throughput, "run_fresh", lambda *words, **options: answer)
    monkeypatch.setattr(module, "_outcome", lambda *words: Completed(measurement_at(320.0), disturbed=("busy",)))
    said: list[str] = []
    found = verify(target(0.02), 100, tmp_path / "verify.log", again=asked, note=said.append)
    assert found.verdict() == verdict
    assert (found.again is not None) == is_measured == bool(said)
    assert found.measured_again == (Again(measurement_at(320.0), ("busy",)) if is_measured else None)
