"""Make reports of studies as the store returns them: of one winner, and of a few trials on an H200."""

from typing import Any

from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.outcome import Completed, Measurement, Outcome, OutOfMemory
from autotune.core.schema import encode
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.results.report import Report
from autotune.space.training_arguments import TF32_UNSET_REVISION
from autotune.store.records import Stage, StopReason, StudyRecord, TrialRecord, now

OLD_FIELDS = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "fp16", "tf32", "optim", "use_cpu")


def report_of(
    candidate: Candidate, device_kind: str, fields: tuple[str, ...], workload: Workload | None = None
) -> Report:
    """What the store would hold of a study that this candidate won."""
    completed = Completed(Measurement(0.5, (0.5, 0.5), 0.0, candidate.samples_per_step / 0.5, 1000, 2000))
    trial = TrialRecord("study", 0, candidate, "workload", "environment", outcome=completed)
    ceiling = Ceiling(None, 2**34, 0)
    study = StudyRecord("a study", "workload", "environment", {}, encode(ceiling), "0.1.0", best_trial_id=trial.id)
    environment = {
        "device_kind": device_kind,
        "device_name": "A Device",
        "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
        "training_arguments_fields": list(fields),
        "measurement_revision": TF32_UNSET_REVISION,
    }
    return Report(study, (workload or tiny_workload("bert-tiny")).document(), environment, ceiling, (trial,))


CEILING = Ceiling(limit_bytes=24 * GIB, free_bytes=140 * GIB, context_bytes=GIB)
SOURCE: dict[str, Any] = {"kind": "script", "file": "/home/ada/train.py", "digest": "0", "cwd": "/home/ada"}
"""A script of the user's, as it is recorded."""
WORKLOAD: dict[str, Any] = {
    "model": "bert-large-uncased",
    "task": "sequence-classification",
    "seq_len": 512,
    "padding": 0.0,
    "dtype": "float32",
}
ENVIRONMENT: dict[str, Any] = {
    "device_kind": "cuda",
    "device_name": "NVIDIA H200",
    "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
    "training_arguments_fields": ["bf16"],
}
REQUEST: dict[str, Any] = {
    "effective_batch": 64,
    "world_size": 1,
    "batch_multiple": None,
    "objective": "throughput",
    "measure_baseline": True,
    "seed": 42,
}
BF16, FP16, FP32 = Arm("bf16"), Arm("fp16"), Arm("fp32")


def completed(rate: float, peak_gib: float = 10.0, spread: float = 0.003, micro_steps: int = 2) -> Completed:
    peak = int(peak_gib * GIB)
    return Completed(Measurement(64 / rate, (64 / rate,) * 3, spread, rate, peak, peak, micro_steps_run=micro_steps))


def trial(number: int, arm: Arm, batch: int, outcome: Outcome | None, stage: Stage = "search") -> TrialRecord:
    candidate = Candidate(arm, batch, max(1, 64 // batch))
    return TrialRecord("s", number, candidate, "w", "e", stage, f"trial-{number}", outcome=outcome, seconds=2.0)


def report(*trials: TrialRecord, best: int | None = 1, baseline: int | None = 0, **changes: Any) -> Report:
    """A finished study of these trials; ``changes`` go into the request, ``state`` into the study."""
    study = StudyRecord(
        "a-study",
        "w",
        "e",
        {**REQUEST, **{key: value for key, value in changes.items() if key != "state"}},
        encode(CEILING),
        "0.1.0",
        state=changes.get("state", "finished"),
        stop_reason=StopReason.TRIALS,
        stopped_because="the budget of 3 trials is spent",
        best_trial_id=None if best is None else f"trial-{best}",
        baseline_trial_id=None if baseline is None else f"trial-{baseline}",
        ended_at=now(),
        seconds=30.0,
    )
    return Report(study, WORKLOAD, ENVIRONMENT, CEILING, trials)


BASELINE = trial(0, FP32, 8, completed(41.7), "baseline")
WINNER = trial(1, BF16, 32, completed(310.7, 22.2))
OVER = trial(2, BF16, 64, OutOfMemory("CUDA out of memory", peak_reserved_bytes=23 * GIB))
