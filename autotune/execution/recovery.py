"""Run a real training, and start it again with a smaller batch each time that it runs out of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autotune.core.real_training import VARIABLE, RealTraining, Recovery
from autotune.core.schema import encode

MOST_RESTARTS = 3


def run_recovering(
    words: Sequence[str], variables: Mapping[str, str], training: RealTraining, say: Callable[[str], None]
) -> int:
    """Run a training to its end or a signal, with a smaller batch after out of memory; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="autotune-recover-") as folder:
        # A moment on the clock of files: checkpoints of earlier runs are older.
        since = os.stat(folder).st_mtime
        for attempt in range(MOST_RESTARTS + 1):
            file = os.path.join(folder, str(attempt))
            training = replace(training, recovery=Recovery(file, since, attempt))
            code = _run(words, {**variables, VARIABLE: json.dumps(encode(training))})
            smaller = training.with_smaller_batch()
            if not os.path.exists(file) or attempt == MOST_RESTARTS:
                return code
            if smaller is None:
                say("out of memory, and there is no smaller batch")
                return code
            training = smaller
            candidate = training.candidate
            pair = f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}"
            say(
                f"out of memory: started again from its last checkpoint with {pair}, "
                f"restart {attempt + 1} of at most {MOST_RESTARTS}"
            )
    raise AssertionError("the last attempt returns")


def _run(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command, passing on SIGTERM; return its exit code."""
    before = signal.getsignal(signal.SIGTERM)
    # A terminal sends Ctrl-C to both.
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            words, env=dict(variables), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    return code if code >= 0 else 128 - code
