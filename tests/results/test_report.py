"""Test the report of a study: verdicts, JSON document, summary and notes."""

import dataclasses
import json
import math
from datetime import datetime, timedelta
from typing import Any

import pytest
from recorded import fault
from reported import BASELINE, BF16, CEILING, ENVIRONMENT, FP16, FP32, OVER, WINNER, WORKLOAD, completed, report, trial

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError, TooNoisyError, UnknownStudyError
from autotune.core.outcome import Completed, Measurement
from autotune.core.units import GIB, format_deviation
from autotune.results.chart_data import OverPoint, speed_chart, step_rows
from autotune.results.html import draw_speed_chart
from autotune.results.json_document import report_document, trial_document
from autotune.results.report import Report, deviations_before, load_report
from autotune.results.study_view import trial_view
from autotune.results.text import summary_lines
from autotune.results.warnings import notes
from autotune.results.wording import state_of, times
from autotune.store.records import NOTHING_LEFT, StopReason
from autotune.store.repository import Store


@pytest.mark.parametrize(("ratio", "text"), [(0.5, "0.50×"), (7.449, "7.45×"), (9.996, "10.0×"), (1234.5, "1,234.5×")])
def test_ratios(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_images_have_no_tokens() -> None:
    made = report(BASELINE, WINNER)
    images = dataclasses.replace(made, workload={**WORKLOAD, "task": "image-classification", "seq_len": 1})
    assert trial_document(trial_view(images, WINNER))["tokens_per_second"] is None
    assert trial_document(trial_view(made, WINNER))["tokens_per_second"] == pytest.approx(310.7 * 512)


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


def test_a_failure_does_not_hide_that_other_multiples_of_8_were_measured() -> None:
    best = trial(1, BF16, 4, completed(310.0))
    made = report(BASELINE, best, trial(2, BF16, 8, completed(290.0)), trial(3, FP16, 8, fault()))
    assert "the per-device batch is 4, not a multiple of 8: those that were measured were no faster" in notes(made)


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
    (row,) = [row for row in step_rows(made) if row.mark == "best"]
    assert row.seconds == pytest.approx(64 / speed.samples_per_second)
    # A row of the table is one process.
    assert document["trials"][1]["samples_per_second"] == 310.7


def test_one_uncertainty_for_the_baseline() -> None:
    """The note says what the chart shows: of all its processes, with what differs between them."""
    made = report(BASELINE, trial(2, FP32, 8, completed(25.0)), WINNER)
    (row,) = [row for row in step_rows(made) if row.mark == "baseline"]
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


def test_a_record_that_is_no_trial_is_refused_in_one_line(store: Store) -> None:
    record(store, report(BASELINE, dataclasses.replace(WINNER, candidate=Candidate(Arm("fp8"), 8))))
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
def test_a_damaged_record_is_refused_in_one_line(store: Store, damaged: Report, problem: str) -> None:
    record(store, damaged)
    with pytest.raises(StorageError, match=problem) as refused:
        load_report(store, "a-study")
    assert "the study 'a-study' in" in refused.value.message
    assert "restore the database" in refused.value.hint


def test_a_report_is_read_from_the_database(store: Store) -> None:
    recorded = record(store, WHOLE)
    made = load_report(store, "a-study")
    assert made == Report(recorded.study, WORKLOAD, ENVIRONMENT, CEILING, recorded.trials)
    assert (made.baseline, made.best) == recorded.trials[:2]


def test_an_unknown_study(store: Store) -> None:
    with pytest.raises(UnknownStudyError, match="autotune search"):
        load_report(store, "another")
    record(store, report(WINNER))
    with pytest.raises(UnknownStudyError, match=r"'another'.*a-study"):
        load_report(store, "another")
