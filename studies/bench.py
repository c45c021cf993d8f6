"""Our sampler against Optuna's on recorded landscapes, seconds replayed: no GPU, the same figures everywhere.

    python studies/bench.py [--seeds 20] [--within 0.01] [--prediction-seconds S] [--json FILE] [LANDSCAPE.jsonl …]

What is counted are trials, simulated seconds and out-of-memory trials until a feasible trial within 1 % of the best of
the whole grid has completed. Landscapes were recorded once, so a replay is exact; every trial takes the seconds that it
took when it was recorded, an out-of-memory too. The start of a process (imports) is left out for all alike.

``autotune`` is the search as the command line runs it, with the memory predictions that were recorded for the landscape
(``studies/predictions.py``). Each is there ``--prediction-seconds`` after it was asked for, and waited for as in truth:
asked for beside the baseline, or after it where images are fed. The baseline counts as a trial. It ends by itself, and
what that takes is told too. Its seeds change nothing as long as it decides by what it knows alone.

Optuna's samplers are used as one would use them without this project: plain ask and tell over precision ×
checkpointing × batch, accumulation following from the effective batch, each at its defaults. Nothing is skipped for
them, a repeated proposal is run again, and they wait for no predictions. The batch is an integer (its logarithm), which
they can make more of than of a category. An out-of-memory is told as PRUNED with a violated constraint; for GP, which
looks at completed trials only, as COMPLETE with a speed of 0 and the same constraint, without which it would propose it
again for ever. Their seconds end with the trial that reaches the goal, although nothing tells them so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState
from replay import (
    RecordedPredictions,
    RecordedRunner,
    Replayed,
    ceiling_of,
    feasible,
    job_of,
    landscapes,
    predictions_path,
    prepared_for,
)
from rich import box
from rich.console import Console
from rich.table import Table

from autotune.core.candidate import Candidate, Document
from autotune.core.ceiling import Ceiling
from autotune.core.outcome import Completed, OutOfMemory
from autotune.results.optuna_trials import over_line_gib
from autotune.store.opening import open_store
from autotune.store.repository import Store
from autotune.tuning.forecast import forecast_of
from autotune.tuning.loop import Search
from autotune.tuning.narrator import Narrator

# Of the machine whose GPU was recorded; half of them predict at once.
_CORES = 16
PREDICTION_SECONDS = {
    "Qwen2.5-0.5B": 2.68,
    "bert-large-uncased": 1.32,
    "gpt2-medium": 1.47,
    "roberta-base": 1.06,
    "vit-large-patch16-224": 1.30,
}
"""By model, from asking for predictions to having the last of them: in searches of these models on the machine of an
H200 (32 slow cores, torch 2.11.0, 23 November 2026), four asked at once beside the baseline, of vit-large one after it.
"""
_SLOWEST = max(PREDICTION_SECONDS.values())

EFFECTIVE_BATCH = 64
OURS, WHOLE_GRID = "autotune", "whole grid"


@dataclass(frozen=True)
class Cost:
    """Number of trials, simulated seconds and out-of-memory trials of a run, up to one of its trials."""

    trials: int
    seconds: float
    out_of_memory: int


@dataclass(frozen=True)
class Run:
    """One sampler with one seed on one landscape."""

    landscape: str
    sampler: str
    seed: int
    reached: Cost | None
    """``None``: not within the budget."""
    ended: Cost
    """When it stopped: by itself, or at the goal, or because the budget was spent."""
    answer: float | None = None
    """Of a search that ends by itself: samples a second of what it recommends, relative to the best of the grid."""


def cost(replayed: Sequence[Replayed]) -> Cost:
    """Return the cost of the first trials of a run."""
    ooms = sum(isinstance(trial.outcome, OutOfMemory) for trial in replayed)
    return Cost(len(replayed), replayed[-1].ended_at_seconds if replayed else 0.0, ooms)


def best_of(runner: RecordedRunner, ceiling: Ceiling) -> float:
    """Return samples a second of the fastest feasible cell of the whole grid."""
    speeds: list[float] = [cell["samples_per_second"] for _, cell in feasible(runner, ceiling)]
    return max(speeds)


def is_within(trial: Replayed, goal: float, ceiling: Ceiling) -> bool:
    """Return whether a trial is feasible and reaches ``goal`` samples a second."""
    measured = trial.outcome.measurement if isinstance(trial.outcome, Completed) else None
    if measured is None or not ceiling.bounds.fits(measured.peak_reserved_bytes):
        return False
    return measured.samples_per_second >= goal


def reached(replayed: Sequence[Replayed], goal: float, ceiling: Ceiling) -> Cost | None:
    """Return the cost up to the first trial that reaches the goal; ``None`` where none does."""
    first = next((i for i, trial in enumerate(replayed) if is_within(trial, goal, ceiling)), None)
    return None if first is None else cost(replayed[: first + 1])


def search(path: Path, store: Store, seed: int, within: float, prediction_seconds: float | None) -> Run:
    """Run our search to its end; without memory predictions where ``prediction_seconds`` is ``None``."""
    runner = RecordedRunner(path)
    prepared = prepared_for(runner, f"{path.stem}-{seed}", seed)
    predictions = RecordedPredictions(predictions_path(path), runner, prediction_seconds or 0.0)
    forecast = None if prediction_seconds is None else forecast_of(prepared, predictions, cores=_CORES)
    silent = Narrator(lambda text, style: None)
    study = Search(prepared, runner, store, silent, Path("logs"), clock=runner.clock, forecast=forecast).run()
    best = best_of(runner, prepared.ceiling)
    winner = store.trial(study.best_trial_id or "")
    assert winner is not None
    assert isinstance(winner.outcome, Completed)
    to_goal = reached(runner.replayed, best * (1 - within), prepared.ceiling)
    answer = winner.outcome.measurement.samples_per_second / best
    return Run(path.name, OURS, seed, to_goal, cost(runner.replayed), answer)


# Optuna's samplers

_DOUBLINGS = range(3, int(math.log2(EFFECTIVE_BATCH)) + 1)


def _grid(choices: dict[str, list[Any]], seed: int) -> BaseSampler:
    return optuna.samplers.GridSampler(choices, seed=seed)


SAMPLERS: dict[str, Callable[[dict[str, list[Any]], int], BaseSampler]] = {
    "TPE": lambda choices, seed: optuna.samplers.TPESampler(seed=seed),
    "GP": lambda choices, seed: optuna.samplers.GPSampler(seed=seed),
    "random": lambda choices, seed: optuna.samplers.RandomSampler(seed=seed),
    "grid": _grid,
}


def peer(path: Path, name: str, seed: int, within: float, budget: int) -> Run:
    """Run one of Optuna's samplers until it has reached the goal or spent its budget of trials."""
    runner = RecordedRunner(path)
    ceiling = ceiling_of(runner)
    goal = best_of(runner, ceiling) * (1 - within)
    arms = list(dict.fromkeys(candidate.arm for candidate, _ in runner.recorded))
    choices: dict[str, list[Any]] = {
        "precision": list(dict.fromkeys(arm.precision for arm in arms)),
        "gradient_checkpointing": [False, True],
        "batch_log2": list(_DOUBLINGS),
    }
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[name](choices, seed))
    for _ in range(budget):
        trial = study.ask()
        batch = 2 ** trial.suggest_int("batch_log2", min(_DOUBLINGS), max(_DOUBLINGS))
        parameters = {
            "precision": trial.suggest_categorical("precision", choices["precision"]),
            "gradient_checkpointing": trial.suggest_categorical("gradient_checkpointing", [False, True]),
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": EFFECTIVE_BATCH // batch,
        }
        outcome = runner.run(job_of(Candidate.from_parameters(parameters), ceiling.cap_bytes), lambda _: None)
        trial.set_constraint("memory", over_line_gib(outcome, ceiling) or 0.0)
        if isinstance(outcome, Completed):
            study.tell(trial, outcome.measurement.samples_per_second)
        elif name == "GP":
            study.tell(trial, 0.0)
        else:
            study.tell(trial, state=TrialState.PRUNED)
        if is_within(runner.replayed[-1], goal, ceiling):
            break
    return Run(path.name, name, seed, reached(runner.replayed, goal, ceiling), cost(runner.replayed))


