"""Compare predicted with measured steps of several ranks that train together on one host.

    python studies/several_gpus.py

Steps of two H200 were measured with this project, with DDP and with FSDP. Speed-ups over one GPU with DDP are compared
with what Lambda published for eight other GPUs (``studies/landscapes/several_gpus.json``). Of four H200 the exchanges
alone were measured, beside what a search measures of them.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass, replace

from recorded_steps import LANDSCAPES, Subject, operations_key, published, read_lines, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Calibration, Collective
from autotune.core.prediction import Operations
from autotune.core.schema import decode
from autotune.devices.gpus import CHIPS
from autotune.estimate.gpu_time import calibrated
from autotune.estimate.step_time import StepTime, StepTimeModel, exchange, gathering
from autotune.models.resolve import resolve_model

SEVERAL = LANDSCAPES / "several_gpus.json"
EXCHANGES = LANDSCAPES / "exchanges_4xh200.json"


@dataclass(frozen=True)
class Ranks:
    """The measured throughput of several ranks together, with predictions for all ranks and for one alone."""

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
        """Return the prediction of ``measured``, and its interval."""
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
    operations = recorded_operations()
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


def grids() -> list[Ranks]:
    """Return the measured steps of two H200 in which several strategies were measured."""
    operations = recorded_operations()
    found, model = [], StepTimeModel(CHIPS["h200"])
    for path in sorted(LANDSCAPES.glob("*_2xh200_*.jsonl")):
        first, *lines = read_lines(path)
        of_all = first["meta"] if isinstance(first["meta"], dict) else first["workload"]
        is_image = of_all["task"] == "image-classification"
        subject = Subject(of_all["model"], None if is_image else of_all["seq_len"])
        for line in lines:
            of_ranks = {"precision": of_all.get("precision"), "ranks": of_all.get("ranks"), **line}
            # Those of DDP in the older recording are in ``several_gpus.json``.
            strategies = ("fsdp", "fsdp-keep") if isinstance(first["meta"], dict) else ("ddp", "fsdp", "fsdp-keep")
            if not line.get("samples_per_second") or line["strategy"] not in strategies:
                continue
            candidate = Candidate.from_parameters(of_ranks)
            one = replace(candidate, arm=Arm(candidate.arm.precision, candidate.arm.gradient_checkpointing))
            key = _key(subject, one.arm, operations)
            if key is not None:
                traced = operations[key]
                predicted = model.predict(traced, candidate), model.predict(traced, one)
                found.append(Ranks("h200", candidate, line["samples_per_second"], None, *predicted, subject.model))
    return found


def exchanges() -> list[tuple[str, int, str, float, float, float]]:
    """Return model, ranks, strategy and seconds of each exchange on H200s, with those predicted from what a search
    measures there, and from the specified link."""
    known = json.loads(EXCHANGES.read_text(encoding="utf-8"))
    of_link = CHIPS["h200"]
    found = []
    for model, size, tensors, ranks, strategy, seconds in known["rows"]:
        measured = decode(known["collectives"][str(ranks)], dict[str, Collective])
        of_host = calibrated(of_link, Calibration(0, {}, None, 0.0, 0.0, measured))
        arm = Arm("bf16", strategy=strategy, ranks=ranks, dp_shard_size=2 if strategy == "hybrid" else None)
        step = Operations((), {}, tensors, size)
        told = [
            exchange(step, chip, ranks) if strategy == "ddp" else gathering(step, chip, Candidate(arm, 8))
            for chip in (of_host, of_link)
        ]
        found.append((model, ranks, strategy, seconds, told[0].exchanged, told[1].exchanged))
    return found


def _key(subject: Subject, arm: Arm, known: Collection[str]) -> str | None:
    """Return the key of a step's operations, which models have under their short or their whole names."""
    names = [subject.model, resolve_model(subject.model).repository or subject.model]
    keys = [operations_key(Subject(name, subject.seq_len), arm) for name in names]
    return next((key for key in keys if key in known), None)


def main() -> None:
    """Print the comparison."""
    print(f"{'GPU':<14}{'model':<20}{'candidate':<30}{'measured':>9}{'predicted':>10}{'error':>7}  interval")
    every = [*several(), *grids()]
    for known in every:
        expected, low, high = known.expected
        told = f"{known.gpu:<14}{known.model:<20}{known.candidate.describe()[:28]:<30}{known.measured:>9.2f}"
        told += f"{expected:>10.2f}{expected / known.measured - 1:>+7.0%}  {low:.2f} to {high:.2f}"
        print(told + ("" if known.is_inside else "  outside"))
    inside = sum(known.is_inside for known in every)
    own = sorted(abs(known.expected[0] / known.measured - 1) for known in every if known.of_one is None)
    print(f"of this project: {len(own)} steps, median error {own[len(own) // 2]:.0%}, at most {own[-1]:.0%}")
    print(f"in the interval: {inside} of {len(every)}")
    print(f"\n{'exchange':<16}{'GPUs':<6}{'strategy':<11}{'measured':>9}{'predicted':>10}{'error':>7}  by the link")
    errors = []
    for model, ranks, strategy, seconds, of_host, of_link in exchanges():
        errors.append((abs(of_host / seconds - 1), abs(of_link / seconds - 1)))
        told = f"{model:<16}{ranks:<6}{strategy:<11}{seconds * 1e3:>6.1f} ms{of_host * 1e3:>7.1f} ms"
        print(f"{told}{of_host / seconds - 1:>+7.1%}{of_link / seconds - 1:>+12.1%}")
    of_host, of_link = (statistics.median(each) for each in zip(*errors, strict=True))
    print(f"median error {of_host:.1%}; by the specified link {of_link:.1%}")


if __name__ == "__main__":
    main()
