"""Train several ranks with a stock ``torchrun``, as a user will, and merge what they measured.

Started as ``python -m autotune.worker.verify.torchrun RESULT_FD``, with one job as ``autotune.worker.verify.stock``
reads it. It starts ``python -m torch.distributed.run``, which starts this module again for each rank, with a folder as
argument: there each rank reads the job and writes its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.core.candidate import Document
from autotune.worker import process

_RANK_MODULE = "autotune.worker.verify.torchrun"
JOB = "job.json"


def run_with_torchrun(job: Document) -> Document:
    """Train the job's ranks; return their merged measurements or how the first one failed, as JSON-ready data."""
    folder = Path(job["output_dir"])
    # Not the training's own folder, which has to be empty.
    (folder / "training").mkdir()
    (folder / JOB).write_text(json.dumps({**job, "output_dir": str(folder / "training")}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job["ranks"])]
    ended = subprocess.run([*launcher, "-m", _RANK_MODULE, str(folder)], check=False)
    answers = [read_answer(folder, rank) for rank in range(job["ranks"])]
    return merge(answers, ended.returncode)


def answer_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes its answer."""
    return folder / f"rank-{rank}.json"


def read_answer(folder: Path, rank: int) -> Document | None:
    """Return what a rank answered; ``None`` where it did not."""
    try:
        answer: Document = json.loads(answer_path(folder, rank).read_text())
    except (OSError, ValueError):
        return None
    return answer


def merge(answers: Sequence[Document | None], exit_code: int) -> Document:
    """Return the answers of all ranks as one: samples of all, time of the slowest, peaks of the largest.

    The answer of a rank that failed is that of all; out of memory comes first, since the others then lose it.
    """
    said = [answer for answer in answers if answer is not None]
    failed = sorted(
        (answer for answer in said if answer["state"] != "completed"),
        key=lambda answer: bool(answer["state"] != "out_of_memory"),
    )
    if failed:
        return {**failed[0], "message": f"rank {answers.index(failed[0])}: {failed[0]['message']}"}
    if len(said) < len(answers):
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        message = f"rank {silent[0]} gave no answer, and torchrun ended with exit code {exit_code}"
        return {"state": "failed", "message": message, "during": ""}
    joules = [answer["joules_per_sample"] for answer in said]
    return {
        **said[0],
        "stretches": [
            {
                **stretches[0],
                "seconds": max(stretch["seconds"] for stretch in stretches),
                "samples": sum(stretch["samples"] for stretch in stretches),
                "new_shapes": max(stretch["new_shapes"] for stretch in stretches),
            }
            for stretches in zip(*(answer["stretches"] for answer in said), strict=True)
        ],
        "peak_bytes": {
            what: {kind: max(answer["peak_bytes"][what][kind] for answer in said) for kind in peaks}
            for what, peaks in said[0]["peak_bytes"].items()
        },
        # Each rank measured the joules of its own GPU for its own samples, which are as many as another's.
        "joules_per_sample": sum(joules) / len(joules) if None not in joules else None,
        "skipped_steps": max(answer["skipped_steps"] for answer in said),
        "loss_problem": next((answer["loss_problem"] for answer in said if answer["loss_problem"]), None),
    }


def run_rank(folder: Path) -> None:
    """Train one of the ranks, in a process that ``torchrun`` started."""
    # torchrun gives each rank a session of its own, which nobody kills with it.
    process.die_with(os.getppid())
    from autotune.worker.verify.stock import run_stock

    rank = int(os.environ["RANK"])
    answer = run_stock({**json.loads((folder / JOB).read_text()), "rank": rank})
    path = answer_path(folder, rank)
    path.with_suffix(".part").write_text(json.dumps(answer))
    path.with_suffix(".part").rename(path)
    # Has torchrun end the other ranks, which would wait for this one.
    process.leave(0 if answer["state"] == "completed" else 1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[1]))
    process.serve_one_job(run_with_torchrun)
