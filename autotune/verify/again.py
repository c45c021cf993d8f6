"""Measure the winner's trial once more, right after a stock run: how fast is the same trial now?

A stock run that is slower than promised has two possible causes: the machine has become slower since the search, or
the run itself was disturbed or differs from a trial. The same trial, measured on the same devices at once, tells them
apart.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.core.errors import AutotuneError
from autotune.core.outcome import Completed, Measurement, Outcome, OutOfMemory
from autotune.estimate.history import cap_of
from autotune.execution import TrialJob
from autotune.execution.executor import run_to_end
from autotune.tuning.interruption import Interruption
from autotune.tuning.remeasure import effort_of, timeout_seconds
from autotune.tuning.request import SearchRequest, request_from_document
from autotune.tuning.run import on_this_machine
from autotune.verify.comparison import Interval
from autotune.verify.target import Target

Finding = Literal["agrees", "machine_slower", "machine_faster", "run_differs", "machine_varies", "between"]
"""What the repeated trial shows.

``agrees``: it is not below the promise, and is compatible with the stock run. ``machine_slower``: it is below the
promise, as the stock run is; ``machine_faster``: both are above it. ``run_differs``: it is as fast as promised, and the
stock run is slower.
``machine_varies``: it is compatible with neither, or the stock run is faster than it. ``between``: the stock run
missed the promise, and the trial is compatible with both of them.
"""


@dataclass(frozen=True)
class Again:
    """A trial of the winner after the stock run."""

    measurement: Measurement
    disturbed: tuple[str, ...] = ()
    """What disturbed it from outside, each in a few words."""

    @property
    def speed(self) -> Interval:
        """Its mean speed with the interval of that; unbounded where a single step was timed."""
        mean, spread = self.measurement.samples_per_second, self.measurement.known_spread
        if spread is None:
            return Interval(mean, 0.0, math.inf)
        return Interval(mean, mean / (1 + spread), mean / (1 - spread) if spread < 1 else math.inf)


@dataclass(frozen=True)
class NotMeasured:
    """A trial that could not be measured again."""

    why: str


def find(promise: Interval, run: Interval, again: Interval) -> Finding:
    """Return what a repeated trial shows, beside the promise of the next run and the speed of the stock run."""
    # What a search would promise now: processes differ as much as in the search, and the trial has an error of its own.
    usual = promise.scaled(again.mean / promise.mean)
    below = math.hypot(usual.mean - usual.low, again.mean - again.low)
    above = math.hypot(usual.high - usual.mean, again.high - again.mean)
    now = Interval(again.mean, again.mean - below, again.mean + above)
    differs = run.high < now.low or run.low > now.high
    if again.high < promise.low:
        return "machine_varies" if differs else "machine_slower"
    if again.low > promise.high and not differs:
        return "machine_faster"
    if differs:
        return "run_differs" if run.high < now.low else "machine_varies"
    return "between" if run.high < promise.low else "agrees"


def conclusion(finding: Finding, where: str, *, has_changed: bool = False) -> tuple[str, str]:
    """Return what follows for the machine and for the stock run, either of which may be empty.

    ``where`` names what limits the speed: this machine, or this host. ``has_changed`` says that libraries have other
    versions than in the search.
    """
    match finding:
        case "agrees":
            return "", ""
        case "machine_slower":
            return f"{where} is slower now" + (", or its other versions of libraries are" if has_changed else ""), ""
        case "machine_faster":
            return f"{where} is faster now than in the search: search again for figures of today", ""
        case "run_differs":
            return f"{where} is no slower now", "it was disturbed, or differs from a trial"
        case "machine_varies":
            return "", f"the speed of {where} changes from minute to minute"
        case "between":
            return "", f"too little to tell whether {where} is slower now or the run differs"


def hint_of(finding: Finding, where: str, *, has_changed: bool = False) -> str | None:
    """Return what to do where the stock run was too slow; ``None`` where the repeated trial does not say.

    ``has_changed`` says that libraries have other versions than in the search.
    """
    match finding:
        case "machine_slower" if has_changed:
            return "search again with these versions of the libraries, or verify with those of the search"
        case "machine_slower":
            return (
                f"{where} is slower than at the time of the search; autotune devices shows other processes; where it "
                "stays so, search again with --fresh"
            )
        case "run_differs":
            return "verify again; where the stock run stays slower than its trial, report it with the study's logs"
        case "machine_varies":
            return "verify again on an idle machine; autotune devices shows other processes"
        case _:
            return None


def measure_again(target: Target, log_path: Path, note: Callable[[str], None]) -> Again | NotMeasured:
    """Measure the winner in one more trial, as a search's final trial, and record nothing of it.

    The caller holds the devices (``take_devices``), so that no search begins on them between the stock run and this.
    Logs go beside ``log_path``, that of the stock run. Whatever keeps the trial from being measured, Ctrl-C among it,
    must not lose the stock run's result, so it is returned and not raised.
    """
    note("measuring the winner's trial again, as in the search …")
    try:
        outcome = _outcome(target, log_path, note)
    except KeyboardInterrupt:
        return NotMeasured("it was interrupted")
    except AutotuneError as error:
        return NotMeasured(error.message)
    except (OSError, ValueError) as error:
        return NotMeasured(str(error))
    if isinstance(outcome, Completed):
        return Again(outcome.measurement, outcome.disturbed)
    return NotMeasured(f"memory ran out: {outcome.message}" if isinstance(outcome, OutOfMemory) else outcome.message)


def _outcome(target: Target, log_path: Path, note: Callable[[str], None]) -> Outcome:
    request, ceiling = _request(target), target.report.ceiling
    folder = log_path.parent / "again"
    with on_this_machine(request, folder, note, warm=None) as place:
        server = place.servers[0]
        if request.workload.data is not None:
            server.read_data(request.workload.data_folder(log_path.parent.parent))
        executor = place.make_executor(ceiling.context_bytes, Interruption())
        return run_to_end(executor, _job(target, request, folder / "trial.log"))


def _request(target: Target) -> SearchRequest:
    """Return the request of the search, on the devices of the stock run."""
    study = target.report.study
    device, *others = target.placement.devices
    recorded = request_from_document(study.request, target.workload, device, study.name, tuple(others))
    # A search for the largest batch times a single step, of which no interval is known.
    return replace(recorded, objective="throughput")


def _job(target: Target, request: SearchRequest, log_path: Path) -> TrialJob:
    candidate, history = target.best.candidate, target.report.history
    effort = effort_of(request, candidate, "final", None, history)
    # What a profiled step tells is known from the search.
    effort = replace(effort, busy_steps=0)
    # Not recorded; the peak held all weights. Only the time for building them depends on it.
    parameters = target.promised.peak_allocated_bytes
    return TrialJob(
        uuid.uuid4().hex,
        candidate,
        cap_of(candidate.arm, target.report.ceiling),
        effort,
        request.seed,
        timeout_seconds(request, parameters, candidate, effort, history),
        str(log_path),
    )
