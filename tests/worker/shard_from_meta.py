"""Shards a model on two ranks of the CPU, from the ``meta`` device: ``python shard_from_meta.py WORKLOAD FOLDER``.

Rank 0 writes the weights, gathered, to ``weights.pt``, and each rank the elements that it held to ``RANK.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.core.workload import Workload
from autotune.training.loss import fuse_loss_of
from autotune.worker.private.accelerate import shard
from autotune.worker.rendezvous import open_store, rank_variables
from autotune.worker.trial import build

CPU = torch.device("cpu")
SETTINGS = {
    "reshard_after_forward": True, "activation_checkpointing": True,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}  # fmt: skip


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device.type == "cpu":
            self.elements = max(self.elements, found.numel())
        return found


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step in two micro-steps, and the gathered gradients."""
    model.zero_grad()
    for tokens in (torch.arange(8)[None], torch.arange(3, 11)[None]):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return loss.item(), {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def run(workload: Workload, rank: int, port: int, folder: Path) -> None:
    os.environ.update(rank_variables(rank, 2, port))
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = build.on_meta(workload, "sdpa")
    model = shard(model, SETTINGS, "no", init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    held = LargestTensor()
    with held:
        build.fill(model, CPU)
    if workload.weights:
        build._take_from_files(model, workload)
    gathered = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    loss, gradients = step(model)
    fuse_loss_of(model)
    fused_loss, fused_gradients = step(model)
    differences = [(fused_gradients[name] - whole).abs().max().item() for name, whole in gradients.items()]
    shards = sum(p.to_local().numel() for p in model.parameters())
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                "largest": held.elements,
                "mine": shards,
                "loss": loss,
                "fused_loss": fused_loss,
                "difference": max(differences),
            }
        )
    )
    if rank == 0:
        torch.save(gathered, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = open_store()
    given, place = Workload.from_document(json.loads(sys.argv[1])), Path(sys.argv[2])
    children = []
    for number in range(2):
        if not (child := os.fork()):
            run(given, number, store.port, place)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    assert not any(os.waitpid(pid, 0)[1] for pid in children)
