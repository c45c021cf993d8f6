"""Test trials whose two ranks shard a model with FSDP2: a real Trainer on the CPU, made to shard there."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate, Strategy
from autotune.core.code_interface import Protection
from autotune.core.device import Device
from autotune.core.messages import Job, TrialWork
from autotune.core.outcome import Effort
from autotune.core.placement import Placement
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.schema import decode
from autotune.core.training_source import find_trainer
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.training.batches import SettingUnavailableError
from autotune.worker.trial.build import build_model, check_attends_to_all, check_shared_by, fill, on_meta

PROGRAM = Path(__file__).with_name("shard_on_cpu.py")
OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
ARM = Arm(
    "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2, transformer_layer_cls_to_wrap="BertLayer",
    sync_each_batch=True,
)  # fmt: skip


def tiny_with_adapters() -> Workload:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'traintune[peft]'")
    return dataclasses.replace(tiny_workload("bert-tiny"), peft="lora", lora_rank=4)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "built in": lambda: tiny_workload("bert-tiny"),
    "own Trainer": lambda: Workload.of_source(find_trainer(f"{OWN_CODE / 'build_trainer.py'}:build")),
    "adapters": tiny_with_adapters,
}


@pytest.mark.parametrize(
    ("of", "strategy", "compiled", "ranks"),
    # A compiler for C++ takes most of the last one's time.
    [
        *((of, "fsdp", False, 2) for of in ("own Trainer", "adapters")),
        # Those of its checkpoint are measured all the same.
        pytest.param("built in", "fsdp", False, 2, marks=pytest.mark.whole),
        pytest.param("built in", "fsdp-keep", False, 4, marks=pytest.mark.whole),
        pytest.param("built in", "hybrid", False, 4, marks=pytest.mark.whole),
        pytest.param("built in", "fsdp", True, 2, marks=pytest.mark.whole),
    ],
)
def test_a_trial_shards_each_layer_and_measures_all_ranks(
    cpu: Device, tmp_path: Path, of: str, strategy: Strategy, compiled: bool, ranks: int
) -> None:
    arm = dataclasses.replace(ARM, strategy=strategy, torch_compile=compiled, regional_compilation=compiled,
                              ranks=ranks, dp_shard_size=2 if strategy == "hybrid" else None)  # fmt: skip
    candidate = Candidate(arm, 2, 4)
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=90.0)
    work = TrialWork(candidate, Placement.of(*[cpu] * ranks).rank_devices, 8 * GIB, effort, seed=1)
    job = Job("trial", WORKLOADS[of](), work, 250.0, str(tmp_path / "trial.log"), Protection())
    words = [sys.executable, str(PROGRAM), json.dumps(job.document()), str(tmp_path)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = warm.run(words, capture_output=True, text=True, timeout=270, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(ranks):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text())
        assert outcome["state"] == "completed", (outcome, done.stderr[-3000:])
        assert outcome["shards"]["whole"] == []
        assert outcome["shards"]["meshes"] == [[2, 2] if strategy == "hybrid" else [ranks]]
        # Each layer, the embedding and the rest.
        assert {"FSDPBertLayer"} <= set(outcome["shards"]["units"]) or "FSDPCheckpointWrapper" in str(outcome["shards"])
        measured = outcome["measurement"]
        assert (measured["ranks"], measured["micro_steps_run"]) == (ranks, 3)
        assert (measured["compile_seconds"] is not None) is compiled
        # 2 samples × 4 micro-steps on each rank.
        assert measured["samples_per_second"] == pytest.approx(8 * ranks / measured["step_seconds"])


def test_a_checkpoint_of_sharded_weights_is_written_or_computed(cpu: Device, tmp_path: Path) -> None:
    devices = Placement.of(cpu, cpu).rank_devices
    work = RehearsalWork(Candidate(dataclasses.replace(ARM, precision="fp32"), 2, 2), devices, 8 * GIB, 8 * GIB, 1)
    document = Job("rehearsal", tiny_workload("bert-tiny"), work, 250.0, str(tmp_path / "log"), None).document()
    found = []
    for most_bytes in (GIB, 0):
        folder = tmp_path / str(most_bytes)
        words = [sys.executable, str(PROGRAM), json.dumps(document), str(folder), str(most_bytes)]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = warm.run(words, capture_output=True, text=True, timeout=270, env=variables)
        answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
        assert all(each.pop("shards")["whole"] == [] for each in answers), done.stderr[-3000:]
        each = [decode(answer, Rehearsal) for answer in answers]
        assert {(one.problem, one.unknown) for one in each} == {(None, ())}, done.stderr[-9000:]
        assert each[0].evaluation is not None
        assert each[0].saving is not None
        found.append(each[0].saving)
    written, computed = found
    assert (written.is_computed, computed.is_computed, written.ranks) == (False, True, 2)
    assert list((tmp_path / str(GIB)).rglob("checkpoint-2/*.safetensors"))
    parameters = sum(
        each.numel() for each in build_model(tiny_workload("bert-tiny"), "sdpa", torch.device("cpu")).parameters()
    )
    # Two states of AdamW for each weight, and some steps that were counted.
    assert 8 * parameters <= computed.host_bytes < 8.1 * parameters


@pytest.mark.parametrize(
    ("saved", "tied"),
    [(False, True), (True, False), *(pytest.param(both, both, marks=pytest.mark.whole) for both in (False, True))],
)
def test_a_model_that_is_sharded_before_it_has_weights_has_those_of_the_whole(
    tmp_path: Path, *, tied: bool, saved: bool
) -> None:
    workload = tiny_workload("llama-tiny", config={"tie_word_embeddings": tied})
    torch.manual_seed(7)
    whole = on_meta(workload, "sdpa")
    fill(whole, torch.device("cpu"))
    if saved:
        torch.manual_seed(8)
        whole = build_model(workload, "sdpa", torch.device("cpu"))
        whole.save_pretrained(tmp_path / "saved")
        workload = dataclasses.replace(workload, weights=str(tmp_path / "saved"))
    warm.output_of(str(PROGRAM.with_name("shard_from_meta.py")), json.dumps(workload.document()), str(tmp_path))
    expected, gathered = whole.state_dict(), torch.load(tmp_path / "weights.pt")
    assert set(gathered) == set(expected)
    assert all(torch.equal(gathered[name], expected[name]) for name in expected)
    tokens = torch.arange(3, 11)[None]
    loss = whole(input_ids=tokens, labels=tokens).loss.item()
    count = sum(p.numel() for p in whole.parameters())
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["loss"] == pytest.approx(loss, rel=1e-5)
        assert told["fused_loss"] == pytest.approx(loss, rel=1e-5)
        assert told["difference"] < 1e-6
        assert told["mine"] == pytest.approx(count / 2, rel=0.05)
        # One weight at a time, never several of them together.
        assert told["largest"] == max(p.numel() for p in whole.parameters())


BAMBA = {
    "model_type": "bamba", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "attn_layer_indices": [1],
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
}  # fmt: skip


FALCON = {
    "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "alibi": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("workload", "other"),
    [
        (tiny_workload("llama-tiny"), None),
        (tiny_workload("qwen3-0.6b"), None),
        (tiny_workload("gemma-3-270m"), "sliding_attention"),
        (dataclasses.replace(tiny_workload("llama-tiny"), config=BAMBA), "linear_attention"),
        (dataclasses.replace(tiny_workload("llama-tiny"), config=FALCON), "alibi"),
    ],
    ids=lambda value: value.model_type if isinstance(value, Workload) else "",
)
def test_ranks_share_samples_of_models_that_attend_to_all_tokens_alone(workload: Workload, other: str | None) -> None:
    model = on_meta(workload, "sdpa")
    if other is None:
        check_attends_to_all(model)
    else:
        with pytest.raises(SettingUnavailableError, match=f"layers of type {other}: leave --context-parallel out"):
            check_attends_to_all(model)


def test_an_accelerate_that_passes_over_what_is_shared_is_refused() -> None:
    def trainer(padding_side: str = "right", **sizes: int) -> SimpleNamespace:
        accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(**sizes))
        return SimpleNamespace(accelerator=accelerator, processing_class=SimpleNamespace(padding_side=padding_side))

    samples, groups = {"dp_shard_size": 2, "cp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2}
    for sizes in (samples, groups):
        check_shared_by(trainer(**sizes), sizes)
    check_shared_by(trainer("left", **groups), groups)
    with pytest.raises(SettingUnavailableError, match=r"does not let ranks share samples: upgrade it to 1\.10"):
        check_shared_by(trainer(dp_shard_size=4, cp_size=1), samples)
    with pytest.raises(SettingUnavailableError, match="does not let ranks form groups"):
        check_shared_by(SimpleNamespace(accelerator=None, processing_class=None), groups)
    with pytest.raises(SettingUnavailableError, match="pads on the left"):
        check_shared_by(trainer("left", **samples), samples)
