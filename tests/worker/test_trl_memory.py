"""The steps of TRL's trainers are traced as a GPU takes them, or it is said why not."""

from pathlib import Path

import pytest
from own_memory import OWN_CODE, inspected
from server_client import ServerClient, of_command

VALUES = "what its step computes depends on values of tensors (aten.nonzero.default)"
SAMPLES = "its step goes over the samples of a batch one by one"


@pytest.mark.clients
@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("tune_with_trl.py", (None,)),
        # Without logits since TRL 1; with TRL 0.29, a loop over the samples.
        ("tune_with_trl.py --loss_type dft", (None, SAMPLES)),
        ("tune_with_reward.py", (None,)),
        # Figures that are logged are of the tokens, and the samples, that a mask selects.
        ("tune_with_dpo.py", (VALUES, SAMPLES)),
        ("tune_with_kto.py", (VALUES, "its batches are lists with an entry for each sample")),
        ("tune_with_grpo.py --num_generations 4", ("GRPOTrainer makes the inputs of its steps in a way of its own",)),
    ],
)
def test_a_step_is_traced_or_it_is_said_why_not(
    trial_server: ServerClient, folder: Path, script: str, unknown: tuple[str | None, ...]
) -> None:
    pytest.importorskip("trl", reason="trl is not installed: make test-clients")
    file, *words = script.split()
    command = [str(OWN_CODE / file), "--output_dir", "out", "--bf16", "false", *words]
    workload = of_command(*command)
    model = inspected(trial_server, workload, precisions=("bf16",), gradient_checkpointing="off")
    assert model.interface.memory_unknown in unknown
    assert bool(model.memory) is (model.interface.memory_unknown is None)
