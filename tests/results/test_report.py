"""Test the report of a study: verdicts, JSON document, summary and notes."""

import dataclasses
import json
import math
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from reported import (
    BASELINE,
    BF16,
    CEILING,
    ENVIRONMENT,
    FP16,
    FP32,
    OVER,
    SOURCE,
    WINNER,
    WORKLOAD,
    completed,
    report,
    trial,
)

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths, Packed
from autotune.core.errors import StorageError, TooNoisyError, UnknownStudyError
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory
from autotune.core.schema import encode
from autotune.core.stop import NOTHING_LEFT, StopReason
from autotune.core.units import GIB, format_deviation, format_rate
from autotune.results.chart_data import OverPoint, speed_chart, step_chart
from autotune.results.html.charts import draw_speed_chart
from autotune.results.html.page import html_page
from autotune.results.json_document import report_document, trial_document
from autotune.results.report import Report, deviations_before, load_report
from autotune.results.study_view import StudyView, trial_view
from autotune.results.text import report_lines, summary_lines
from autotune.results.warnings import notes, sharding_notes
from autotune.results.wording import describe_data, state_of, times, verdict
from autotune.store.opening import open_store
from autotune.store.records import Stage, TrialRecord
from autotune.store.repository import Store


def test_verdicts() -> None:
    """Every way in which a trial can end, and one that has not."""
    others = {
        3: (trial(3, BF16, 16, completed(277.0)), "6.64×"),
        4: (trial(4, BF16, 8, OutOfMemory("killed", where="host")), "out of host memory"),
        5: (trial(5, FP16, 8, Failed("error", "ValueError: no")), "failed: ValueError: no"),
        6: (trial(6, FP16, 16, Failed("timeout", "after 180 s")), "timeout: after 180 s"),
        9: (trial(9, FP16, 32, Failed("killed", "killed by SIGSEGV")), "killed by SIGSEGV"),
        7: (trial(7, FP16, 32, completed(300.0, 22.9)), "low headroom"),
        8: (trial(8, FP16, 64, None), "running"),
    }
    made = report(BASELINE, WINNER, OVER, *(each for each, _ in others.values()))
    assert verdict(made, BASELINE) == "baseline"
    assert verdict(made, WINNER) == "7.45× best"
    assert verdict(made, OVER) == "out of memory"
    for each, words in others.values():
        assert verdict(made, each) == words


def test_the_baseline_can_be_the_best() -> None:
    made = report(BASELINE, best=0)
    assert verdict(made, BASELINE) == "baseline best"
    assert made.speedup() == 1.0
    # A rival that is nearly equal takes a little from its speed, which makes it no rival of its own.
    near = report(BASELINE, trial(1, FP16, 8, completed(41.5)), best=0)
    assert not any("the baseline was faster" in note for note in notes(near))


def test_what_deepspeed_computes_otherwise_than_ddp_is_said() -> None:
    arm = Arm("bf16", strategy="zero2", ranks=2)
    (said,) = sharding_notes(Candidate(arm, 8))
    assert "bf16 under DeepSpeed is not autocast" in said
    assert "accumulated" in said
    assert len(sharding_notes(Candidate(dataclasses.replace(arm, precision="fp16"), 8))) == 2
    assert sharding_notes(Candidate(dataclasses.replace(arm, precision="fp32"), 8)) == []


