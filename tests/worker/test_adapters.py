"""LoRA and few bits: what is trained and what is frozen, in real trials where peft and bitsandbytes are installed."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import AMPLE_BYTES, ONE_OF_EACH_TASK, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.inspection import AfterStep
from autotune.core.outcome import Completed
from autotune.core.placement import Placement
from autotune.core.workload import QuantizeName, Task, Workload
from autotune.devices.listing import find_device
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.worker.trial.build import build_model

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'traintune[peft]'")

CPU = torch.device("cpu")
CHECKPOINTED = Candidate(Arm(gradient_checkpointing=True), 2)


def with_lora(workload: Workload, **changes: object) -> Workload:
    return dataclasses.replace(workload, **{"peft": "lora", "lora_rank": 4, **changes})


# Those whose models other tests here adapt.
_WIDER = ("image-classification", "masked-lm", "sequence-classification")


@pytest.fixture(
    params=[pytest.param(task, marks=pytest.mark.whole if task in _WIDER else ()) for task in sorted(ONE_OF_EACH_TASK)]
)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrialServer]:
    task: Task = request.param
    with TrialServer(
        find_device("cpu"), with_lora(tiny_workload(ONE_OF_EACH_TASK[task], task=task)), tmp_path
    ) as started:
        yield started


def check_trains(runner: TrialServer, candidate: Candidate = CHECKPOINTED) -> None:
    log = runner.server_log.with_name("trial.log")
    outcome = run_trial(runner, TrialJob("trial", candidate, AMPLE_BYTES, QUICK, 42, 240.0, str(log)))
    assert isinstance(outcome, Completed), outcome


def test_every_task_trains_adapters_over_frozen_weights(runner: TrialServer) -> None:
    model = runner.inspect().model
    assert 0 < model.trainable_parameters < model.parameters / 2
    check_trains(runner)


def test_the_inspection_of_several_ranks_shards_adapters_and_trains_them_on_fake_tensors(tmp_path: Path) -> None:
    cpu = find_device("cpu")
    with TrialServer(Placement.of(cpu, cpu), with_lora(tiny_workload("bert-tiny")), tmp_path) as started:
        model = started.inspect().model
    assert (model.layer_classes, model.sharding_error) == (("BertLayer",), None)
    assert model.after_step == AfterStep((), ())


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"lora_rank": 65}, "LoRA of rank 65 exceeds q_proj of 64 × 64", "use --lora-rank 64 or less"),
        ({"lora_options": {"target_modules": ["v_proj", "value"]}}, "--lora-targets: no layer is called value",
         "its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ({"lora_options": {"target_modules": ["proj"]}}, "--lora-targets: no layer is called proj",
         "its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ({"lora_options": {"target_modules": ["input_layernorm"]}},
         "--lora-targets: peft adapts no such layer as one of input_layernorm",
         "its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
    ],
)  # fmt: skip
def test_adapters_that_a_model_cannot_have_are_refused(
    changes: dict[str, object], message: str, hint: str, tmp_path: Path
) -> None:
    with TrialServer(
        Placement.of(find_device("cpu")), with_lora(tiny_workload("llama-tiny"), **changes), tmp_path
    ) as started:
        found = started.inspect()
    assert (found.model_error, found.model_hint) == (message, hint)


def test_a_router_may_have_fewer_rows_than_the_rank() -> None:
    """One for each expert, as the eight of Mixtral; peft adapts it with the linear layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    mixtral = {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 64, **sizes}
    model = build_model(with_lora(Workload("mixtral", mixtral, "causal-lm", 8), lora_rank=16), "eager", CPU)
    assert model.get_base_model().config.num_local_experts == 4


def test_embeddings_can_have_adapters(tmp_path: Path) -> None:
    workload = with_lora(tiny_workload("llama-tiny"), lora_options={"target_modules": ["embed_tokens"]})
    with TrialServer(Placement.of(find_device("cpu")), workload, tmp_path) as started:
        log = str(tmp_path / "trial.log")
        outcome = run_trial(started, TrialJob("trial", Candidate(Arm(), 2), AMPLE_BYTES, QUICK, 42, 240.0, log))
    assert isinstance(outcome, Completed), outcome


