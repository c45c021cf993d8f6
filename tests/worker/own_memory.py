"""Asks a trial server for the traced steps of one's own code, and for the memory that is predicted from them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from searching import request
from server_client import ServerClient

from autotune.core.candidate import Arm
from autotune.core.inspection import ModelFacts
from autotune.core.messages import InspectionWork
from autotune.core.placement import RankDevices
from autotune.core.prediction import Operations, PredictionAnswer, PredictionWork
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS
from autotune.tuning.forecast import arms_to_trace

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
CHIP = CHIPS["h200"].decisive()
BATCHES = ((8, 1), (16, 4), (64, 1))


def inspected(server: ServerClient, workload: Workload, **options: Any) -> ModelFacts:
    """The facts of a model, with the traces of its arms."""
    arms = dataclasses.replace(arms_to_trace(request(workload=workload, **options)), chip=CHIP)
    return server.run(workload, InspectionWork(RankDevices("cpu", ("cpu",)), arms)).inspected.model


@dataclass(frozen=True)
class Predicted:
    """What is predicted of an arm."""

    peaks: list[tuple[int, int]]
    """At each of ``BATCHES``, allocated and reserved."""
    operations: Operations

    @property
    def flops(self) -> float:
        """The floating-point operations of the matrix products of a batch of 8."""
        return self.operations.product_flops(8)

    @property
    def updated_bytes(self) -> int:
        """The bytes that the optimizer reads and writes."""
        return sum(row.count * row.bytes[1] for row in self.operations.rows if row.part == "update")


def predicted(server: ServerClient, workload: Workload, arm: Arm, step: str | None = None) -> Predicted:
    """What is predicted of an arm of a built-in workload, or from the traced step of one's own code."""
    work = PredictionWork(arm, CHIP, GIB, GIB, BATCHES, None, step)
    answer = decode(server.run(workload, work).result, PredictionAnswer)
    peaks = [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in answer.batches]
    return Predicted(peaks, answer.operations)
