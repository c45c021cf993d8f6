"""Runs a job of two ranks that shard a model with FSDP2 on the CPU: ``python shard_on_cpu.py JOB FOLDER [BYTES]``.

Of a rehearsal, a checkpoint of more BYTES is computed.

On a CPU accelerate trains with DDP whatever ``fsdp`` says, so this makes it shard there as it does on GPUs. Writes the
result of each rank to a file of its own in FOLDER, with how the parameters were split.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from autotune.core.messages import Job, Progress, TrialWork
from autotune.core.outcome import outcome_document
from autotune.core.rehearsal import RehearsalWork
from autotune.core.schema import encode
from autotune.core.scratch import Scratch
from autotune.worker.rendezvous import Ranks, open_store, rank_variables
from autotune.worker.trial.run import Trial
from autotune.worker.user import rehearsal
from autotune.worker.user.run import run_own

_start = AcceleratorState.__init__


def shard_on_cpu(state: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
    """Start accelerate's state; what it does for FSDP on GPUs follows (AcceleratorState.__init__ of 1.15)."""
    _start(state, *args, fsdp_plugin=fsdp_plugin, **named)
    # Each start of it takes the type from what all processes have.
    fsdp_plugin = fsdp_plugin or vars(state).get("fsdp_plugin")
    if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.FSDP
        if state._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = fsdp_plugin


class Shards(TrainerCallback):  # type: ignore[misc]
    """Notes which parameters are split between the ranks, and which layers gather theirs."""

    found: ClassVar[dict[str, Any]] = {}

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        meshes = {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)}
        self.found["meshes"] = sorted(meshes)
        self.found["whole"] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        self.found["units"] = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "reshard")})


def rank_of(job: Job, rank: int, port: int, folder: Path) -> int:
    """Run one rank in a process of its own; return its id."""
    child = os.fork()
    if child:
        return child
    os.environ.update(rank_variables(rank, job.ranks, port))
    torch.set_num_threads(1)
    AcceleratorState.__init__ = shard_on_cpu
    register = CallbackHandler.__init__

    def with_shards(handler: Any, callbacks: Any, *args: Any, **named: Any) -> None:
        register(handler, [*callbacks, Shards()], *args, **named)

    CallbackHandler.__init__ = with_shards
    assert isinstance(job.work, TrialWork | RehearsalWork)
    scratch = Scratch(str(folder / str(rank)))
    Path(scratch.output_dir).mkdir(parents=True)
    ranks = Ranks.join(rank, job.ranks, job.timeout_seconds)

    def tell(outcome: Any) -> None:
        (folder / f"{rank}.json").write_text(json.dumps({**outcome, "shards": Shards.found}))

    if job.workload.source is not None:
        # Ends the process.
        run_own(job.workload, job.work, scratch, lambda said: None if isinstance(said, Progress) else tell(said), ranks)
    if isinstance(job.work, RehearsalWork):

        def end(found: Any) -> NoReturn:
            tell(encode(found))
            os._exit(0)

        # What is gathered is told alone.
        rehearsal.most_host_bytes = lambda: 0
        rehearsal._MOST_SAVED_BYTES = int(sys.argv[3])
        rehearsal.NamedRehearsal(job.workload, job.work, scratch, end, ranks).run_and_end()
    tell(outcome_document(Trial(job.workload, job.work, scratch, lambda _: None, ranks).run()))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    store = open_store()
    given, place = Job.from_document(json.loads(sys.argv[1])), Path(sys.argv[2])
    ranks = [rank_of(given, rank, store.port, place) for rank in range(given.ranks)]
    for pid in ranks:
        os.waitpid(pid, 0)
