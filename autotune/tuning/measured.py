"""Pool what earlier studies measured of a workload on each GPU of the catalog."""

from __future__ import annotations

from autotune.core.errors import StorageError
from autotune.core.workload import Workload
from autotune.devices.gpus import chip_of_device
from autotune.estimate.pooling import Pool, Tried
from autotune.store.measured import measured_trials

_LOCK_TIMEOUT_SECONDS = 5.0


def measured_pools(storage: str, workload: Workload) -> dict[str, Pool]:
    """Return the completed trials of a workload by the chip's name; none where the database cannot be read.

    Trials that something disturbed, or whose micro-steps were not all run, count like others: their own spread is part
    of the interval.
    """
    try:
        found = measured_trials(storage, workload.fingerprint(), _LOCK_TIMEOUT_SECONDS)
    except StorageError:
        return {}
    tried: dict[str, list[Tried]] = {}
    for trial in found:
        chip = chip_of_device(trial.device_name)
        if chip is not None and chip.rates is not None:
            tried.setdefault(chip.name, []).append(Tried(trial.id, trial.candidate, trial.outcome))
    return {name: Pool(trials) for name, trials in tried.items()}
