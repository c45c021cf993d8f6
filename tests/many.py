"""A study of ten thousand trials, in seconds: one real trial's rows, written again and again.

As a script: ``python tests/many.py FILE`` writes the study ``many`` into a new SQLite file.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

from recorded import ComputedRunner
from searching import new_store, prepared, search

from autotune.core.units import GIB
from autotune.tuning.prepare import Prepared

TRIALS = 10_000
STUDY = "many"


def prepared_many(**options: Any) -> Prepared:
    """The search that such a study is of: any batch, proposed at random."""
    asked = {"effective_batch": None, "batch_multiple": 1, "sampler": "random", "trials": TRIALS, "study": STUDY}
    return prepared(**{**asked, **options})


def runner() -> ComputedRunner:
    """Every trial of the study would have been answered by this."""
    return ComputedRunner(lambda candidate: GIB + candidate.per_device_train_batch_size * 0.01 * GIB)


def write_many(path: Path, trials: int = TRIALS, **options: Any) -> Path:
    """A finished study of so many trials, of Optuna and of ours; every one completed."""
    with new_store(path.parent, path.name) as store:
        search(store, runner(), given=prepared_many(trials=1, **options))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        own = _rows(connection, "autotune_trials")[0]
        theirs = {
            name: _rows(connection, name)
            for name in ("trials", "trial_params", "trial_values", "trial_user_attributes", "trial_system_attributes")
        }
        (template,) = theirs["trials"]
        for number in range(1, trials):
            own_id = uuid.uuid4().hex
            batch = number // 4 % 512 + 1
            candidate = {
                **json.loads(own["candidate"]),
                "per_device_train_batch_size": batch,
                "precision": ("bf16", "fp16", "tf32", "fp32")[number % 4],
                "gradient_checkpointing": number % 8 > 3,
            }
            outcome = json.loads(own["outcome"])
            outcome["measurement"]["samples_per_second"] = 50 + number % 97
            _insert(
                connection,
                "autotune_trials",
                {**own, "id": own_id, "number": number, "candidate": json.dumps(candidate), "stage": "search"}
                | {"outcome": json.dumps(outcome)},
            )
            optuna_id = template["trial_id"] + number
            _insert(connection, "trials", {**template, "trial_id": optuna_id, "number": number})
            for name, key in (
                ("trial_params", "param_id"),
                ("trial_values", "trial_value_id"),
                ("trial_user_attributes", "trial_user_attribute_id"),
                ("trial_system_attributes", "trial_system_attribute_id"),
            ):
                for row in theirs[name]:
                    copy = {column: value for column, value in row.items() if column != key} | {"trial_id": optuna_id}
                    if copy.get("param_name") == "per_device_train_batch_size":
                        copy["param_value"] = float(batch)
                    if copy.get("key") == "autotune_trial_id":
                        copy["value_json"] = json.dumps(own_id)
                    _insert(connection, name, copy)
    return path


def _rows(connection: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    found = connection.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


def _insert(connection: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


if __name__ == "__main__":
    print(write_many(Path(sys.argv[1])))
