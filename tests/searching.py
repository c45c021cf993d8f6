"""Searches over recorded and computed trials: requests, facts and a device as values, an observer that keeps all."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recorded import ComputedRunner, RecordedRunner

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.device import Device
from autotune.core.inspection import Inspection, ModelFacts, Software
from autotune.core.messages import Progress
from autotune.core.units import GIB, MIB
from autotune.core.workload import Workload
from autotune.estimate.history import History
from autotune.space.space import choose_arms
from autotune.store.opening import open_store
from autotune.store.records import Stage, StudyRecord, TrialRecord
from autotune.store.repository import Store
from autotune.tuning.interruption import Interruption
from autotune.tuning.loop import Search
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

CONTEXT_BYTES = 620 * MIB
"""The CUDA context that the landscapes were recorded with."""

BERT_LARGE = Workload(
    model="bert-large-uncased",
    config={"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 24},
    task="sequence-classification",
    seq_len=512,
)
H200 = Device(
    kind="cuda",
    index=0,
    uuid="GPU-00000000-0000-0000-0000-000000000000",
    name="NVIDIA H200",
    memory_total_bytes=140 * GIB,
    memory_reserved_bytes=615 * MIB,
    memory_used_bytes=0,
    memory_free_bytes=139 * GIB,
    driver="580.159.04",
    capability=(9, 0),
)
MODEL = ModelFacts(
    "BertForSequenceClassification", 335_143_938, 335_143_938, ("eager", "sdpa"), gradient_checkpointing=True
)
FACTS = Inspection(
    Software("3.11.2", {"torch": "2.13.0", "transformers": "5.23.0"}, ("bf16", "fp16"), cuda="13.0"),
    context_bytes=CONTEXT_BYTES,
    model=MODEL,
)


def facts(**model: Any) -> Inspection:
    """What a trial process says of BERT-large on this machine, with other facts about the model."""
    return replace(FACTS, model=replace(MODEL, **model))


def request(**options: Any) -> SearchRequest:
    """The example command's request: BERT-large at effective batch 64 under 24 GiB."""
    defaults: dict[str, Any] = {"effective_batch": 64, "memory_limit_bytes": 24 * GIB, "study": "bert"}
    return SearchRequest(device=H200, **{"workload": BERT_LARGE, **defaults, **options})


def prepared(**options: Any) -> Prepared:
    """The same, prepared."""
    return prepare(request(**options), FACTS)


def ceiling_of(cap_bytes: int, headroom: float = 0.03) -> Ceiling:
    """A ceiling with this cap."""
    return Ceiling(None, cap_bytes + CONTEXT_BYTES, CONTEXT_BYTES, Headroom(headroom))


def arms(*precisions: Precision, checkpointing: Any = "auto", attention: str = "sdpa") -> tuple[Arm, ...]:
    """The arms of a search over these precisions, all four when none is named."""
    return choose_arms(
        precisions or ("bf16", "fp16", "tf32", "fp32"),
        checkpointing,
        (attention,),
        ("adamw_torch_fused",),
        model_checkpoints=True,
    )


@functools.cache
def _empty_database() -> bytes:
    """A database as ``open_store`` makes it; making one takes ten times as long as copying it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "autotune.db"
        open_store(str(path)).close()
        return path.read_bytes()


def write_empty_database(path: Path) -> None:
    """Make a database without studies where there is no file yet."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_empty_database())


def new_store(folder: Path, name: str = "autotune.db") -> Store:
    """An open, empty store in a file of its own."""
    path = folder / name
    write_empty_database(path)
    return open_store(str(path))


@dataclass
class RecordingObserver:
    """Keeps everything that it is told."""

    begun: int = 0
    started: list[tuple[int, Candidate, Stage]] = field(default_factory=list)
    records: list[Progress] = field(default_factory=list)
    ended: list[TrialRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    on_end: Callable[[TrialRecord], None] | None = None

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        self.begun += 1

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        self.started.append((number, candidate, stage))

    def progress(self, number: int, progress: Progress) -> None:
        self.records.append(progress)

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        self.ended.append(trial)
        if self.on_end is not None:
            self.on_end(trial)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stages(self) -> list[Stage]:
        """The stage of each trial, in order."""
        return [stage for _, _, stage in self.started]


@dataclass
class Run:
    """One search with what came of it."""

    study: StudyRecord
    observer: RecordingObserver
    trials: list[TrialRecord]

    @property
    def best(self) -> TrialRecord:
        """The winner."""
        return next(trial for trial in self.trials if trial.id == self.study.best_trial_id)


def search(
    store: Store,
    runner: RecordedRunner | ComputedRunner,
    observer: RecordingObserver | None = None,
    interruption: Interruption | None = None,
    given: Prepared | None = None,
    **options: Any,
) -> Run:
    """Search to the end with the runner's simulated clock."""
    given = given or prepared(**options)
    observer = observer or RecordingObserver()
    study = Search(given, runner, store, observer, Path("logs"), interruption, clock=runner.clock).run()
    return Run(study, observer, store.trials(study.id))


def interrupt_after(trials: int) -> tuple[RecordingObserver, Interruption]:
    """An observer that asks for the end once so many trials have ended, and how it asks."""
    interruption = Interruption()
    observer = RecordingObserver()

    def count(_: TrialRecord) -> None:
        interruption.asked = len(observer.ended) >= trials

    observer.on_end = count
    return observer, interruption


def with_environment(given: Prepared, **changed: Any) -> Prepared:
    """The same search in another environment."""
    return replace(given, environment={**given.environment, **changed})