@pytest.mark.parametrize("arguments", [{"use_dora": True}, {"use_rslora": True}, {"target_modules": ["v_proj"]}])
def test_further_arguments_reach_peft(arguments: dict[str, object]) -> None:
    model = build_model(with_lora(tiny_workload("llama-tiny"), lora_options=arguments), "eager", CPU)
    config = model.peft_config["default"]
    said = {name: getattr(config, name) for name in arguments}
    assert said == {name: set(value) if isinstance(value, list) else value for name, value in arguments.items()}


@pytest.mark.parametrize("task", sorted(ONE_OF_EACH_TASK))
def test_the_dtype_of_what_is_trained_is_known(task: Task) -> None:
    """A gradient scaler refuses gradients in float16."""
    workload = with_lora(tiny_workload(ONE_OF_EACH_TASK[task], task=task), dtype="float16")
    trained = {str(p.dtype) for p in build_model(workload, "eager", CPU).parameters() if p.requires_grad}
    assert ("torch.float16" in trained) is (workload.trained_dtype == "float16")


@pytest.mark.parametrize("task", ["causal-lm", pytest.param("sequence-classification", marks=pytest.mark.whole)])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_few_bits_train_too(bits: str, task: Task, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    workload = with_lora(tiny_workload(ONE_OF_EACH_TASK[task], task=task), dtype="bfloat16", quantize=bits)
    with TrialServer(find_device("cpu"), workload, tmp_path) as started:
        check_trains(started)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "t5-tiny"])
def test_random_weights_are_quantized_as_saved_ones_are(bits: QuantizeName, name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    saved = tiny_workload(name, dtype="bfloat16")
    build_model(saved, "eager", CPU).save_pretrained(tmp_path)
    drawn = build_model(with_lora(saved, quantize=bits), "eager", CPU)
    loaded = build_model(with_lora(saved, quantize=bits, weights=str(tmp_path)), "eager", CPU)

    def described(model: torch.nn.Module) -> dict[str, object]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {key: (type(value), value.dtype, value.shape, value.requires_grad) for key, value in tensors.items()}

    assert described(drawn) == described(loaded)
    assert [type(module) for module in drawn.modules()] == [type(module) for module in loaded.modules()]
    for key, value in {**dict(drawn.named_parameters()), **dict(drawn.named_buffers())}.items():
        assert torch.isfinite(value.float()).all(), key
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in drawn.named_buffers())


SIZED = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
BUILD = """
import json, sys, torch
from pathlib import Path
from autotune.core.workload import Workload
from autotune.worker.trial.build import build_model
tiny, large = (Workload.from_document(each) for each in json.load(sys.stdin))
# Libraries that a first build loads do not count.
build_model(tiny, "eager", torch.device("cpu"))
def most(): return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
Path("/proc/self/clear_refs").write_text("5")
before = most()
model = build_model(large, "eager", torch.device("cpu"))
print(json.dumps([1024 * (most() - before), sum(p.nbytes for p in model.parameters())]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.whole
@pytest.mark.parametrize("changes", [{"quantize": "4bit"}, {"weights": "saved"}])
def test_building_takes_little_more_than_the_model(changes: dict[str, str], tmp_path: Path) -> None:
    if "quantize" in changes:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    large = dataclasses.replace(tiny_workload("llama-tiny"), config=SIZED, dtype="bfloat16")
    if "weights" in changes:
        build_model(large, "eager", CPU).save_pretrained(tmp_path, max_shard_size="20MB")
        changes = {**changes, "weights": str(tmp_path)}
    tiny = dataclasses.replace(large, config={**SIZED, "num_hidden_layers": 1, "hidden_size": 64})
    told = json.dumps(
        [with_lora(each, **{**changes, **more}).document() for each, more in ((tiny, {"weights": None}), (large, {}))]
    )
    # Large tensors that were freed go back at once, where the allocator would keep some of them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], input=told, capture_output=True, text=True, timeout=240, env=environment
    )
    peak_bytes, model_bytes = json.loads(done.stdout.splitlines()[-1])
    # In 16 bits the model takes 130 MB, which would come on top.
    assert peak_bytes < model_bytes + 80e6, done.stderr
