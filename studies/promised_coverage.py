"""How often the promise of a search holds: simulated machines whose processes deviate, and candidates that are equal.

    python studies/promised_coverage.py [--runs 2000] [--json FILE]

A search measures equally fast candidates, each in a process of its own, measures winner and rivals again as the real
plan asks for, and promises the interval of the winner's next run. Coverage is how often one more process lies inside.
The deviation between processes is the same for all candidates of a machine, and none of the machine's own affair is
told to the search: it knows its prior, what it measures, and how the processes of candidates deviated that earlier
searches on the machine measured twice (``KNOWN`` of them, or none on a machine that is new). Trials are cheap, so that
a search on a new machine measures its winner again, or too dear for that.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.measured_steps import mean_step
from autotune.core.outcome import Completed, Measurement
from autotune.core.units import GIB
from autotune.estimate.history import History, Tried
from autotune.estimate.pooling import deviations
from autotune.tuning.policy import to_measure_again

SPREADS = (0.003, 0.007, 0.012, 0.025, 0.05)
"""Relative standard deviations between processes."""
EQUAL = (1, 2, 3, 6)
"""Numbers of candidates that are equally fast."""
KNOWN = 24
"""Candidates that earlier searches on the machine measured in two processes."""
_CHEAP = 0.02
"""Share of a search's time that one of its cheap trials takes."""
_STEPS = 6
_STEP_NOISE = 0.003
_BUSY_SHARE = 0.95


@dataclass(frozen=True)
class Cell:
    """The promises of many searches on machines of one kind."""

    spread: float
    equal: int
    known: int
    cheap: bool
    """Whether a trial takes little of a search, so that the winner is measured again to see how processes deviate."""
    runs: int
    inside: float
    """Share of next processes inside the promised interval."""
    below: float
    """Share that is slower than promised."""
    half_width: float
    """Mean half-width of the interval, relative to the speed."""
    processes: float
    """Mean number of processes that a search measured."""


class _Machine:
    """Measures candidates that are all as fast, in processes that deviate."""

    def __init__(self, spread: float, rng: random.Random) -> None:
        self._spread, self._rng = spread, rng
        self._number = 0

    def process(self) -> float:
        """Return the logarithm of the step time of one more process, over that of the mean of all."""
        return self._rng.gauss(0, self._spread)

    def measure(self, candidate: Candidate) -> Tried:
        self._number += 1
        mean = math.exp(self.process())
        steps = tuple(mean * (1 + self._rng.gauss(0, _STEP_NOISE)) for _ in range(_STEPS))
        estimate = mean_step(steps)
        measured = Measurement(
            step_seconds=estimate.mean,
            step_seconds_each=steps,
            relative_spread=estimate.relative_half_width(),
            samples_per_second=candidate.samples_per_step / estimate.mean,
            peak_allocated_bytes=GIB,
            peak_reserved_bytes=GIB,
            gpu_busy_share=_BUSY_SHARE,
        )
        return Tried(str(self._number), candidate, Completed(measured))


def cell(spread: float, equal: int, known: int, cheap: bool, runs: int, seed: int = 0) -> Cell:
    """Simulate ``runs`` searches, each on a new machine, and return how often their promises held."""
    rng = random.Random(f"{seed} {spread} {equal} {known}")
    inside = below = 0
    widths = processes = 0.0
    # Equal samples a step, and arms that no order of comfort tells apart.
    candidates = [Candidate(Arm("bf16", optim=f"optimizer {number}"), 32) for number in range(equal)]
    for _ in range(runs):
        machine = _Machine(spread, rng)
        before = deviations([machine.measure(candidates[0]) for _ in range(2)] for _ in range(known))
        history = History(Ceiling(None, 20 * GIB, 0), before=before)
        for candidate in candidates:
            history.add(machine.measure(candidate))
        while owed := to_measure_again(history, candidates, share=_CHEAP if cheap else math.inf):
            history.add(machine.measure(owed[0]))
        winner = history.fastest()
        assert winner is not None, "every candidate completed"
        promised = history.speed(winner.candidate)
        assert promised is not None, "a winner has a speed"
        # Of a step, all candidates have the same samples and the same true time: one second.
        later = rng.gauss(0, promised.later_deviation)
        beyond = later + machine.process() - math.log(winner.candidate.samples_per_step) - promised.next_process.mean
        width = promised.relative_half_width
        inside += abs(beyond) <= width
        below += beyond > width
        widths += width
        processes += len(history.tried)
    return Cell(spread, equal, known, cheap, runs, inside / runs, below / runs, widths / runs, processes / runs)


def table(cells: Sequence[Cell]) -> str:
    """Return the table of coverage, with the share of next runs that was slower than promised in brackets."""
    lines = []
    for known, cheap in dict.fromkeys((each.known, each.cheap) for each in cells):
        told = f"{known} candidates measured twice before" if known else "a machine that is new"
        told += "" if cheap else ", trials dear"
        kind = [each for each in cells if (each.known, each.cheap) == (known, cheap)]
        equals = sorted({each.equal for each in kind})
        lines.append(
            f"{told:<40}" + "".join(f"{f'{n} equal':>18}" for n in equals) + f"{'±, 1 equal':>13}{'processes':>11}"
        )
        for spread in sorted({each.spread for each in kind}):
            row = {each.equal: each for each in kind if each.spread == spread}
            lines.append(
                f"  processes deviate by {spread:.1%}".ljust(40)
                + "".join(f"{f'{row[n].inside:.1%} ({row[n].below:.1%})':>18}" for n in equals)
                + f"{row[equals[0]].half_width:>13.1%}{row[equals[0]].processes:>11.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Simulate every kind of machine, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures are written here")
    options = parser.parse_args()
    machines = ((KNOWN, True), (0, True), (0, False))
    asked = [(spread, equal, *kind) for kind in machines for spread in SPREADS for equal in EQUAL]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(cell, *zip(*asked, strict=True), [options.runs] * len(asked)))
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
