"""Predict for a service in a process of its own, which may be ended: ``python -m autotune.service.predict_process FD``.

It reads the options as JSON from standard input, and writes a document or a problem to FD.
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
    """Return the document of ``autotune predict --json`` or of ``autotune advise``."""
    from autotune.tuning.advising import advised
    from autotune.tuning.predictions import predicted_document

    gpu = options.pop("gpu")
    if command == "advise":
        counts, price, samples = (options.pop(name) for name in ("gpu_counts", "price", "samples"))
        return advised(gpu, counts, None, price, None, samples, storage, options, _COLUMNS)
    return predicted_document(gpu, None, storage, options)[0]


def main() -> None:
    """Read one question from standard input, and write its answer."""
    result_fd = int(sys.argv[1])
    os.set_inheritable(result_fd, False)
    os.nice(_NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _MOST_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
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
