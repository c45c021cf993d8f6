"""A trial server whose trials answer from a formula, so that searches can be compared, and misbehave as planned.

Everything but the body of a job is autotune's own: the loop, the fork, the pipes, the log. With ``FAULTS_REAL``
set the bodies are its own, too: torch is imported, a model trains, and only the figures are replaced by the formula's.

    FAULTS_FOLDER   where ``runs`` is kept, a line for each trial that was begun
    FAULTS_PLAN     {"3": "garbage"}: what the trial does that is begun as number 3, counted over all searches
    FAULTS_SECONDS  how long each trial lasts
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from processes import ignore_polite_signals, leave_descendants

from autotune.core.inspection import Inspection, ModelFacts, Software
from autotune.core.messages import InspectionWork, Job, TrialWork
from autotune.core.outcome import Completed, Measurement, Outcome, OutOfMemory, outcome_document
from autotune.core.schema import encode
from autotune.core.scratch import Scratch
from autotune.worker import server

MIB = 1024**2
OUTPUT_BYTES = 100 * MIB


def outcome(work: TrialWork) -> Outcome:
    """What the formula says of the trial's candidate."""
    candidate = work.candidate
    batch, arm = candidate.per_device_train_batch_size, candidate.arm
    recomputes, frugal = arm.gradient_checkpointing, arm.optim == "adafactor"
    peak_bytes = (300 + batch * (15 if recomputes else 40) - 50 * frugal) * MIB
    if peak_bytes > work.cap_bytes:
        return OutOfMemory(
            "RuntimeError: DefaultCPUAllocator: can't allocate memory", peak_reserved_bytes=peak_bytes // 2
        )
    micro_seconds = (0.05 + 0.004 * batch) * (1.3 if recomputes else 1.0) * (1.1 if frugal else 1.0)
    seconds = micro_seconds * candidate.gradient_accumulation_steps
    run = min(candidate.gradient_accumulation_steps, max(3, work.effort.max_micro_steps))
    speed = candidate.samples_per_step / seconds
    measured = Measurement(seconds, (seconds,) * 3, 0.005, speed, peak_bytes, peak_bytes, micro_steps_run=run)
    return Completed(measured)


FACTS = Inspection(
    Software("3.11", {"torch": "2", "transformers": "5"}, ("bf16", "fp16")),
    optims=("adafactor", "adamw_torch", "adamw_torch_fused"),
    model=ModelFacts(
        "BertForSequenceClassification", 4_000_000, 4_000_000, ("eager", "sdpa"), gradient_checkpointing=True
    ),
)


def write_output() -> None:
    """100 MB to the log."""
    line = b"x" * (MIB - 1) + b"\n"
    for _ in range(OUTPUT_BYTES // MIB):
        os.write(1, line)


def misbehave(behaviour: str, result_fd: int) -> None:
    """Do as the words say; some of them end the trial."""
    match behaviour.split(maxsplit=1):
        case ["write", text]:
            os.write(result_fd, text.encode() + b"\n")
            os._exit(0)
        case ["half"]:
            os.write(result_fd, b'{"result": {"state"')
            os.kill(os.getpid(), signal.SIGKILL)
        case ["long"]:
            data = memoryview(b"y" * (20 * MIB) + b"\n")
            while data:
                data = data[os.write(result_fd, data) :]
            os.kill(os.getpid(), signal.SIGKILL)
        case ["signal", name]:
            os.kill(os.getpid(), getattr(signal, name))
        case ["output"]:
            write_output()
        case ["descend"]:
            leave_descendants()
        case ["ignore"]:
            ignore_polite_signals()
        case ["hang"]:
            ignore_polite_signals()
            time.sleep(600)
        case ["raise"]:
            raise RuntimeError("an error in user code")
        case _:
            raise ValueError(behaviour)


def begin(work: TrialWork) -> int:
    """Take down that a trial was begun; its number among all of them."""
    runs = Path(os.environ["FAULTS_FOLDER"], "runs")
    number = len(runs.read_text().splitlines()) if runs.exists() else 0
    with runs.open("a") as file:
        file.write(f"{os.getpid()} {json.dumps(work.candidate.parameters(), sort_keys=True)}\n")
    return number


def run_job(job: Job, rank: int, scratch: Scratch, result_fd: int, torch_threads: int) -> None:
    """In place of the server's own."""

    def send(kind: str, document: Any) -> None:
        data = json.dumps({kind: document}).encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    is_real = bool(os.environ.get("FAULTS_REAL"))
    work = job.work
    if isinstance(work, InspectionWork):
        if not is_real:
            send("result", encode(FACTS))
        else:
            real_run_job(job, rank, scratch, result_fd, torch_threads)
        return
    assert isinstance(work, TrialWork)
    number = begin(work)
    send("progress", {"phase": "train"})
    behaviour = json.loads(os.environ.get("FAULTS_PLAN", "{}")).get(str(number))
    if behaviour:
        misbehave(behaviour, result_fd)
    time.sleep(float(os.environ.get("FAULTS_SECONDS", "0.02")))
    if is_real:
        from autotune.worker.trial.run import Trial

        trained = Trial(job.workload, work, scratch, lambda progress: send("progress", encode(progress))).run()
        if not isinstance(trained, Completed):
            send("result", outcome_document(trained))
            return
    send("result", outcome_document(outcome(work)))


real_run_job = server._run_job

if __name__ == "__main__":
    server._run_job = run_job
    if not os.environ.get("FAULTS_REAL"):
        server.import_everything = lambda preload, is_plain: 1
        server.import_model = lambda workload: None
    sys.argv[0] = "stand_in"
    server.main()
