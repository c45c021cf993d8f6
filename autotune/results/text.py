"""Print a study in text: its result in a few lines, or with a line for each trial."""

from __future__ import annotations

from autotune.core.candidate import Arm
from autotune.core.outcome import Completed
from autotune.core.units import format_bytes, format_rate, format_seconds, format_spread, is_lopsided
from autotune.estimate.pooling import Speed
from autotune.results.cells import batch_cell, peak_cell, speed_cell, table_lines, took_cell, verdict_cell
from autotune.results.report import Report
from autotune.results.study_view import BestView, StudyView, computed_in
from autotune.results.wording import counts_line, rate_unit, searched_lines


def report_lines(report: Report) -> list[str]:
    """Return a study as ``autotune show`` prints it; its table has tokens a second for text, else trials' durations."""
    view, unit = StudyView(report), rate_unit(report.workload)
    has_tokens = any(trial.tokens_per_second for trial in view.trials)
    # Only the winner's row also has the mean speed of its candidate.
    speeds = {view.best.record.id: view.best.speed} if view.best is not None else {}
    head = ("#", "batch×acc", "configuration", unit, "tokens/s" if has_tokens else "took", "peak", "verdict")
    rows = [
        (
            str(trial.record.number),
            batch_cell(trial.candidate),
            trial.candidate.arm.describe(),
            speed_cell(trial.record.outcome) if isinstance(trial.record.outcome, Completed) else "",
            tokens if has_tokens else took_cell(trial.record),
            peak_cell(trial.record.outcome),
            verdict_cell(trial.verdict, trial.record.outcome, speeds.get(trial.record.id)),
        )
        for trial in view.trials
        for tokens in [format_rate(trial.tokens_per_second) if trial.tokens_per_second else ""]
    ]
    return [
        f"Study {report.study.name}, {report.study.started_at:%Y-%m-%d %H:%M} UTC",
        *(f"  {line}" for line in searched_lines(report)),
        *_summary(view),
        "",
        *table_lines(head, rows, right=("#", "batch×acc", unit, "tokens/s", "took", "peak")),
    ]


def summary_lines(report: Report) -> list[str]:
    """Return the result of a study in a few lines."""
    return _summary(StudyView(report))


def _summary(view: StudyView) -> list[str]:
    """Return the winner with its lines, the number of trials, what was not tried, and the notes."""
    study, counts = view.report.study, counts_line(view.report)
    note_lines = [f"  note: {note}" for note in view.notes]
    if view.best is None:
        outcome = "No answer yet" if study.state == "running" else "No feasible trial"
        return [f"{outcome} in the study {study.name}: {counts}", *note_lines]
    left_out = [f"  not tried: {each.describe()}" for each in study.left_out]
    result = [f"  {line}" for line in _best_lines(view, view.best)]
    head = [f"Best: {view.best.setting}"]
    if (why := view.report.too_noisy) is not None:
        head = [f"Too noisy to tell: {why}", f"Led, and is no answer: {view.best.setting}"]
    return [*head, *result, f"  {counts}", *left_out, *note_lines]


def _best_lines(view: StudyView, best: BestView) -> list[str]:
    """Return the lines on the winner: speed, memory, comparisons, advice."""
    speed, tokens, request = best.speed, best.tokens_per_second, view.report.study.request
    unit = rate_unit(view.report.workload)
    speedup = view.report.speedup
    lines = [
        _speed_words(speed, unit)
        + (f", {format_rate(tokens)} tokens/s" if tokens else "")
        + f"; {format_seconds(best.measured.step_seconds)} an optimizer step"
    ]
    lines += best.run
    if view.report.is_own_best:
        lines.append(f"{view.report.baseline_name} are as fast as anything tried")
    elif speedup is not None and view.baseline is not None and view.baseline.measured is not None:
        baseline = f"{view.baseline.candidate.describe()}: {format_rate(view.baseline.measured.samples_per_second)}"
        bound, why = ("at most ", ", disturbed") if view.report.is_speedup_a_bound else ("", "")
        lines.append(f"{bound}{speedup:.2f} × {view.report.baseline_name} ({baseline} {unit}{why})")
    if view.expert is not None and view.expert.speedup is not None:
        lines.append(view.expert.describe())
    if speedup is None and request["measure_baseline"] and request["objective"] == "throughput":
        plain = Arm().describe()
        tried = [t for t in view.trials if t.record.stage == "baseline" or t.record.candidate.arm.describe() == plain]
        why = next((f" ({t.verdict})" for t in tried if t.verdict), "")
        how = f"did not complete{why}" if tried else "are predicted not to fit"
        lines.append(f"{view.report.baseline_name} {how}, so the speed-up is not known")
    if best.runner_up is not None:
        lines.append(best.runner_up)
    if best.utilization is not None:
        precision = computed_in(best.candidate.arm.precision, view.report.workload["dtype"])
        rated = f"of the GPU's rated arithmetic in {precision} (MFU: products and attention, nothing twice)"
        lines.append(f"{best.utilization:.0%} {rated}")
    lines.append(_memory_line(view, best))
    if best.limit_words is not None:
        lines.append(best.limit_words)
    return [*lines, *best.details]


def _speed_words(speed: Speed, unit: str) -> str:
    """Return a speed with its interval: ``297.7 samples/s ± 2.7%``, or ``18.3 samples/s (11.4 to 29.5)``."""
    mean, (low, high) = speed.samples_per_second, speed.interval()
    if is_lopsided(mean, low, high):
        return f"{format_rate(mean)} {unit} ({format_rate(low)} to {format_rate(high)})"
    return f"{format_rate(mean)} {unit}{format_spread(speed.relative_half_width)}"


def _memory_line(view: StudyView, best: BestView) -> str:
    """Return the winner's peak (reserved; allocated with expandable segments) and headroom below the cap, in words."""
    ceiling = view.report.ceiling
    cap, spare = ceiling.cap_bytes, best.headroom_bytes or 0
    headroom = f"headroom {format_bytes(spare)} ({spare / cap:.0%})"
    if best.candidate.arm.expandable_segments:
        return (
            f"{format_bytes(best.peak_bytes)} allocated at the peak, in a trial that could reserve "
            f"{format_bytes(ceiling.line_bytes)} of {format_bytes(cap)}; {headroom}"
        )
    measured_in = f"the most of {best.speed.processes} processes" if best.speed.processes > 1 else "measured"
    return f"{format_bytes(best.peak_bytes)} of {format_bytes(cap)} reserved at the peak, {measured_in}; {headroom}"