@pytest.mark.parametrize(("ratio", "text"), [(0.5, "0.50×"), (7.449, "7.45×"), (9.996, "10.0×"), (1234.5, "1,234.5×")])
def test_ratios(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_the_summary() -> None:
    """The winner, how fast, how much faster, how much memory, what it took."""
    told = report(BASELINE, WINNER, OVER)
    speed = told.speed(WINNER)
    assert summary_lines(told) == [
        "Best: per-device batch 32 × accumulation 2, bf16",
        f"  310.7 samples/s ± {speed.relative_half_width:.1%}, 159,078 tokens/s; 206 ms an optimizer step",
        "  7.45 × the TrainingArguments defaults (8 × 8  fp32: 41.7 samples/s)",
        "  1.00 × bf16 at the largest batch that fits (32 × 2  bf16: measured)",
        "  22.2 GiB of 23.0 GiB reserved at the peak, measured; headroom 819.2 MiB (3%)",
        "  3 trials (1 out of memory) in 30.0 s; the budget of 3 trials is spent",
    ]


def test_the_table_has_tokens_a_second_in_eighty_columns() -> None:
    made = report(BASELINE, WINNER)
    lines = report_lines(made)
    head, *rows = lines[lines.index("") + 1 :]
    assert head.split() == ["#", "batch×acc", "configuration", "samples/s", "tokens/s", "peak", "verdict"]
    assert [row[: head.index("tokens/s") + 8].split()[-1] for row in rows] == ["21,350", "159,078"]
    assert max(map(len, (head, *rows))) <= 80
    images = dataclasses.replace(made, workload={**made.workload, "task": "image-classification"})
    assert "took" in next(line for line in report_lines(images) if "batch×acc" in line)


def test_a_disturbed_baseline_makes_the_speed_up_a_bound() -> None:
    """It was slowed down, so the winner gains less. A winner that was disturbed too may gain more or less."""
    slowed, also = (
        dataclasses.replace(
            each, outcome=dataclasses.replace(each.outcome, disturbed=("a neighbour",), run_again=False)
        )
        for each in (BASELINE, WINNER)
        if isinstance(each.outcome, Completed)
    )
    line = "at most 7.45 × the TrainingArguments defaults (8 × 8  fp32: 41.7 samples/s, disturbed)"
    told = report(slowed, WINNER)
    assert f"  {line}" in summary_lines(told)
    assert "at most 7.45×" in html_page(report(slowed, WINNER))
    assert not any(report(*each).is_speedup_a_bound for each in ((slowed, also), (BASELINE, WINNER)))


def test_the_summary_of_a_search_for_the_largest_batch() -> None:
    options = {"objective": "max-batch", "effective_batch": None, "baseline": None}
    larger = trial(3, BF16, 40, completed(300.0, 22.9))
    text = "\n".join(summary_lines(report(WINNER, OVER, larger, **options)))
    assert "batch 40 does not fit: low headroom" in text
    assert "TrainingArguments defaults" not in text
    assert "no larger batch was tried" in "\n".join(summary_lines(report(WINNER, **options)))


@pytest.mark.parametrize(("samples", "larger", "is_told"), [(39, 16, True), (40, 16, False), (39, 36, False)])
def test_data_that_ends_before_a_larger_batch_is_told_where_the_batch_is_free(
    samples: int, larger: int, is_told: bool
) -> None:
    """The winner has 32, and batches are multiples of 8, or of 4 where that is too much."""
    other = trial(8, BF16, larger, OutOfMemory("out of memory"))
    free = report(WINNER, other, effective_batch=None, baseline=None)
    data = encode(DataSpec("x.jsonl", "json", "1", facts=DataFacts(samples)))
    told = "\n".join(summary_lines(dataclasses.replace(free, workload={**free.workload, "data": data})))
    assert (f"the data has {samples} samples, so no larger batch was tried" in told) is is_told


def test_a_baseline_that_differs_in_what_ddp_does_besides_is_told_apart() -> None:
    default = Arm("bf16", strategy="ddp", ranks=2)
    lean = dataclasses.replace(default, ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)

    def of_two(number: int, arm: Arm, batch: int, rate: float, stage: Stage) -> TrialRecord:
        made = trial(number, arm, batch, completed(rate), stage)
        return dataclasses.replace(made, candidate=Candidate(arm, batch, 32 // batch))

    baseline = of_two(0, default, 8, 310.0, "baseline")
    slower = report(baseline, of_two(1, lean, 8, 300.0, "search"))
    told = " ".join(summary_lines(slower))
    assert "differs from the baseline in ddp_find_unused_parameters=False and ddp_broadcast_buffers=False alone" in told
    # One may leave out work, or look for unused parameters.
    assert "the baseline was faster, by 3.3%, which is noise: they differ in settings of DDP alone" in told
    assert "options exclude" not in told
    other = report(baseline, of_two(1, lean, 32, 300.0, "search"))
    assert "differs from the baseline" not in " ".join(summary_lines(other))


def test_the_summary_without_a_baseline() -> None:
    broken = trial(0, FP32, 8, OutOfMemory("no"), "baseline")
    text = "\n".join(summary_lines(report(broken, WINNER, baseline=None)))
    assert "defaults did not complete" in text
    text = "\n".join(summary_lines(report(WINNER, baseline=None, measure_baseline=False)))
    assert "defaults" not in text


def test_the_summary_without_a_result() -> None:
    lines = summary_lines(report(OVER, trial(3, FP16, 8, Failed("error", "no")), best=None, baseline=None))
    assert lines == [
        "No feasible trial in the study a-study: 2 trials (1 out of memory, 1 failed) in 30.0 s; "
        "the budget of 3 trials is spent"
    ]


def test_the_summary_of_a_search_that_runs_calls_no_trial_infeasible() -> None:
    made = report(BASELINE, trial(3, FP16, 8, None), best=None, state="running")
    lines = summary_lines(dataclasses.replace(made, study=dataclasses.replace(made.study, ended_at=None)))
    assert lines == [
        "No answer yet in the study a-study: 2 trials (1 running)",
    ]


def packed_workload() -> dict[str, Any]:
    lengths = Lengths(30, 110, 120, 122, 100.0, 0.0, 0.0, (1,))
    facts = DataFacts(36, lengths=lengths, packed=Packed(601, lengths))
    spec = DataSpec("/data/texts.jsonl", "json", "0", tokenizer="t", packing=True, facts=facts)
    return {**WORKLOAD, "task": "causal-lm", "data": spec.document()}


def test_rows_of_packed_samples_are_called_rows() -> None:
    made = dataclasses.replace(report(BASELINE, WINNER), workload=packed_workload())
    study = dataclasses.replace(made.study, request={**made.study.request, "effective_batch": None})
    text = "\n".join(report_lines(dataclasses.replace(made, study=study)))
    assert "rows/s" in text
    assert "the data has 36 rows" in text
    assert "samples/s" not in text


def test_images_have_no_tokens() -> None:
    made = report(BASELINE, WINNER)
    images = dataclasses.replace(made, workload={**WORKLOAD, "task": "image-classification", "seq_len": 1})
    assert "tokens" not in "\n".join(summary_lines(images))
    assert trial_document(trial_view(images, WINNER))["tokens_per_second"] is None
    assert trial_document(trial_view(made, WINNER))["tokens_per_second"] == pytest.approx(310.7 * 512)


def test_a_batch_without_padding_is_padded_to_nothing() -> None:
    facts = DataFacts(118, lengths=Lengths(30, 110, 120, 122, 100.0, 0.0, 0.0, (1,)))
    data = {**WORKLOAD, "data": DataSpec("/data/texts.jsonl", "json", "0", facts=facts).document()}
    lengths = "texts.jsonl, 118 samples, 30 to 122 tokens (median 110), "
    assert describe_data(data) == f"{lengths}padded to the longest of a batch"
    assert describe_data(data, padding_free=True) == f"{lengths}a batch in one row without padding"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "512 tokens, full length"),
        ({"padding": 0.3}, "512 tokens, 30% padding"),
        ({"task": "image-classification"}, "synthetic images"),
        ({"task": "speech-seq2seq", "seq_len": 448}, "synthetic speech, 448 target tokens"),
        (
            {"model": "run.py", "task": "own", "source": {"interface": {"lengths": {"unknown": "it makes rows"}}}},
            "as run.py makes it, samples of unknown lengths: it makes rows",
        ),
    ],
)
def test_the_data_in_words(changes: dict[str, Any], text: str) -> None:
    assert describe_data({**WORKLOAD, **changes}) == text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"new_shape_seconds": 0.1, "epoch_shapes": 30, "steady_step_seconds": 0.1},
            "640.0 samples/s once all shapes were seen: the first epoch meets about 30, each of which takes 100 ms",
        ),
        ({"new_shape_seconds": 0.1, "epoch_shapes": 9}, None),
        ({"new_shape_seconds": 0.1}, "the first batch of each new shape takes 100 ms longer"),
        ({"new_shape_seconds": 0.01}, None),
        ({"run_steps": 3000, "run_epochs": 3.0}, "3 epochs: 10m15s instead of 1h16m"),
        ({"run_steps": 3000}, "3000 steps: 10m15s instead of 1h16m"),
    ],
)
def test_what_new_shapes_cost_is_told_where_one_would_notice(changes: dict[str, Any], told: str | None) -> None:
    """Of data whose lengths are known how long in all; of code of one's own, with steps of 205 ms, how long each."""
    measured = completed(312.0)
    fed = Completed(dataclasses.replace(measured.measurement, **changes))
    text = "\n".join(summary_lines(report(BASELINE, trial(1, BF16, 32, fed))))
    assert told in text if told else "for the first time" not in text


