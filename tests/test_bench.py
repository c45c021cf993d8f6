"""Test the cost of searches on recorded landscapes, so that an increase is noticed."""

import json
import os
from pathlib import Path

import pytest
import warm
from bench import OURS, search
from checkout import ROOT
from replay import RecordedPredictions, RecordedRunner, job_of, landscapes, predictions_path, prepared_for

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort
from autotune.store.repository import Store
from autotune.tuning.forecast import forecast_of

WITHIN = 0.01

# Trials and out-of-memory trials: until one is within 1 % of the best, and until the search ends.
# Where a change needs fewer, lower them; a new landscape needs a line in both.
Bounds = tuple[tuple[int, int], tuple[int, int]]
WITH_PREDICTIONS: dict[str, Bounds] = {
    "Qwen2.5-0.5B": ((2, 1), (3, 1)),
    "bert-large-uncased": ((2, 0), (2, 0)),
    "gpt2-medium": ((2, 1), (3, 1)),
    "roberta-base": ((2, 0), (2, 0)),
    "vit-large-patch16-224": ((2, 0), (2, 0)),
}
WITHOUT_PREDICTIONS: dict[str, Bounds] = {
    "Qwen2.5-0.5B": ((3, 1), (7, 4)),
    "bert-large-uncased": ((3, 1), (3, 1)),
    "gpt2-medium": ((8, 6), (9, 6)),
    "roberta-base": ((2, 0), (2, 0)),
    "vit-large-patch16-224": ((2, 0), (2, 0)),
}


def model_of(path: Path) -> str:
    return path.name.split("_")[0]


LANDSCAPES = {model_of(path): path for path in landscapes()}


def test_every_landscape_has_bounds() -> None:
    assert set(WITH_PREDICTIONS) == set(WITHOUT_PREDICTIONS) == set(LANDSCAPES)


@pytest.mark.parametrize("model", LANDSCAPES)
@pytest.mark.parametrize("prediction_seconds", [5.0, None])
def test_a_search_needs_no_more_trials_than_it_did(model: str, prediction_seconds: float | None, store: Store) -> None:
    run = search(LANDSCAPES[model], store, 42, WITHIN, prediction_seconds=prediction_seconds)
    to_goal, to_end = (WITHOUT_PREDICTIONS if prediction_seconds is None else WITH_PREDICTIONS)[model]
    assert run.reached.trials <= to_goal[0]
    assert run.reached.out_of_memory <= to_goal[1]
    assert run.ended.trials <= to_end[0]
    assert run.ended.out_of_memory <= to_end[1]
    assert run.answer >= 1 - WITHIN


@pytest.mark.parametrize("path", landscapes(), ids=model_of)
def test_every_question_of_a_search_was_answered(path: Path) -> None:
    """Else the predictions must be recorded anew: ``python studies/predictions.py``."""
    runner = RecordedRunner(path)
    predictions = RecordedPredictions(predictions_path(path), runner, 7.0)
    forecast = forecast_of(prepared_for(runner, "bench"), predictions, cores=16)
    forecast.complete()
    assert forecast.is_complete
    assert forecast.unanswered == []
    assert runner.seconds == 7.0


@pytest.mark.parametrize(("model", "baseline_first"), [("roberta-base", True), ("vit-large-patch16-224", False)])
def test_the_wait_for_predictions_is_charged_once(model: str, baseline_first: bool, store: Store) -> None:
    """Text is trained on meanwhile; nothing runs beside predictions where images are fed."""
    path = LANDSCAPES[model]
    free, charged = (search(path, store, seed, WITHIN, prediction_seconds=s) for seed, s in ((1, 0.0), (2, 9.0)))
    assert free.ended.trials == charged.ended.trials
    runner = RecordedRunner(path)
    runner.run(job_of(Candidate(Arm("fp32"), 8, 8), runner.cap_bytes), lambda _: None)
    assert 0 < runner.seconds < 9.0
    waited = 9.0 - (runner.seconds if baseline_first else 0.0)
    assert charged.ended.seconds == pytest.approx(free.ended.seconds + waited, abs=0.01)


@pytest.mark.whole
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """As ``make bench`` runs it, with one landscape and one seed; what scipy is needed for may be missing."""
    path = LANDSCAPES["roberta-base"]
    file = tmp_path / "bench.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [str(ROOT / "studies" / "bench.py"), str(path), "--seeds", "1", "--json", str(file)]
    said = warm.output_of(*words, cwd=tmp_path, env=environment)
    rows = {row["sampler"]: row for row in json.loads(file.read_text())["rows"]}
    assert {OURS, "TPE", "random", "grid", "whole grid"} <= set(rows)
    assert rows["whole grid"]["trials"]["median"] == 32
    assert rows["grid"]["trials"]["worst"] <= 32
    assert rows[OURS]["times_ours"] == 1.0
    assert "| roberta-base " in said


def test_a_trial_in_full_is_charged_for_the_micro_steps_that_were_not_recorded() -> None:
    """8 × 8 was recorded with three micro-steps a step in 2.1 s; in full it took a search 4.5 s on such a GPU."""
    runner = RecordedRunner(LANDSCAPES["Qwen2.5-0.5B"])
    winner = Candidate(Arm("bf16"), 8, 8)
    for effort in (Effort(), Effort(max_micro_steps=8)):
        runner.run(job_of(winner, runner.cap_bytes, effort), lambda _: None)
    short, in_full = (trial.ended_at_seconds for trial in runner.replayed)
    assert short == pytest.approx(2.103)
    assert in_full - short == pytest.approx(4.5, rel=0.1)
