"""Compare predicted with measured steps of several ranks that train together on one host.

    python studies/several_gpus.py

Steps of two H200 were measured with this project, with DDP and with FSDP. Speed-ups over one GPU with DDP are compared
with what Lambda published for eight other GPUs (``studies/landscapes/several_gpus.json``).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from recorded_steps import LANDSCAPES, Subject, operations_key, published, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.prediction import Operations
from autotune.core.schema import decode
from autotune.devices.gpus import CHIPS
from autotune.estimate.step_time import StepTime, StepTimeModel

SEVERAL = LANDSCAPES / "several_gpus.json"
SHARDED = LANDSCAPES / "bert-large-uncased_2xh200_cap23.5GiB.jsonl"


@dataclass(frozen=True)
class Ranks:
    """The throughput of several ranks together, with what is predicted for them and for one of them."""

    gpu: str
    candidate: Candidate
    samples_per_second: float
    of_one: float | None
    """Published for one GPU; ``None`` where the throughput itself is compared."""
    predicted: StepTime
    predicted_of_one: StepTime
    model: str

    @property
    def measured(self) -> float:
        """Return the throughput, or the speed-up over one GPU where that is compared."""
        return self.samples_per_second / (self.of_one or 1.0)

    @property
    def expected(self) -> tuple[float, float, float]:
        """Return what is predicted for ``measured``, and its interval."""
        low, high = self.predicted.interval_samples_per_second
        if self.of_one is None:
            return self.predicted.samples_per_second, low, high
        one_low, one_high = self.predicted_of_one.interval_samples_per_second
        one = self.predicted_of_one.samples_per_second
        # What is uncertain about one GPU cancels: its slow case goes with the slow case of several.
        return self.predicted.samples_per_second / one, low / one_low, high / one_high

    @property
    def is_inside(self) -> bool:
        """Return whether it lies in the interval."""
        _, low, high = self.expected
        return low <= self.measured <= high


def several() -> list[Ranks]:
    """Return all measured steps of several ranks."""
    document = json.loads(SEVERAL.read_text(encoding="utf-8"))
    operations = {key: decode(traced, Operations) for key, traced in recorded_operations().items()}
    alone = {(p.gpu, p.subject, p.candidate): p.samples_per_second for p in published() if "lambda" in p.source}
    found = []
    for row in document["rows"]:
        known = dict(zip(document["columns"], row, strict=True))
        arm = Arm(known["precision"], known["gradient_checkpointing"], known["attn_implementation"])
        subject = Subject(known["model"], known["seq_len"])
        one = Candidate(arm, known["per_device_train_batch_size"], known["gradient_accumulation_steps"])
        candidate = dataclasses.replace(one, arm=dataclasses.replace(arm, strategy="ddp", ranks=known["ranks"]))
        of_step, model = operations[operations_key(subject, arm)], StepTimeModel(CHIPS[known["gpu"]])
        of_one = alone[known["gpu"], subject, one] if known["source"] == "lambda" else None
        predicted = model.predict(of_step, candidate), model.predict(of_step, one)
        found.append(Ranks(known["gpu"], candidate, known["samples_per_second"], of_one, *predicted, known["model"]))
    return found


def sharded() -> list[Ranks]:
    """Return the measured steps of ranks that keep a part of the model each."""
    operations = {key: decode(traced, Operations) for key, traced in recorded_operations().items()}
    found = []
    meta, *cells = map(json.loads, SHARDED.read_text(encoding="utf-8").splitlines())
    meta, model = meta["meta"], StepTimeModel(CHIPS["h200"])
    for cell in cells:
        one = Candidate.from_parameters({"precision": meta["precision"], **{**cell, "strategy": None}})
        arm = dataclasses.replace(one.arm, strategy=cell["strategy"], ranks=meta["ranks"])
        if arm.is_sharded:
            of_step = operations[operations_key(Subject(meta["model"], meta["seq_len"]), one.arm)]
            candidate = dataclasses.replace(one, arm=arm)
            predicted = model.predict(of_step, candidate), model.predict(of_step, one)
            found.append(Ranks("h200", candidate, cell["samples_per_second"], None, *predicted, meta["model"]))
    return found


def main() -> None:
    """Print the comparison."""
    print(f"{'GPU':<14}{'model':<20}{'candidate':<30}{'measured':>9}{'predicted':>10}{'error':>7}  interval")
    every = [*several(), *sharded()]
    for known in every:
        expected, low, high = known.expected
        told = f"{known.gpu:<14}{known.model:<20}{known.candidate.describe()[:28]:<30}{known.measured:>9.2f}"
        told += f"{expected:>10.2f}{expected / known.measured - 1:>+7.0%}  {low:.2f} to {high:.2f}"
        print(told + ("" if known.is_inside else "  outside"))
    inside = sum(known.is_inside for known in every)
    print(f"in the interval: {inside} of {len(every)}")


if __name__ == "__main__":
    main()