def whole_grid(path: Path) -> Cost:
    """Return the cost of every recorded trial, run once."""
    runner = RecordedRunner(path)
    for candidate, _ in runner.recorded:
        runner.run(job_of(candidate, runner.cap_bytes), lambda _: None)
    return cost(runner.replayed)


# All of them


def run_seeds(options: argparse.Namespace, path: Path, sampler: str, seeds: range) -> list[Run]:
    """Run some seeds of one sampler on one landscape; called in a process of its own."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    if sampler != OURS:
        return [peer(path, sampler, seed, options.within, options.budget) for seed in seeds]
    seconds = options.prediction_seconds
    if seconds is None:
        seconds = PREDICTION_SECONDS.get(path.name.split("_")[0], _SLOWEST)
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "bench.db")) as store:
        return [search(path, store, seed, options.within, seconds) for seed in seeds]


def run_all(paths: Sequence[Path], options: argparse.Namespace) -> list[Run]:
    """Run every sampler on every landscape, on all cores; GP is left out where scipy is not installed."""
    has_scipy = importlib.util.find_spec("scipy") is not None
    names = [OURS, *(name for name in SAMPLERS if name != "GP" or has_scipy)]
    # The slowest first, so that no core waits for it in the end.
    names.sort(key=lambda name: name != "GP")
    tasks = [(path, name, seeds) for name in names for path in paths for seeds in _portions(options.seeds)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        runs = [run for runs in pool.map(partial(run_seeds, options), *zip(*tasks, strict=True)) for run in runs]
    order = [OURS, *SAMPLERS]
    return sorted(runs, key=lambda run: (run.landscape, order.index(run.sampler), run.seed))


_PORTION = 5


def _portions(seeds: int) -> list[range]:
    """Split the seeds into portions small enough to keep every core busy to the end."""
    return [range(first, min(first + _PORTION, seeds)) for first in range(0, seeds, _PORTION)]


def _median_seconds(runs: Iterable[Run]) -> float:
    """Return the median of the seconds to the goal; infinite where half of the runs did not reach it."""
    return statistics.median(run.reached.seconds if run.reached else math.inf for run in runs)


def _figures(costs: Sequence[Cost | None]) -> Document:
    """Return median and worst case of each figure of these costs; ``None`` stands for a goal never reached."""
    found: Document = {}
    for name in ("trials", "seconds", "out_of_memory"):
        values = [math.inf if cost is None else float(getattr(cost, name)) for cost in costs]
        both = {"median": statistics.median(values), "worst": max(values)}
        found[name] = {which: None if math.isinf(value) else round(value, 2) for which, value in both.items()}
    return found


def _row(landscape: str, sampler: str, runs: Sequence[Run], ours_seconds: float) -> Document:
    """Return the table's row of one sampler on one landscape."""
    row: Document = {
        "landscape": landscape,
        "sampler": sampler,
        "runs": len(runs),
        "not_reached": sum(run.reached is None for run in runs),
        **_figures([run.reached for run in runs]),
        "times_ours": _ratio(_median_seconds(runs), ours_seconds),
    }
    if sampler == OURS:
        row["ended"] = _figures([run.ended for run in runs])
        row["worst_answer"] = round(min(run.answer or 0.0 for run in runs), 4)
    return row


