"""Start a worker process. Tests replace this one place, to fork from an interpreter that has imported torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def start_module(
    module: str, result_fd: int, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start ``python -P -m module RESULT_FD`` in a session of its own, with a pipe as its standard input.

    Its output goes to ``log``. Ctrl-C in a terminal reaches the whole foreground group; with a session of its own the
    process does not get it, and the controller alone decides when it ends.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(result_fd)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[result_fd],
        env=dict(environment),
        start_new_session=True,
    )
