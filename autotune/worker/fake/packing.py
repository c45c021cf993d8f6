"""Pack the trace of a step into text, so that one process can trace and others predict from it."""

from __future__ import annotations

import base64
import json
import zlib

from autotune.core.prediction import Operations
from autotune.core.schema import decode, encode
from autotune.worker.fake.scaling import ScalableStep
from autotune.worker.fake.tracer import Trace


def packed(trace: Trace, batch: int, most_inputs: int | None, operations: Operations | None) -> str:
    """Return the trace of a step at a telling batch, and its operations if they are known, as text."""
    kinds = sorted(set(trace.labels.values()))
    document = {
        "batch": batch,
        "most_inputs": most_inputs,
        "events": trace.events,
        "kinds": kinds,
        "labels": [[number, kinds.index(label)] for number, label in trace.labels.items()],
        "column_sums": [[number, *sizes] for number, sizes in trace.column_sums.items()],
        "embeddings": [[number, *sizes] for number, sizes in trace.embeddings.items()],
        "pieces": list(trace.pieces.items()),
        "parts": trace.parts,
        "operations": None if operations is None else encode(operations),
    }
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


def unpacked(text: str) -> tuple[ScalableStep, Operations | None]:
    """Return the step whose trace was packed, and its operations."""
    document = json.loads(zlib.decompress(base64.b64decode(text)))
    kinds = document["kinds"]
    trace = Trace(
        events=[(number, size) for number, size in document["events"]],
        labels={number: kinds[kind] for number, kind in document["labels"]},
        column_sums={number: (rows, columns) for number, rows, columns in document["column_sums"]},
        embeddings={number: (indices, rows, columns) for number, indices, rows, columns in document["embeddings"]},
        pieces=dict(document["pieces"]),
        parts=document["parts"],
    )
    step = ScalableStep(trace, document["batch"], most_inputs=document["most_inputs"])
    counted = document["operations"]
    return step, None if counted is None else decode(counted, Operations)