def _ratio(seconds: float, ours_seconds: float) -> float | None:
    return None if math.isinf(seconds) or math.isinf(ours_seconds) else round(seconds / ours_seconds, 2)


def rows_of(runs: Sequence[Run], paths: Sequence[Path]) -> list[Document]:
    """Return a row for each landscape and sampler, and one for each whole grid."""
    rows = []
    for path in paths:
        of_path = [run for run in runs if run.landscape == path.name]
        ours_seconds = _median_seconds(run for run in of_path if run.sampler == OURS)
        for sampler, group in groupby(of_path, key=lambda run: run.sampler):
            rows.append(_row(path.name, sampler, list(group), ours_seconds))
        grid = whole_grid(path)
        ratio = _ratio(grid.seconds, ours_seconds)
        rows.append({"landscape": path.name, "sampler": WHOLE_GRID, "runs": 1, **_figures([grid]), "times_ours": ratio})
    return rows


def _cell(values: Document) -> str:
    median, worst = (values[name] for name in ("median", "worst"))
    texts = ["never" if value is None else f"{value:.3g}" for value in (median, worst)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} ({texts[1]})"


def print_rows(rows: Sequence[Document], within: float) -> None:
    """Print the rows as tables in Markdown."""
    table = Table(box=box.MARKDOWN)
    for title in ("landscape", "sampler", "trials", "out of memory", "seconds", "× ours"):
        table.add_column(title, no_wrap=True)
    ends = Table(box=box.MARKDOWN)
    for title in ("landscape", "trials to the end", "out of memory", "seconds", "answer, of the best"):
        ends.add_column(title, no_wrap=True)
    for row in rows:
        name = row["landscape"].split("_")[0]
        figures = [_cell(row[what]) for what in ("trials", "out_of_memory", "seconds")]
        ratio = "" if row["times_ours"] is None else f"{row['times_ours']:.1f}"
        table.add_row(name, row["sampler"], *figures, ratio)
        if row["sampler"] == OURS:
            ended = [_cell(row["ended"][what]) for what in ("trials", "out_of_memory", "seconds")]
            ends.add_row(name, *ended, f"{row['worst_answer']:.1%}")
    console = Console(width=120)
    console.print(f"Until a trial within {within:.0%} of the best of the grid: median (worst)", table)
    console.print("Until autotune ends by itself:", ends)


def main() -> None:
    """Run the comparison, print its tables, and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", nargs="*", type=Path, metavar="LANDSCAPE.jsonl")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--within", type=float, default=0.01, help="of the best, relative")
    parser.add_argument("--budget", type=int, default=60, help="trials that Optuna's samplers have")
    parser.add_argument("--prediction-seconds", type=float, help="until predictions are there [default: as measured]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also every run, and the table as data")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.landscapes] or landscapes()
    runs = run_all(paths, options)
    rows = rows_of(runs, paths)
    print_rows(rows, options.within)
    if not any(row["sampler"] == "GP" for row in rows):
        print("GP was left out: it needs scipy (pip install '.[bench]').")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "landscapes")}
        document = {"settings": settings, "rows": rows, "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
