"""Reading data as a search does, in a process for trials, and trials with what was read."""

import shutil
from pathlib import Path
from typing import Any

from server_client import ServerClient
from tiny import QUICK

from autotune.core.candidate import Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.messages import DataWork
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
        self._end = server.run(workload, DataWork(str(self._folder))).end
        if self._end.result is not None:
            self.facts = decode(self._end.result, DataFacts)
            self.workload = workload.with_facts(self.facts)
        else:
            # As a search does.
            shutil.rmtree(self._folder)

    def trial(self, candidate: Candidate, effort: Effort = QUICK, **job: Any) -> Any:
        return self._server.trial(self.workload, candidate, effort, data_folder=str(self._folder), **job)

    @property
    def refusal(self) -> str:
        problem = self._end.problem
        assert problem.hint
        return f"{problem.message} | {problem.hint}"
