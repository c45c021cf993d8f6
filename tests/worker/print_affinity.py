"""Pins itself to one core, then prints on which cores it, its threads and its child processes run."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from typing import Any

from autotune.worker.trial.cores import pin_to_one_core

PROGRAM = "import os; print(sorted(os.sched_getaffinity(0)))"


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def of_program() -> Any:
    return json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout)


def of_process(method: str) -> list[int]:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(cores)


def main() -> None:
    # Not above: the processes that are spawned import this file, too.
    import torch

    before, waiting = cores(), threading.Event()
    early = threading.Thread(target=waiting.wait, daemon=True)
    early.start()
    core = pin_to_one_core("cpu")
    found: dict[str, Any] = {"before": before, "core": core, "own": cores(), "torch_threads": torch.get_num_threads()}
    late = threading.Thread(target=waiting.wait, daemon=True)
    late.start()
    found["threads"] = [sorted(os.sched_getaffinity(thread.native_id or 0)) for thread in (early, late)]
    waiting.set()
    found["program"] = of_program()
    found |= {method: of_process(method) for method in ("fork", "spawn", "forkserver")}
    found["after"] = cores()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