NOISY = Completed(dataclasses.replace(completed(300.0).measurement, step_seconds_each=(0.1, 0.3, 0.24)))
NOTES: dict[str, tuple[Report, str]] = {
    "micro-steps": (report(BASELINE, trial(1, BF16, 8, completed(300, micro_steps=3))), "with 3 of its 8 micro-steps"),
    "noise": (report(BASELINE, trial(1, BF16, 32, NOISY)), "differ from the winner's speed by"),
    "world": (report(BASELINE, WINNER, world_size=4), "4 devices also spend time"),
    "interrupted": (report(BASELINE, WINNER, state="interrupted"), "the search is interrupted"),
    "odd batch": (report(BASELINE, trial(1, BF16, 4, completed(300, micro_steps=16))), "not a multiple of 8"),
    "few trials": (
        report(
            trial(0, FP32, 4, completed(200, micro_steps=16), "baseline"),
            trial(1, BF16, 4, completed(300, micro_steps=16)),
        ),
        "not a multiple of 8: the search ended before one of those was tried",
    ),
    "own memory": (
        dataclasses.replace(
            report(BASELINE, WINNER),
            workload={**WORKLOAD, "source": {**SOURCE, "interface": {"memory_unknown": "it has no loss"}}},
        ),
        "memory was not predicted, so that trials found out what fits: it has no loss",
    ),
    "slower": (report(trial(0, FP32, 8, completed(400.0), "baseline"), WINNER), "the baseline was faster, by 28.7%"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_the_reader_should_know(name: str) -> None:
    made, words = NOTES[name]
    (note,) = notes(made)
    assert words in note
    assert f"  note: {note}" in summary_lines(made)


@pytest.mark.parametrize("is_cut_short", [True, False])
def test_one_configuration_is_worth_a_note_where_a_budget_left_it_at_that(is_cut_short: bool) -> None:
    made = report(WINNER, trial(1, BF16, 32, completed(310.0), "final"), best=1, baseline=None)
    if not is_cut_short:
        study = dataclasses.replace(made.study, stop_reason=NOTHING_LEFT.reason, stopped_because=NOTHING_LEFT.sentence)
        made = dataclasses.replace(made, study=study)
    assert any("give the search more --trials" in note for note in notes(made)) == is_cut_short


@pytest.mark.parametrize(
    ("speed", "told"),
    [
        (250.0, "1.24 ± 0.05 × the next fastest (32 × 2  fp16)"),
        (309.0, "1.01 ± 0.04 × the next fastest (32 × 2  fp16): not distinguishable"),
        (313.0, "0.99 ± 0.04 × the next fastest (32 × 2  fp16): not distinguishable, and the best is plainer"),
    ],
)
def test_the_winner_is_compared_with_the_next_fastest(speed: float, told: str) -> None:
    made = report(BASELINE, WINNER, trial(2, FP16, 32, completed(speed)), trial(3, BF16, 8, completed(200.0)))
    assert f"  {told}" in summary_lines(made)
    assert not any("the next fastest" in line for line in summary_lines(report(BASELINE, WINNER)))


def test_ones_own_settings_that_nothing_beats_are_the_answer() -> None:
    own = {**WORKLOAD, "task": "own", "source": SOURCE}
    made = dataclasses.replace(report(WINNER, trial(2, FP16, 32, completed(318.0)), best=1, baseline=1), workload=own)
    told = "\n".join(summary_lines(made))
    assert "your own settings are as fast as anything tried" in told
    assert "(32 × 2  fp16): not distinguishable, and your own settings need no change" in told
    assert "× your own settings" not in told


def test_what_others_disturbed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slowed = dataclasses.replace(completed(200.0), disturbed=("others",), others_share=0.5, run_again=False)
    made = report(BASELINE, WINNER, trial(2, FP16, 32, slowed))
    why = "32 × 2  fp16 may be faster than 32 × 2  bf16, since other processes used the device for 50% of the time of"
    assert made.too_noisy is None
    monkeypatch.delenv("AUTOTUNE_ACCEPT_NOISE")
    made = dataclasses.replace(made)
    first, second, *_ = summary_lines(made)
    assert first.startswith(f"Too noisy to tell: {why}")
    assert second == "Led, and is no answer: per-device batch 32 × accumulation 2, bf16"
    assert report_document(made)["too_noisy"].startswith(why)
    with pytest.raises(TooNoisyError, match="--anyway"):
        made.check_is_told()
    little = dataclasses.replace(slowed, others_share=0.1)
    assert report(BASELINE, WINNER, trial(2, FP16, 32, little)).too_noisy is None


@pytest.mark.parametrize(("steps", "is_told"), [((0.1, 0.1, 0.1), True), ((0.05, 0.3, 0.1), False)])
def test_steps_that_differ_too_much_are_no_answer(
    steps: tuple[float, ...], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOTUNE_ACCEPT_NOISE")
    outcome = completed(280.0)
    uneven = dataclasses.replace(outcome.measurement, step_seconds_each=steps)
    made = report(BASELINE, WINNER, trial(2, FP16, 32, dataclasses.replace(outcome, measurement=uneven)))
    assert (made.too_noisy is None) == is_told


def test_one_number_for_the_winner() -> None:
    """Everything that shows its speed shows the one by which it was chosen."""
    made = report(BASELINE, WINNER, *(trial(2 + n, BF16, b, completed(309.0)) for n, b in enumerate((8, 16, 64))))
    document, speed = report_document(made), made.speed(made.best)
    assert speed == made.history.speed(made.best.candidate)
    shown = {document["best"]["samples_per_second"], document["next_run"]["samples_per_second"]}
    assert shown == {speed.samples_per_second}
    assert document["speedup"] == pytest.approx(speed.samples_per_second / 41.7)
    assert f"{speed.samples_per_second:.1f} samples/s" in summary_lines(made)[1]
    (row,) = [row for row in step_chart(made).rows if row.mark == "best"]
    assert row.seconds == pytest.approx(64 / speed.samples_per_second)
    # A row of the table is one process.
    assert document["trials"][1]["samples_per_second"] == 310.7


def test_an_interval_that_per_cents_would_misstate_is_told_by_its_ends() -> None:
    """Of a noisy machine: 310 ± 200 % would say that the next run may stand still."""
    others = trial(2, BF16, 32, completed(150.0)), trial(3, FP16, 32, completed(200.0))
    view = StudyView(report(BASELINE, trial(1, BF16, 32, completed(310.7)), *others))
    (low, high), told = view.best.speed.interval(), "\n".join(summary_lines(view.report))
    assert f" samples/s ({format_rate(low)} to {format_rate(high)})," in told
    assert f"by {format_deviation(view.best.speed.relative_half_width)}: the machine was noisy" in told
    assert ", give or take a factor of " in told
    assert "±" not in told
    step = f"{format_rate(1000 * view.best.measured.step_seconds)} ms ×/÷ "
    assert step in html_page(report(BASELINE, trial(1, BF16, 32, completed(310.7)), *others))


def test_one_uncertainty_for_the_baseline() -> None:
    """The note says what the chart shows: of all its processes, with what differs between them."""
    made = report(BASELINE, trial(2, FP32, 8, completed(25.0)), WINNER)
    (row,) = [row for row in step_chart(made).rows if row.mark == "baseline"]
    assert row.speed.relative_half_width > 0.2
    assert f"the baseline's step time is uncertain by {format_deviation(row.speed.relative_half_width)}," in " ".join(
        notes(made)
    )


def test_what_the_machine_showed_before_counts() -> None:
    """Ten candidates of another workload, each measured in two processes 6 % apart; what comes later does not count."""
    alone = report(BASELINE, WINNER)
    study = alone.study
    others = []
    for number in range(10):
        arm, when = (BF16, study.started_at - timedelta(hours=1)) if number < 9 else (FP16, study.started_at)
        for speed in (100.0, 106.0):
            measured = trial(number, arm, 2 ** (number % 4), completed(speed))
            others.append(
                dataclasses.replace(
                    measured, study_id="other", workload_id=f"{number}", started_at=when, id=f"{number} {speed}"
                )
            )
    before = deviations_before(others, study)
    (found,) = before.values()
    assert found.degrees == 9
    assert found.sum_of_squares == pytest.approx(9 * math.log(1.06) ** 2 / 2)
    wider = dataclasses.replace(alone, before=before).speed(alone.best)
    narrow = alone.speed(alone.best)
    assert wider.relative_half_width > 1.5 * narrow.relative_half_width
    assert deviations_before(others, dataclasses.replace(study, environment_id="elsewhere")) == {}


@pytest.mark.parametrize(
    ("reason", "best", "told"),
    [
        (NOTHING_LEFT.reason, 1, "finished"),
        (StopReason.TIME, 1, "budget spent"),
        (StopReason.TRIALS, 0, "budget spent"),
        (StopReason.TRIALS, None, "budget spent"),
    ],
)
def test_a_search_that_spent_its_budget_is_not_called_finished(reason: StopReason, best: int | None, told: str) -> None:
    made = report(BASELINE, WINNER, best=best)
    assert state_of(dataclasses.replace(made.study, stop_reason=reason)) == told
    running = report(BASELINE, WINNER, state="running")
    assert state_of(dataclasses.replace(running.study, stop_reason=reason)) == "running"


def test_the_peak_and_the_headroom_are_those_of_all_processes() -> None:
    made = report(
        BASELINE,
        trial(1, BF16, 32, completed(300.0, 22.2)),
        trial(2, BF16, 32, completed(301.0, 21.0), "final"),
        best=2,
    )
    assert (
        "  22.2 GiB of 23.0 GiB reserved at the peak, the most of 2 processes; headroom 819.2 MiB (3%)"
        in summary_lines(made)
    )


def test_what_limits_a_step_is_not_said_where_it_was_not_measured() -> None:
    """On a CPU only the waiting for data is known."""
    for busy, share, told in (
        (None, 0.03, "3.0% of a step is spent"),
        (None, 0.3, "30.0% of a step is spent"),
        (0.65, 0.3, "30.0% of a step is spent"),
        (None, 0.6, "the data loader is the bottleneck: 60.0%"),
        (0.95, 0.03, "computing, not the data loader, is the bottleneck: 3.0%"),
    ):
        measured = dataclasses.replace(completed(312.0).measurement, data_seconds=share * 64 / 312, gpu_busy_share=busy)
        made = report(BASELINE, trial(1, BF16, 32, Completed(measured)))
        made = dataclasses.replace(made, workload={**WORKLOAD, "task": "own"})
        assert any(line.strip().startswith(told) for line in summary_lines(made)), summary_lines(made)


@pytest.mark.parametrize(
    ("rate", "task", "is_said"), [(60_000.0, "own", True), (60_000.0, "mlm", False), (312.0, "own", False)]
)
def test_a_promise_for_very_short_steps_of_ones_own_is_said_to_be_low(rate: float, task: str, is_said: bool) -> None:
    made = report(BASELINE, trial(1, BF16, 32, completed(rate)))
    made = dataclasses.replace(made, workload={**WORKLOAD, **({"task": task} if task == "own" else {})})
    said = "\n".join(summary_lines(made))
    assert ("the winner's takes 1 ms: your own run may be faster than is promised" in said) is is_said


def test_what_a_loop_does_besides_its_steps_is_told() -> None:
    """The limit is 24 GiB, a GiB of it headroom."""
    plain = completed(312.0, 12.0).measurement
    measured = dataclasses.replace(plain, growth_bytes=2**20, evaluation_seconds=3.9, evaluates_every=5)
    said = "\n".join(summary_lines(report(BASELINE, trial(1, BF16, 32, Completed(measured)))))
    assert "your code evaluates every 5 steps, for 3.9 s, which the speed leaves out" in said
    assert re.search(r"memory still grew by 1\.0 MiB a step .* reached after about 1[12],\d{3} steps", said)


def test_the_best_is_plotted_at_its_mean_and_a_far_ceiling_is_left_out() -> None:
    twice = report(
        BASELINE, trial(1, BF16, 32, completed(300.0, 2.0)), trial(2, BF16, 32, completed(320.0, 2.0), "final"), best=2
    )
    chart, speed = speed_chart(twice), twice.speed(twice.best)
    (best,) = [point for point in chart.points if point.mark == "best"]
    assert best.samples_per_second == speed.samples_per_second == pytest.approx((300 * 320) ** 0.5)
    assert best.relative_spread == speed.relative_half_width
    near = report(BASELINE, WINNER)
    assert not speed_chart(near).leaves_ceiling_out
    small = [dataclasses.replace(trial(n, FP32, 8, completed(40.0, 0.1)), stage="baseline") for n in (0, 1)]
    far = speed_chart(report(*small))
    assert far.leaves_ceiling_out
    drawn = str(draw_speed_chart(far, "far"))
    assert "far to the right" in drawn
    assert "ceiling-line" not in drawn
    assert not dataclasses.replace(far, over=(OverPoint(0, OVER.candidate, ""),)).leaves_ceiling_out


def test_nothing_to_note() -> None:
    assert not notes(report(BASELINE, WINNER, OVER))


def test_the_result_is_that_of_all_processes_of_the_winner() -> None:
    """As the search chose it: two processes, 300 and 320 samples/s; the promise holds what they differ by."""
    again = trial(3, BF16, 32, completed(320.0, 22.2), "final")
    once = report(BASELINE, trial(1, BF16, 32, completed(300.0, 22.2)))
    twice = report(BASELINE, trial(1, BF16, 32, completed(300.0, 22.2)), again, best=3)
    document = report_document(twice)
    promised = document["next_run"]
    assert promised["processes_measured"] == 2
    assert promised["samples_per_second"] == pytest.approx((300 * 320) ** 0.5)
    assert promised["samples_per_second_low"] < 300 < 320 < promised["samples_per_second_high"]
    assert document["speedup"] == pytest.approx(promised["samples_per_second"] / 41.7)
    assert f"  {promised['samples_per_second']:.1f} samples/s (" in summary_lines(twice)[1]
    assert report_document(once)["next_run"]["processes_measured"] == 1
    assert report_document(report(BASELINE, OVER, best=None))["next_run"] is None


def test_the_document_is_plain_json() -> None:
    """What was not measured is null; the list of fields that only exports need is left out."""
    made = report(BASELINE, WINNER, OVER)
    document = json.loads(json.dumps(report_document(made)))
    assert datetime.fromisoformat(document["started_at"]) == made.study.started_at
    assert datetime.fromisoformat(document["ended_at"]) == made.study.ended_at
    assert document["speedup"] == pytest.approx(310.7 / 41.7)
    assert document["best"]["number"] == 1
    assert document["baseline"]["number"] == 0
    assert document["environment"] == without(ENVIRONMENT, "training_arguments_fields")
    assert document["ceiling_bytes"] == 23 * GIB
    assert document["ceiling"]["line_bytes"] == CEILING.line_bytes
    over = document["trials"][2]
    assert over["state"] == "out_of_memory"
    assert over["feasible"] is False
    assert over["samples_per_second"] is None
    assert over["headroom_bytes"] is None
    assert over["peak_reserved_bytes"] == 23 * GIB
    assert over["message"] == "CUDA out of memory"


def test_the_document_of_an_unfinished_study() -> None:
    document = report_document(report(trial(0, FP32, 8, None), best=None, baseline=None, state="running"))
    assert document["best"] is None
    assert document["speedup"] is None
    assert document["trials"][0]["state"] == "running"


def record(store: Store, recorded: Report) -> Report:
    """Write a report's parts into the database; the report with the ids that they have there."""
    same = {
        "workload_id": store.intern_workload(recorded.workload, "workload"),
        "environment_id": store.intern_environment(recorded.environment, "environment"),
    }
    study = dataclasses.replace(recorded.study, **same)
    store.create_study(study)
    trials = tuple(dataclasses.replace(each, study_id=study.id, **same) for each in recorded.trials)
    for each in trials:
        store.start_trial(each)
    return dataclasses.replace(recorded, study=study, trials=trials)


def without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


WHOLE = report(BASELINE, WINNER, OVER)
NO_SPEED = Completed(Measurement(0.0, (0.0,), 0.0, 0.0, GIB, GIB))


def test_a_record_that_is_no_trial_is_refused_in_one_line(tmp_path: Path) -> None:
    damaged = report(BASELINE, dataclasses.replace(WINNER, candidate=Candidate(Arm("fp8"), 8)))  # type: ignore[arg-type]
    with open_store(str(tmp_path / "studies.db")) as store:
        record(store, damaged)
        with pytest.raises(StorageError, match="malformed Arm: Invalid enum value 'fp8'"):
            load_report(store, "a-study")


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (dataclasses.replace(WHOLE, environment={}), "its environment has no packages"),
        (dataclasses.replace(WHOLE, environment=without(ENVIRONMENT, "device_kind")), "has no device_kind"),
        (dataclasses.replace(WHOLE, environment={**ENVIRONMENT, "packages": {}}), "no versions of torch"),
        (dataclasses.replace(WHOLE, workload={**WORKLOAD, "task": None}), "its workload has no task"),
        (dataclasses.replace(WHOLE, study=dataclasses.replace(WHOLE.study, request={})), "has no effective_batch"),
        (dataclasses.replace(WHOLE, workload={**WORKLOAD, "dtype": "float7"}), "its dtype 'float7' is not known"),
        (report(BASELINE, dataclasses.replace(WINNER, candidate=Candidate(BF16, 0))), "trial 1 has the batch 0"),
        (report(BASELINE, trial(1, BF16, 8, NO_SPEED)), "trial 1 is completed without a step time"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, damaged: Report, problem: str) -> None:
    with open_store(str(tmp_path / "studies.db")) as store:
        record(store, damaged)
        with pytest.raises(StorageError, match=problem) as refused:
            load_report(store, "a-study")
    assert "the study 'a-study' in" in refused.value.message
    assert "restore the database" in refused.value.hint


def test_a_report_is_read_from_the_database(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "studies.db")) as store:
        recorded = record(store, WHOLE)
        study, trials = recorded.study, recorded.trials
        made = load_report(store, "a-study")
        assert made == Report(study, WORKLOAD, ENVIRONMENT, CEILING, trials)
        assert made.best == trials[1]
        assert made.baseline == trials[0]


def test_an_unknown_study(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "studies.db")) as store:
        with pytest.raises(UnknownStudyError, match="autotune search"):
            load_report(store, "another")
        same = {
            "workload_id": store.intern_workload(WORKLOAD, "w"),
            "environment_id": store.intern_environment({}, "e"),
        }
        store.create_study(dataclasses.replace(report(WINNER).study, **same))
        with pytest.raises(UnknownStudyError, match=r"'another'.*a-study"):
            load_report(store, "another")
