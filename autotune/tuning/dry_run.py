"""Say what a search would do, without training and without writing anything."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from autotune.core.errors import InvalidRequestError
from autotune.core.schema import encode
from autotune.devices.host import host_memory
from autotune.store.location import resolve_location, shown_location
from autotune.tuning.forecast import forecast_of
from autotune.tuning.predictions import batches_of, gpu_document
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import log_folder, on_this_machine, read_data, study_names


def dry_run_document(request: SearchRequest, storage: str) -> dict[str, Any]:
    """Return what a search would try, what is predicted of it, and where it would write, as JSON-ready data.

    ``predicted`` is as ``predict`` prints it for a GPU; ``None`` on a CPU, for which nothing is predicted.
    """
    if request.workload.source is not None:
        raise InvalidRequestError(
            "--dry-run is for a model by name: your own code would have to run to be looked at",
            "leave --dry-run out, and give --trials 1",
        )
    with tempfile.TemporaryDirectory(prefix="autotune-dry-run-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        with on_this_machine(request, logs, lambda _: None, None) as place:
            request = read_data(request, place.servers, logs.parent, lambda _: None)
            server = place.servers[0]
            prepared = prepare(request, server.inspect())
            forecast = forecast_of(prepared, server, free_host_bytes=host_memory().free_bytes)
            predicted = None
            if forecast is not None and prepared.chip is not None:
                forecast.complete()
                predicted = encode(gpu_document(prepared.chip, prepared, forecast.model))
    location = resolve_location(storage)
    study = request.study or next(study_names(request))
    return {
        "study": study,
        "device": request.device.name,
        "writes": [str(location.path) if location.path else shown_location(storage), str(log_folder(storage, study))],
        "trials": request.trials,
        "time_budget_seconds": request.time_budget_seconds,
        "baseline": prepared.baseline.parameters(),
        "batches": [[batch, prepared.space.batches.accumulation(batch)] for batch in batches_of(prepared.space)],
        "configurations": [arm.describe() for arm in prepared.space.arms],
        "predicted": predicted,
    }
