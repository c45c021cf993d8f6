"""Train several ranks with a stock ``torchrun``, as a user will, and merge what they measured.

Started as ``python -m autotune.worker.verify.torchrun RESULT_FD``, with work as ``autotune.worker.verify.stock`` reads
it. It starts ``python -m torch.distributed.run``, which starts this module again for each rank, with a folder as
argument: there each rank reads the work and writes its answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.core.real_training import PeakBytes, StockResult, StockWork
from autotune.core.schema import decode, encode
from autotune.worker import process

_RANK_MODULE = "autotune.worker.verify.torchrun"
WORK = "work.json"
TRAINING = "training"
"""The ``output_dir`` of the training."""


def run_with_torchrun(work: StockWork, output_dir: str) -> StockResult:
    """Train all ranks with ``torchrun``; return their merged measurements, or the failure that ended them."""
    folder = Path(output_dir)
    # Not the training's own folder, which has to be empty.
    (folder / TRAINING).mkdir()
    (folder / WORK).write_text(json.dumps(encode(work)))
    ranks = work.devices.ranks
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    # Else the ranks look up this host's own name, which nobody resolves on some machines without a network.
    launcher += ["--local-addr", "127.0.0.1"]
    ended = subprocess.run([*launcher, "-m", _RANK_MODULE, str(folder)], check=False)
    answers: list[StockResult | None] = [None] * ranks
    for rank in range(ranks):
        # A rank that was killed left no answer.
        with contextlib.suppress(OSError, ValueError):
            answers[rank] = decode(json.loads((folder / f"rank-{rank}.json").read_text()), StockResult)
    return merge(answers, ended.returncode, work.context_parallel)


def merge(answers: Sequence[StockResult | None], exit_code: int, shared_by: int = 1) -> StockResult:
    """Merge the results of all ranks: the sum of samples, and the largest times and peaks.

    ``shared_by`` ranks share each sample (context parallelism), and each has counted it. If ranks failed, return the
    failure of one that ran out of memory, since others then lose their connections to it; else that of the first.
    """
    given = [answer for answer in answers if answer is not None]
    failures = [answer for answer in given if answer.state != "completed"]
    if failures:
        first = min(failures, key=lambda answer: answer.state != "out_of_memory")
        return dataclasses.replace(first, message=f"rank {answers.index(first)}: {first.message}")
    if len(given) < len(answers):
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        message = f"rank {silent[0]} gave no answer, and torchrun ended with exit code {exit_code}"
        return StockResult("failed", message, during="")
    joules = [answer.joules_per_sample for answer in given if answer.joules_per_sample is not None]
    return dataclasses.replace(
        given[0],
        stretches=tuple(
            dataclasses.replace(
                each[0],
                seconds=max(stretch.seconds for stretch in each),
                samples=sum(stretch.samples for stretch in each) // shared_by,
                new_shapes=max(stretch.new_shapes for stretch in each),
            )
            for each in zip(*(answer.stretches for answer in given), strict=True)
        ),
        peak_bytes={
            what: PeakBytes(
                max(answer.peak_bytes[what].allocated for answer in given),
                max(answer.peak_bytes[what].reserved for answer in given),
            )
            for what in given[0].peak_bytes
        },
        # Each rank measured the joules of its own GPU for its own samples, which are as many as another's.
        joules_per_sample=sum(joules) / len(joules) * shared_by if len(joules) == len(given) else None,
        skipped_steps=max((each.skipped_steps for each in given if each.skipped_steps is not None), default=None),
        loss_problem=next((answer.loss_problem for answer in given if answer.loss_problem), None),
    )


def run_rank(folder: Path) -> None:
    """Train one rank in a process of ``torchrun``, write its answer to ``folder``, and exit."""
    # torchrun gives each rank a session of its own, which nobody kills with it.
    process.die_with(os.getppid())
    from autotune.worker.verify.stock import run_stock

    rank = int(os.environ["RANK"])
    work = decode(json.loads((folder / WORK).read_text()), StockWork)
    answer = run_stock(work, str(folder / TRAINING), rank)
    path = folder / f"rank-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(encode(answer)))
    path.with_suffix(".part").rename(path)
    # A failing exit code makes torchrun end the other ranks, which would wait for this one.
    process.leave(0 if answer.state == "completed" else 1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[1]))
    process.serve_one_job(StockWork, run_with_torchrun)
