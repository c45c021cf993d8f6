"""What a study's reader should know of how far its numbers reach."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory, source_of
from autotune.core.stop import StopReason
from autotune.core.units import format_seconds, plural
from autotune.estimate.bottleneck import what_limits
from autotune.results.report import Report, data_facts, measurement
from autotune.store import TrialRecord

# Half the interval of the next run's speed, relative, above which a promise says little.
_WIDE_PROMISE = 0.1
# The baseline is measured roughly; this is no rough figure any more.
_VERY_WIDE_SPREAD = 0.2


def notes(report: Report) -> list[str]:
    """What the reader should know of how far the numbers reach."""
    found: list[str] = []
    request = report.study.request
    best, measured = report.best, measurement(report.best)
    if best is not None and request["batch_multiple"] is None and best.candidate.per_device_train_batch_size % 8:
        found.append(
            f"the per-device batch is {best.candidate.per_device_train_batch_size}, no multiple of 8: "
            + _why_no_multiple_of_8(report)
        )
    if measured and best and measured.micro_steps_run < best.candidate.gradient_accumulation_steps:
        found.append(
            f"the winner's steps were measured with {measured.micro_steps_run} of its "
            f"{best.candidate.gradient_accumulation_steps} micro-steps and added up"
        )
    is_cut_short = report.study.stop_reason is not StopReason.NOTHING_LEFT
    if is_cut_short and len(report.trials) > 1 and len({trial.candidate for trial in report.trials}) == 1:
        found.append("nothing but one configuration was measured: give the search more --trials or --time-budget")
    if best is not None and measured:
        found += _wide_promise(report, best, measured)
    baseline = measurement(report.baseline)
    if baseline and best and best != report.baseline and baseline.relative_spread > _VERY_WIDE_SPREAD:
        found.append(
            f"the baseline's step time is uncertain by ± {baseline.relative_spread:.0%}, and so is what is said to be "
            "won over it"
        )
    found += _failed_again(report)
    if best is not None and measured and request["objective"] == "throughput":
        found += _faster_ones(report, best)
    found += compiled_notes(report)
    if best is not None and measured:
        found += _host_notes(report, best, measured)
    found += _own_batch_notes(report)
    found += _reused(report)
    if request["world_size"] > 1:
        found.append(f"measured on one device; {request['world_size']} of them also spend time on exchanging gradients")
    found += _disturbances(report)
    if report.study.state != "finished":
        found.append(f"the search is {report.study.state}: autotune resume {report.study.name} continues it")
    return found


def _wide_promise(report: Report, best: TrialRecord, measured: Measurement) -> list[str]:
    """Why the next run may be much slower or faster than the winner was measured, where it may."""
    speed = report.speed(best)
    if speed is None or speed.relative_half_width <= _WIDE_PROMISE:
        return []
    told = f"the next run may differ from the winner's speed by {speed.relative_half_width:.0%}: "
    if report.history.is_host_bound(best.candidate):
        return [told + "the GPU waits for the host, whose speed differs from process to process"]
    anew = " when that was measured; --fresh measures anew" if source_of(best.outcome) else ""
    return [f"{told}the machine was noisy{anew}"]


def _disturbances(report: Report) -> list[str]:
    """How many trials others disturbed, and whether the winner is one of them."""
    marked = [t for t in report.trials if isinstance(t.outcome, Completed | OutOfMemory) and t.outcome.disturbed]
    if not marked:
        return []
    last = marked[-1].outcome
    why = "; ".join(last.disturbed) if isinstance(last, Completed | OutOfMemory) else ""
    again = " and run again as far as that helped" if any(_is_run_again(t.outcome) for t in marked) else ""
    found = [
        f"{plural(len(marked), 'trial')} {'was' if len(marked) == 1 else 'were'} disturbed{again}; the last: {why}"
    ]
    if report.best in marked:
        found.append("the winner itself was measured under a disturbance: it may be faster than it looks")
    return found


def _is_run_again(outcome: Outcome | None) -> bool:
    return not isinstance(outcome, Completed) or outcome.run_again


def compiled_notes(report: Report) -> list[str]:
    """When the fastest compiled trial pays for its start-up, against the best that starts at once."""
    found = [(m, t) for t in report.trials if report.feasible(t) and (m := measurement(t))]
    compiled = [(m, t) for m, t in found if t.candidate.arm.torch_compile]
    plain = [(m, t) for m, t in found if not t.candidate.arm.torch_compile]
    if not compiled or not plain:
        return []
    (fast, trial), (usual, other) = (max(pairs, key=lambda p: p[0].samples_per_second) for pairs in (compiled, plain))
    start = fast.compile_seconds or 0.0
    name = f"{trial.candidate.describe()} takes {format_seconds(start)} to compile"
    # Both in seconds a sample, since their steps need not be of the same size.
    gain = 1 / usual.samples_per_second - 1 / fast.samples_per_second
    if gain <= 0:
        return [f"{name} and is then no faster than {other.candidate.describe()}"]
    steps = math.ceil(start / (gain * trial.candidate.samples_per_step))
    return [f"{name}, which pays after {steps:,} optimizer steps against {other.candidate.describe()}"]


def _host_notes(report: Report, best: TrialRecord, measured: Measurement) -> list[str]:
    """What compiling and one core for all threads gained or lost; that compiling was not tried where it may gain."""
    found = []
    for lever, words in (("torch_compile", "compiled"), ("cpu_affinity", "pinned to one core")):
        gain = _gain_of(report, best.candidate, lever)
        if gain is not None:
            found.append(f"{words}, the winner measured {gain:.2f} × what it measured otherwise")
    request = report.study.request
    may_compile = request["objective"] == "throughput" and request.get("torch_compile", "off") == "off"
    if may_compile and what_limits(measured).kind == "host" and not best.candidate.arm.torch_compile:
        found.append("the winner waits for the host: --torch-compile auto measures whether compiling it helps")
    return found


def _gain_of(report: Report, winner: Candidate, lever: str) -> float | None:
    """Samples/s of the winner with a lever that is on or off over those without it; ``None`` where one is not known."""
    speeds = []
    for is_on in (True, False):
        variant = dataclasses.replace(winner, arm=_with_lever(winner.arm, lever, is_on))
        measured = [m for t in report.trials if t.candidate == variant and (m := measurement(t))]
        if not measured:
            return None
        # One that was measured in part or roughly at first was measured again.
        speeds.append(measured[-1].samples_per_second)
    return speeds[0] / speeds[1]


def _with_lever(arm: Arm, lever: str, is_on: bool) -> Arm:
    changed: Any = {lever: is_on}
    return dataclasses.replace(arm, **changed)


def _own_batch_notes(report: Report) -> list[str]:
    """That the user's own settings train at another effective batch than the search."""
    baseline, request = report.baseline, report.study.request
    if baseline is None or report.workload["task"] != "own" or request["effective_batch"] is None:
        return []
    own = baseline.candidate.samples_per_step * request["world_size"]
    if own == request["effective_batch"]:
        return []
    return [f"your own settings train at effective batch {own}, not {request['effective_batch']}"]


