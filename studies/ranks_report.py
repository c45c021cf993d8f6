"""Print what ``studies/ranks.py`` recorded: the best cells, predicted against measured, what searches found, faults.

    python studies/ranks_report.py FOLDER

``FOLDER`` is the one that ``ranks.py`` was given.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def cells_of(path: Path) -> list[Cell]:
    """Return the measured cells of a grid, each with what was predicted of it, also where that came later."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    later = {_key(line): line for line in lines if line.get("prediction")}
    cells = [line for line in lines if line.get("state") in ("ok", "oom", "failed")]
    names = ("predicted_allocated_mib", "predicted_reserved_mib")
    return [{**cell, **{n: later[_key(cell)][n] for n in names if _key(cell) in later}} for cell in cells]


def _key(cell: Cell) -> tuple[Any, ...]:
    names = ("strategy", "precision", "gradient_checkpointing", "sync_each_batch", "per_device_train_batch_size")
    return tuple(cell.get(name) for name in names)


def name_of(cell: Cell) -> str:
    """Return ``fsdp bf16 checkpointing 16 × 2``."""
    words = [str(cell.get("strategy")), str(cell.get("precision"))]
    words += ["checkpointing"] if cell.get("gradient_checkpointing") else []
    words += ["sync"] if cell.get("sync_each_batch") else []
    return f"{' '.join(words)} {cell.get('per_device_train_batch_size')} × {cell.get('gradient_accumulation_steps')}"


def errors_of(cells: list[Cell], what: str) -> list[float]:
    """Return predicted over measured peaks less one, of ``allocated`` or ``reserved`` bytes."""
    names = f"predicted_{what}_mib", f"peak_{what}_mib"
    return [cell[names[0]] / cell[names[1]] - 1 for cell in cells if cell["state"] == "ok" and names[0] in cell]


def _in_short(errors: list[float]) -> str:
    if not errors:
        return "nothing predicted"
    sizes = sorted(map(abs, errors))
    return f"{len(sizes)} cells, median {statistics.median(sizes):.2%}, worst {sizes[-1]:.2%}"


def _grid(path: Path) -> float | None:
    """Print a grid; return its fastest cell's samples a second."""
    cells = cells_of(path)
    measured = sorted((cell for cell in cells if cell["state"] == "ok"), key=lambda cell: -cell["samples_per_second"])
    print(f"\n{path.stem}: {len(measured)} of {len(cells)} cells completed")
    for cell in measured:
        predicted = cell.get("predicted_allocated_mib")
        error = f"{predicted / cell['peak_allocated_mib'] - 1:+7.2%}" if predicted else " " * 7
        print(
            f"  {name_of(cell):38} {cell['samples_per_second']:9.1f} samples/s  {cell['peak_allocated_mib']:8,.0f} MiB "
            f"{error}  context {cell['context_mib'] or 0:6,.0f} MiB  {cell['over_steps_seconds']:5.2f} s over its steps"
        )
    for cell in cells:
        if cell["state"] != "ok":
            print(f"  {name_of(cell):38} {cell['state']}: {cell.get('message', '')[:90]}")
    for what in ("allocated", "reserved"):
        print(f"  {what}: {_in_short(errors_of(cells, what))}")
    return measured[0]["samples_per_second"] if measured else None


def _search(name: str, found: dict[str, Any], fastest: float | None) -> None:
    best = found.get("best") or {}
    if not best.get("samples_per_second"):
        print(f"{name}: {found.get('error') or found.get('last_words') or found.get('left_out')}")
        return
    of_grid = f", {best['samples_per_second'] / fastest - 1:+.2%} of the grid's fastest" if fastest else ""
    print(
        f"{name}: {name_of(best)} at {best['samples_per_second']:.1f} samples/s{of_grid}; {found['trials']} trials in "
        f"{found['whole_seconds']} s as a whole command ({found['search_seconds']:.1f} s of search)"
    )


def main() -> None:
    """Print all that is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    fastest: dict[str, float] = {}
    for path in sorted(folder.glob("*_grid*.jsonl")):
        name, best = path.name.rpartition("_grid")[0], _grid(path)
        fastest[name] = max(fastest.get(name, 0.0), best or 0.0)
    record = folder / "ranks.json"
    parts = json.loads(record.read_text(encoding="utf-8"))["parts"] if record.exists() else {}
    print()
    for name, found in parts.get("search", {}).items():
        _search(name, found, fastest.get(name))
    for name, found in parts.get("verify", {}).items():
        ratio, peak = found.get("samples_per_second_ratio"), found.get("peak_ratio")
        told = f"{ratio - 1:+.2%} samples/s, {peak - 1:+.2%} peak" if ratio and peak else found.get("last_words", "")
        print(f"verify {name}: {found.get('verdict')} {told} {found.get('error', '')}")
    for found in parts.get("faults", {}).values():
        for how in ("kill", "memory", "stop"):
            told = found.get(how) or {}
            seconds = f"all gone {told.get('all_gone_after')} s, free {told.get('all_free_after')} s"
            print(f"fault {how}: {told.get('state')} {seconds}")
    for found in parts.get("parallel", {}).values():
        print(
            f"parallel: {found.get('grid_ratio')} of the time for the grid, {found.get('whole_ratio')} for the whole "
            f"command; speeds differ by {found.get('speed_difference_median')} in the median, "
            f"{found.get('speed_difference_worst')} at worst"
        )
    for found in parts.get("beside", {}).values():
        for cell in found.get("cells", ()):
            print(
                f"beside: {cell['cell']:32} in company {cell['company_median']:+.2%} (each: {cell['company']}), "
                f"alone again {cell['alone_median']:+.2%} (each: {cell['alone']})"
            )


if __name__ == "__main__":
    main()
