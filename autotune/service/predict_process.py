"""Predict for a service in a separate process, which the service may kill.

``python -m autotune.service.predict_process FD`` reads the options as JSON from standard input, and writes a document
or a problem as JSON to the file descriptor FD.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from autotune.core.arguments import check_arguments
from autotune.core.errors import AutotuneError

_MOST_BYTES = 8 * 2**30
# The width of the text in columns; the width of the client's terminal is not known.
_COLUMNS = 80
# Predictions give way to searches, which are measured on the same cores.
_NICENESS = 10


def predicted(command: str, options: dict[str, Any], storage: str) -> dict[str, Any]:
    """Return the document of ``autotune predict --json``, or of ``autotune advise`` with its lines of text."""
    from autotune.tuning.advising import advised
    from autotune.tuning.predictions import predicted_document

    gpu = options.pop("gpu")
    # ``None`` stands for --gpu-spec and --prices: files of the caller, which a service does not read.
    if command == "advise":
        counts, price, samples = (options.pop(name) for name in ("gpu_counts", "price", "samples"))
        return advised(gpu, counts, None, price, None, samples, storage, options, _COLUMNS)
    return predicted_document(gpu, None, storage, options)[0]


def main() -> None:
    """Answer the one request on standard input, with low priority and limited memory."""
    result_fd = int(sys.argv[1])
    # Held by a child process as well, it would not be closed for its reader when this process ends.
    os.set_inheritable(result_fd, False)
    os.nice(_NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = _MOST_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    work = json.load(sys.stdin)["work"]
    try:
        answer = predicted(work["command"], check_arguments(work["options"]), work["storage"])
        document: dict[str, Any] = {"document": answer}
    except AutotuneError as error:
        document = {"problem": error.document()}
    with os.fdopen(result_fd, "w", encoding="utf-8") as stream:
        json.dump(document, stream)


if __name__ == "__main__":
    main()
