"""Test what a search does with what its winner shows beyond its first steps, on computed trials."""

import json
from pathlib import Path

from searching import RecordingObserver, new_store, prepared
from test_anytime import Gpu

from autotune.core.candidate import Candidate
from autotune.core.rehearsal import Evaluation, Rehearsal, Whole
from autotune.core.units import GIB
from autotune.results.export import make_export, render
from autotune.results.report import load_report
from autotune.results.warnings import notes
from autotune.tuning.loop import Search

TOO_LARGE = Whole(90 * GIB, 4 * GIB, 60.0, 80 * GIB)
FITTING = Whole(20 * GIB, 4 * GIB, 70.0, 10 * GIB)
SETTINGS = {"per_device_eval_batch_size": 4, "eval_accumulation_steps": 16}
FOUND = Rehearsal(Evaluation(8, 5000, 64, TOO_LARGE, False, SETTINGS, FITTING), line_bytes=24 * GIB)


def test_settings_of_an_evaluation_that_fits_are_told_and_exported(tmp_path: Path) -> None:
    runner, asked = Gpu().runner(), list[Candidate]()

    def rehearse(candidate: Candidate, searched_seconds: float) -> Rehearsal:
        asked.append(candidate)
        return FOUND

    with new_store(tmp_path) as store:
        arguments = (prepared(), runner, store, RecordingObserver(), Path("logs"))
        study = Search(*arguments, clock=runner.clock, rehearse=rehearse).run()
        report = load_report(store, study.name)
    assert report.best is not None
    assert asked == [report.best.candidate]
    assert report.study.look is not None
    assert report.study.look.rehearsal == FOUND
    (line,) = [line for line in notes(report) if line.startswith("the evaluation does not fit")]
    assert "5000 samples need 90.0 GiB, of which 80.0 GiB are outputs (and 4.0 GiB of the host)" in line
    assert "per_device_eval_batch_size=4, eval_accumulation_steps=16 does" in line
    exported = json.loads(render(make_export(report), "json"))
    assert exported.items() >= SETTINGS.items()


def test_a_rehearsal_that_failed_is_told_and_changes_no_answer() -> None:
    found = Rehearsal(growth_bytes=GIB, line_bytes=GIB, problem="its process was killed")
    assert found.alarms == []
    assert found.sentences == ["what comes after the first steps of a run was not looked at: its process was killed"]
