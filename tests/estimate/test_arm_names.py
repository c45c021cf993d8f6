"""Test the names of several arms."""

from autotune.core.candidate import Arm
from autotune.estimate.arm_names import names_of_arms

ONE_GPU = [Arm(precision, checkpointing) for precision in ("bf16", "fp16", "tf32") for checkpointing in (False, True)]
RANKS = [
    Arm(precision, checkpointing, strategy=strategy, ranks=2, sync_each_batch=sync)
    for precision in ("bf16", "fp16")
    for strategy, sync in (("ddp", False), ("fsdp", False), ("fsdp", True))
    for checkpointing in (False, True)
]


def test_all_of_a_precision_have_one_name() -> None:
    assert names_of_arms(ONE_GPU[1:4], ONE_GPU, ONE_GPU) == ("bf16, checkpointing", "all fp16")
    assert names_of_arms(ONE_GPU[:1], ONE_GPU, ONE_GPU) == ("bf16",)


def test_what_several_ranks_have_in_common() -> None:
    synced = [arm for arm in RANKS if arm.sync_each_batch]
    others = [arm for arm in RANKS if not arm.sync_each_batch]
    fp16 = [arm for arm in others if arm.precision == "fp16"]
    fsdp = [arm for arm in others if arm.strategy == "fsdp" and arm.precision == "bf16"]
    assert names_of_arms(synced, RANKS, RANKS) == ("all that sync each batch",)
    assert names_of_arms(fp16, others, RANKS) == ("all other fp16",)
    assert names_of_arms(fsdp, others, RANKS) == ("all bf16, fsdp × 2",)
    assert names_of_arms(fsdp + fp16[:1], others, RANKS) == ("all bf16, fsdp × 2", "fp16, ddp × 2")
