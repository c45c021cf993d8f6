"""Read what ``studies/promises.py`` recorded, and print it as tables.

Whole documents of ``autotune verify`` are in the records, and the tables read them anew.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.core.candidate import Candidate, Document
from autotune.core.units import plural

ANSWERED = (0, 11)
"""Exit codes of a command that gave an answer: ``verify`` ends with 11 where a promise was not kept."""


# What the commands print


def read_search(document: Document) -> Document:
    """Select what is recorded of the JSON document of ``autotune search``."""
    trials, best = document.get("trials", []), document.get("best")
    found: Document = {
        "search_seconds": document.get("seconds"),
        "stopped_because": document.get("stopped_because"),
        "trials": len(trials),
        "tried": [_tried(trial) for trial in trials],
        "notes": document.get("notes"),
        "environment": document.get("environment"),
        "expert": document.get("expert"),
    }
    if best is None:
        return found
    winner = Candidate.from_parameters(best)
    shares = [_share(trial) for trial in trials if Candidate.from_parameters(trial) == winner]
    # The winner's other trials tell it where the one that is reported was not profiled.
    known = [share for share in (_share(best), *shares) if share is not None]
    return found | {
        "winner": winner.describe(),
        "winner_parameters": winner.parameters(),
        "pinned": bool(best.get("cpu_affinity")),
        "cpu_core": best.get("cpu_core"),
        "search_samples_per_second": best.get("samples_per_second"),
        "search_relative_spread": best.get("relative_spread"),
        "gpu_busy_share": known[0] if known else None,
        "limited_by": best.get("limited_by"),
    }


def _share(trial: Document) -> float | None:
    share: float | None = trial.get("gpu_busy_share")
    return share


def _tried(trial: Document) -> Document:
    """Select what explains the course of a search."""
    names = ["stage", "state", "samples_per_second", "relative_spread", "gpu_busy_share", "data_seconds"]
    names += ["peak_reserved_bytes", "peak_allocated_bytes", "cpu_core", "seconds"]
    names += ["phase_seconds", "message"]
    return {"candidate": Candidate.from_parameters(trial).describe(), **{name: trial.get(name) for name in names}}


def read_interval(part: Document) -> tuple[float, float] | None:
    """Read the interval of samples/s from the part ``promised`` or ``obtained`` of a verification."""
    low, high = part.get("samples_per_second_low"), part.get("samples_per_second_high")
    return None if low is None or high is None else (float(low), float(high))


def read_verification(document: Document) -> Document:
    """Select what is recorded of the JSON document of ``autotune verify``."""
    promised, obtained = document.get("promised", {}), document.get("obtained", {})
    return {
        "promised_samples_per_second": promised.get("samples_per_second"),
        "promised_interval": read_interval(promised),
        "obtained_samples_per_second": obtained.get("samples_per_second"),
        "obtained_interval": read_interval(obtained),
        "verdict": str(document.get("verdict")).replace("_", " "),
        "misses": document.get("misses", []),
    }


# Tables


def table(records: Sequence[Document]) -> str:
    """Summarize records of one or several machines."""
    parts = [promises_table([record for record in records if record.get("kind") == "promise"])]
    parts.append(gains_table([record for record in records if record.get("kind") == "promise"]))
    parts.append(comparison_table([record for record in records if record.get("kind") == "comparison"]))
    return "\n\n".join(part for part in parts if part)


def promises_table(records: Sequence[Document]) -> str:
    """Show each search with its verification, and count the promises that were refuted."""
    if not records:
        return ""
    machines = _machines(records)
    titles = f"{'workload':<13}{'machine':>8}{'promised':>10}{'interval':>17}{'obtained':>10}{'interval':>17}"
    lines = [titles + f"{'ratio':>7}{'busy':>6}  {'verdict':<12}{'trials':>7}{'search':>8}{'verify':>8}  winner"]
    reasons = []
    names = list(dict.fromkeys(record["workload"] for record in records))
    for record in sorted(records, key=lambda record: (names.index(record["workload"]), record["date"])):
        which = machines.index(_machine(record)) + 1
        told = _told(record)
        if told is None:
            cut_off = "the run's time was over" if record.get("cut_off") else str(record.get("error"))
            lines.append(f"{record['workload']:<13}{which:>8}  no verdict: {_last_line(cut_off)}")
            continue
        promised, obtained = told["promised_samples_per_second"], told["obtained_samples_per_second"]
        ratio = f"{obtained / promised:.3f}" if promised and obtained else "?"
        share = record.get("gpu_busy_share")
        lines.append(
            f"{record['workload']:<13}{which:>8}{rate(promised):>10}{_range(told['promised_interval']):>17}"
            f"{rate(obtained):>10}{_range(told['obtained_interval']):>17}{ratio:>7}"
            f"{'?' if share is None else f'{share:.0%}':>6}  {told['verdict']:<12}{record['trials']:>7}"
            f"{record['search_wall_seconds']:>7.1f}s{record['verify_wall_seconds']:>7.1f}s  {record['winner']}"
        )
        if told["verdict"] == "missed":
            reasons += [f"  {record['workload']}, machine {which}: {miss}" for miss in told["misses"]]
    return "\n".join([*lines, "", *_machine_lines(records, machines), _count_line(records), *reasons])


def gains_table(records: Sequence[Document]) -> str:
    """Show what the answers gain over bf16 at the largest batch that fits, the median of each workload's searches."""
    gains: dict[str, list[tuple[float, bool]]] = {}
    for record in records:
        if (expert := record.get("expert")) and expert.get("speedup"):
            gains.setdefault(record["workload"], []).append((expert["speedup"], expert["measured"]))
    if not gains:
        return ""
    medians = {name: statistics.median(gain for gain, _ in found) for name, found in gains.items()}
    lines = [f"{'workload':<13}{'× expert':>9}  expert's speed"]
    for name, median in medians.items():
        are_measured = all(is_measured for _, is_measured in gains[name])
        lines.append(f"{name:<13}{median:>9.2f}  {'measured' if are_measured else 'predicted in part'}")
    mean = statistics.geometric_mean(medians.values())
    return "\n".join([*lines, f"geometric mean {mean:.2f}, least {min(medians.values()):.2f}"])


