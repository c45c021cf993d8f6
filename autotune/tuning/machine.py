"""Describe the machine that trains: its environment, and the keys under which answers about it are cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from autotune.core.candidate import Arm, Document
from autotune.core.inspection import Software
from autotune.core.prediction import PredictionWork
from autotune.core.workload import Workload
from autotune.devices.host import host_memory
from autotune.tuning.environment import describe_environment

if TYPE_CHECKING:
    from autotune.tuning.request import SearchRequest


class Machine(Protocol):
    """The machine whose devices a search uses: this one, or a node of a cluster."""

    def environment(
        self, request: SearchRequest, arms: Sequence[Arm], software: Software, measurement_revision: int
    ) -> Document:
        """Return what a measurement depends on; see ``describe_environment``."""

    def inspection_key(self, request: SearchRequest) -> str | None:
        """Return the key of an inspection; see ``autotune.tuning.answer_cache.inspection_key``."""

    def prediction_key(self, identity: PredictionWork, workload: Workload) -> str:
        """Return the key of a prediction; see ``autotune.tuning.answer_cache.prediction_key``."""

    def free_host_bytes(self) -> int | None:
        """Return the host's free memory; ``None`` where it is not known."""


class ThisMachine:
    """The machine that this process runs on."""

    def environment(
        self, request: SearchRequest, arms: Sequence[Arm], software: Software, measurement_revision: int
    ) -> Document:
        """See ``Machine.environment``."""
        return describe_environment(request.placement, request.workload, arms, software, measurement_revision)

    def inspection_key(self, request: SearchRequest) -> str | None:
        """See ``Machine.inspection_key``."""
        from autotune.tuning.answer_cache import inspection_key

        return inspection_key(request.device, request.workload, request.ranks)

    def prediction_key(self, identity: PredictionWork, workload: Workload) -> str:
        """See ``Machine.prediction_key``."""
        from autotune.tuning.answer_cache import prediction_key

        return prediction_key(identity, workload)

    def free_host_bytes(self) -> int | None:
        """See ``Machine.free_host_bytes``."""
        return host_memory().free_bytes