def _reused(report: Report) -> list[str]:
    """How much was measured by earlier searches, and what of the answer was worked out from them."""
    sources = [source for trial in report.trials if (source := source_of(trial.outcome))]
    if not sources:
        return []
    names = sorted({source.study for source in sources})
    where = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    found = [f"{plural(len(sources), 'trial')} of earlier searches ({where}) reused; --fresh measures anew"]
    for name, trial in (("winner", report.best), ("baseline", report.baseline)):
        source = source_of(trial.outcome) if trial else None
        if source is not None and source.derived:
            found.append(f"the {name}'s speed is {source.describe()}, of another accumulation")
    return found


def _failed_again(report: Report) -> list[str]:
    """That a later trial of the winner did not end well."""
    best = report.best
    later = [t for t in report.trials if best and t.candidate == best.candidate and t.number > best.number]
    return [
        f"the winner failed when it was run again (trial {trial.number}): {trial.outcome.message}"
        for trial in later
        if isinstance(trial.outcome, Failed) and trial.outcome.reason != "interrupted"
    ]


def _faster_ones(report: Report, best: TrialRecord) -> list[str]:
    """Why a trial that measured more samples a second is not the winner."""
    fastest, speed = report.history.fastest(), report.speed(best)
    if fastest is None or fastest.measurement is None or speed is None:
        return []
    gain = fastest.measurement.samples_per_second / speed.samples_per_second - 1
    if fastest.candidate == best.candidate or gain <= 0:
        return []
    if report.baseline is not None and fastest.candidate == report.baseline.candidate:
        return [f"the baseline was faster, by {gain:.1%}, but the options leave it out of the search"]
    return [f"{fastest.candidate.describe()} was faster by {gain:.1%}, which is within the noise"]


def _why_no_multiple_of_8(report: Report) -> str:
    request, facts = report.study.request, data_facts(report.workload)
    effective = request["effective_batch"]
    if effective and (effective // request["world_size"]) % 8:
        return "none divides the effective batch"
    if effective:
        return "those that divide the effective batch need too much memory"
    if facts is not None and facts.samples < 8:
        return f"the data has {plural(facts.samples, 'sample')}"
    return "none fits"