def _count_line(records: Sequence[Document]) -> str:
    """Count the verdicts, runs without one aside."""
    verdicts = [told["verdict"] for record in records if (told := _told(record)) is not None]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    machines, refuted = plural(len(_machines(records)), "machine"), verdicts.count("missed")
    without = len(records) - len(verdicts)
    below, above = _outside(records)
    return (
        f"{refuted} of {len(verdicts)} promises refuted on {machines} ({counts}); {below} obtained below the promised "
        f"interval, {above} above; {without} without a verdict"
    )


def _outside(records: Sequence[Document]) -> tuple[int, int]:
    """Count the obtained speeds below and above their promised intervals."""
    below = above = 0
    for told in filter(None, map(_told, records)):
        interval, obtained = told["promised_interval"], told["obtained_samples_per_second"]
        if interval is not None and obtained is not None:
            below += obtained < interval[0]
            above += obtained > interval[1]
    return below, above


def _told(record: Document) -> Document | None:
    """Read the verification of a record; ``None`` where it has none."""
    document = record.get("verification")
    if document is None or record.get("verify_exit_code") not in ANSWERED:
        return None
    return read_verification(document)


def _machine(record: Document) -> str:
    facts = record["facts"]
    return f"{facts['device']} {facts['device_uuid']}, {facts['cpu']}, {plural(facts['cores'], 'core')}"


def _machines(records: Iterable[Document]) -> list[str]:
    return list(dict.fromkeys(_machine(record) for record in records))


def _machine_lines(records: Sequence[Document], machines: Sequence[str]) -> list[str]:
    """Describe each machine with the speed of its cores."""
    lines = []
    for number, machine in enumerate(machines, 1):
        own = [record for record in records if _machine(record) == machine]
        loops = [record["python_loop_seconds"] for record in own]
        commits = ", ".join(sorted({str(record["facts"]["commit"]) for record in own}))
        loop = f"Python loop {min(loops):.2f} to {max(loops):.2f} s"
        lines.append(f"machine {number}: {machine}; {loop}; commit {commits}; {min(r['date'] for r in own)}")
    return lines


def comparison_table(records: Sequence[Document]) -> str:
    """Show the seconds and trials of both checkouts, the ratio a workload, and the median ratio."""
    if not records:
        return ""
    machines = _machines(records)
    lines = [f"{'workload':<13}{'old s (trials)':>30}{'new s (trials)':>30}{'new / old':>11}"]
    ratios = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        own = [record for record in records if record["workload"] == workload]
        good = [record for record in own if "ratio" in record]
        failed = [str(record.get("error")) for record in own if "ratio" not in record and not record.get("cut_off")]
        lines += [f"{workload:<13}  failed: {_last_line(error)}" for error in failed]
        if good:
            ratios.append(statistics.median(record["ratio"] for record in good))
            seconds = f"{each_search(good, 'old'):>30}{each_search(good, 'new'):>30}"
            lines.append(f"{workload:<13}{seconds}{ratios[-1]:>11.3f}")
    if ratios:
        lines.append(f"median of {plural(len(ratios), 'workload')}: {statistics.median(ratios):.3f}")
    return "\n".join([*lines, "", *_machine_lines(records, machines)])


def each_search(records: Sequence[Document], tree: str) -> str:
    return " ".join(f"{record[tree]['search_wall_seconds']:.1f} ({record[tree]['trials']})" for record in records)


def rate(value: float | None) -> str:
    return "?" if value is None else f"{value:,.1f}"


def _range(interval: tuple[float, float] | None) -> str:
    return "?" if interval is None else f"{interval[0]:,.1f}–{interval[1]:,.1f}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:120] if text.strip() else "?"


def read_records(paths: Iterable[Path]) -> list[Document]:
    """Read the JSON lines of several files; a line that was cut off is left out."""
    records = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                print(f"{path}: a line is no JSON and is left out", file=sys.stderr)
    return records
