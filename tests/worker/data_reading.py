"""Reading data as a search does, in a process for trials, and trials with what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_client import ServerClient
from tiny import QUICK

from autotune.core.candidate import Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.outcome import Effort
from autotune.core.schema import decode
from autotune.core.workload import Workload
from autotune.models.dataset_files import locate


def spec(path: Path, tokenizer: str | None, **changes: Any) -> DataSpec:
    source, kind, content = locate(str(path), changes.get("split"))
    return DataSpec(source, kind, content, tokenizer=tokenizer, **changes)


class Read:
    """Reads a workload's data once and runs trials with it."""

    def __init__(self, server: ServerClient, workload: Workload, folder: Path) -> None:
        self._server = server
        self._folder = folder / "read"
        self.answer = server.run(
            {"kind": "read_data", "workload": workload.document(), "folder": str(self._folder)}
        ).result
        if "facts" in self.answer:
            self.facts = decode(self.answer["facts"], DataFacts)
            self.workload = workload.with_facts(self.facts)
        else:
            assert list(folder.glob("read*")) == [], "nothing is left after an error"

    def trial(self, candidate: Candidate, effort: Effort = QUICK, **job: Any) -> Any:
        return self._server.trial(self.workload, candidate, effort, data_folder=str(self._folder), **job)

    @property
    def refusal(self) -> str:
        message, hint = self.answer["error"]
        assert hint
        return f"{message} | {hint}"
