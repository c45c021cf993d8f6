"""The real trial server around jobs that misbehave; the job's id says how.

Everything is the server's own (forking, watching, ending, reporting) but what a job does and the
imports beforehand, so that it starts at once.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from processes import is_alive, leave_descendants

from autotune.core.messages import Job
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, outcome_document
from autotune.core.scratch import Scratch
from autotune.worker import server

CHATTER_BYTES = 100 * 1024**2
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")


def completed() -> dict[str, Any]:
    """The outcome of a trial in which all went well."""
    return outcome_document(Completed(Measurement(0.5, (0.5, 0.5), 0.0, 16.0, 1000, 2000)))


def chatter() -> None:
    """100 MiB of output, by every way there is."""
    line = "x" * 1023 + "\n"
    for _ in range(CHATTER_BYTES // 4096):
        print(line, end="")
        print(line, end="", file=sys.stderr)
        os.write(1, line.encode())
        os.write(2, line.encode())


def run_job(job: Job, rank: int, scratch: Scratch, result_fd: int, torch_threads: int) -> None:
    """Behave as the words of the job's id say, in their order; those of a rank stand between bars."""

    def send(message: Any) -> None:
        os.write(result_fd, json.dumps(message).encode() + b"\n")

    mark = Path(scratch.output_dir, "mark")
    send({"progress": {"phase": "train"}})
    for behaviour in job.id.split(" | ")[rank].split(", "):
        match behaviour.split():
            case ["complete"]:
                send({"result": completed()})
            case ["oom"]:
                send({"result": outcome_document(OutOfMemory("no memory", "device")), "at": time.monotonic()})
            case ["fail", text]:
                send({"result": outcome_document(Failed("error", text)), "at": time.monotonic()})
            case ["variables"]:
                print(json.dumps({name: os.environ.get(name) for name in VARIABLES}), flush=True)
            case ["mark"]:
                mark.with_suffix(".new").write_text(str(os.getpid()))
                mark.with_suffix(".new").rename(mark)
            case ["await"]:
                while not mark.exists():
                    time.sleep(0.01)
            case ["gone"]:
                while is_alive(int(mark.read_text())):
                    time.sleep(0.01)
            case ["progress", count]:
                for step in range(int(count)):
                    send({"progress": {"step": step}})
            case ["chatter"]:
                chatter()
            case ["hang"]:
                time.sleep(600)
            case ["exit", code]:
                print("last words", flush=True)
                os._exit(int(code))
            case ["raise"]:
                raise RuntimeError("raised in the trial")
            case ["signal", name]:
                os.kill(os.getpid(), getattr(signal, name))
            case ["descend"]:
                leave_descendants()
            case ["write", text]:
                os.write(result_fd, text.encode() + b"\n")
            case ["half"]:
                os.write(result_fd, b'{"result": {"state"')
            case ["litter"]:
                tempfile.mkdtemp(prefix="pymp-")
                Path(os.environ["TMPDIR"], "compiled").write_text("")
                Path(scratch.output_dir, "checkpoint").write_text("")
            case ["inspect"]:
                with open(os.environ["STAND_IN_INSPECTIONS"], "a") as counted:
                    counted.write("one\n")
                time.sleep(600)
            case ["read_data"]:
                send({"result": {"rows": 2}})
            case ["close"]:
                os.close(result_fd)
            case _:
                raise ValueError(behaviour)


if __name__ == "__main__":
    server._run_job = run_job
    server.import_everything = lambda preload, is_plain: 1
    server.import_model = lambda workload: None
    # The store would import torch.
    server.open_store = lambda: SimpleNamespace(port=4711)
    if "STAND_IN_NO_TEMPORARY" in os.environ:
        tempfile._candidate_tempdir_list = lambda: ["/no/such"]  # type: ignore[attr-defined]
    time.sleep(float(os.environ.get("STAND_IN_IMPORT_SECONDS", "0")))
    server.main()
