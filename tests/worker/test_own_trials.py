"""Test trials of the user's own Trainers and scripts on the CPU, each in its own process."""

import dataclasses
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
from searching import request
from server_client import Answer, ServerClient, of_command
from texts import write_texts
from tiny import QUICK
from transformers import T5ForConditionalGeneration, TrainingArguments

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface, Protection
from autotune.core.inspection import OwnSettings
from autotune.core.outcome import Effort, OutOfMemory
from autotune.core.training_source import find_loop, find_trainer
from autotune.core.units import MIB
from autotune.core.workload import Workload
from autotune.tuning.own_code import notes_on_lengths
from autotune.worker.user.trainer_fields import TrainerFields

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
SCRIPT = str(OWN_CODE / "classify_texts.py")
# Of the model of summarize_texts.py: transformers 5.3 has only one for it.
ATTENTION = "sdpa" if T5ForConditionalGeneration._supports_sdpa else "eager"

TRAINS = """
from transformers import Trainer, TrainingArguments, AutoConfig, AutoModelForSequenceClassification
import torch
config = AutoConfig.for_model("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
samples = [{"input_ids": torch.arange(12), "labels": torch.tensor(n % 2)} for n in range(64)]
def trainer(**fields):
    arguments = TrainingArguments(output_dir="out", **fields)
    return Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples)
"""


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with texts to learn from."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    write_texts(folder / "train.csv")
    return folder


def inline(folder: Path, text: str) -> Workload:
    """The workload of a script that says no more than this."""
    (folder / "run.py").write_text(TRAINS + text)
    return of_command("run.py")


def trainer(function: str) -> Workload:
    """The workload of a function of ``build_trainer.py``."""
    return Workload.of_source(find_trainer(f"{OWN_CODE / 'build_trainer.py'}:{function}"))


def classify(*words: str) -> Workload:
    """The example script, unmodified, with what it needs to train."""
    return of_command("python", SCRIPT, "--train_file", "train.csv", "--do_train", "--output_dir", "out", *words)


def sane(server: ServerClient, workload: Workload, candidate: Candidate, **changes: bool) -> Answer:
    """Run a trial of one's own that completes, with what holds for each of them."""
    answer = server.trial(workload, candidate, **changes)
    measured = answer.completed.measurement
    assert measured.samples_per_second == pytest.approx(candidate.samples_per_step / measured.step_seconds)
    assert len(measured.step_seconds_each) == QUICK.max_steps
    assert 0 < measured.optimizer_seconds < measured.step_seconds
    assert math.isfinite(measured.train_loss)
    return answer


def files(folder: Path) -> set[str]:
    """What lies in the working folder, caches aside."""
    return {path.name for path in folder.iterdir()} - {"cache", "__pycache__"}


def test_an_example_script_is_measured_and_writes_nothing(trial_server: ServerClient, folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "kept").write_text("a folder that is not empty trips the script's own check")
    eager = ("--eval_strategy", "steps", "--eval_steps", "1", "--do_eval", "--validation_file", "train.csv")
    workload = classify(*eager, "--save_steps", "1", "--logging_steps", "1", "--push_to_hub", "--report_to", "all")
    answer = sane(trial_server, workload, Candidate(Arm("bf16", gradient_checkpointing=True), 16, 2))
    assert answer.completed.measurement.micro_steps_run == 2
    assert [progress.phase for progress in answer.progress if progress.phase] == ["device", "script", "train"]
    assert answer.end.exit_code == 0
    assert "'eval_loss'" not in answer.log
    assert "train_runtime" not in answer.log
    assert files(folder) == {"train.csv", "out"}
    assert os.listdir(folder / "out") == ["kept"]


def test_a_host_that_goes_on_keeps_the_scripts_other_settings_of_accelerate(
    trial_server: ServerClient, folder: Path
) -> None:
    own = "accelerator_config={'even_batches': False, 'non_blocking': False}"
    says = "print(t.accelerator.even_batches, t.accelerator.non_blocking, t.args.logging_nan_inf_filter)"
    candidate = Candidate(Arm(non_blocking=True), 16, 2)
    answer = sane(trial_server, inline(folder, f"t = trainer({own})\n{says}\nt.train()"), candidate)
    assert "False True False" in answer.log.splitlines()


def test_settings_within_a_setting_of_accelerate_are_kept() -> None:
    made = TrainingArguments(
        "out", accelerator_config={"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}
    )
    tuned = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    TrainerFields(tuned=tuned).apply_to_new(made)
    told = made.accelerator_config["gradient_accumulation_kwargs"]
    assert told == {"sync_with_dataloader": False, "sync_each_batch": True}


LOOP = """
def train(config):
    model = AutoModelForSequenceClassification.from_config(globals()["config"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in autotune.steps(torch.utils.data.DataLoader(samples, batch_size=config.per_device_batch_size)):
        model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", ["trainer", "loop", "placeholders"])
def test_tokens_are_counted_without_padding(trial_server: ServerClient, folder: Path, kind: str) -> None:
    masks = "for sample in samples: sample['attention_mask'] = (torch.arange(12) < 9).long()\n"
    if kind == "trainer":
        workload, accumulation = inline(folder, masks + "trainer().train()\n"), 2
    elif kind == "loop":
        (folder / "loop.py").write_text("import autotune\n" + TRAINS + masks + LOOP)
        workload, accumulation = Workload.of_source(find_loop(f"{folder}/loop.py:train")), 1
    else:
        loop = LOOP.replace("autotune.steps(", "again(").replace("config.per_device_batch_size", "int(sys.argv[1])")
        begins = "import sys\ndef again(loader):\n    while True: yield from loader\n"
        (folder / "run.py").write_text(begins + TRAINS + masks + loop + "train(None)\n")
        workload, accumulation = of_command("python", "run.py", "{batch}"), 1
    prepared, _ = trial_server.prepared(workload)
    answer = trial_server.trial(prepared, Candidate(Arm(), 4, accumulation))
    assert answer.completed.measurement.tokens_per_sample == 9


def test_garbage_collection_leaves_alone_what_the_server_imported(trial_server: ServerClient, folder: Path) -> None:
    workload = inline(folder, "import gc\nprint(gc.get_freeze_count(), 'objects are frozen')\ntrainer().train()\n")
    answer = sane(trial_server, workload, Candidate(Arm(), 2))
    (frozen,) = re.findall(r"^(\d+) objects are frozen$", answer.log, flags=re.MULTILINE)
    assert int(frozen) > 100_000


def test_what_an_unmodified_script_would_do_is_known_before_any_trial(trial_server: ServerClient, folder: Path) -> None:
    own = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4", "--optim", "adafactor", "--bf16")
    model = trial_server.model(classify(*own))
    assert (model.class_name, model.dtype, model.gradient_checkpointing) == (
        "BertForSequenceClassification", "float32", True,
    )  # fmt: skip
    assert model.config["model_type"] == "bert"
    assert model.own == OwnSettings(Arm("bf16", optim="adafactor"), 4, 4)
    assert model.samples == 200
    assert files(folder) == {"train.csv"}


def test_arguments_from_a_json_file_are_overlaid_as_well(trial_server: ServerClient, folder: Path) -> None:
    settings = {"train_file": "train.csv", "do_train": True, "output_dir": "out", "per_device_train_batch_size": 2}
    (folder / "settings.json").write_text(json.dumps(settings))
    workload = of_command(SCRIPT, "settings.json")
    assert trial_server.model(workload).own.per_device_train_batch_size == 2
    sane(trial_server, workload, Candidate(Arm(), 8))
    assert files(folder) == {"train.csv", "settings.json"}


def test_a_subclass_of_the_arguments_is_overlaid_and_a_module_is_run(
    trial_server: ServerClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OWN_CODE))
    monkeypatch.chdir(OWN_CODE)
    evaluates = ("--eval_strategy=epoch", "--predict_with_generate", "true")
    workload = of_command("python", "-m", "summarize_texts", "--output_dir", str(folder / "out"), *evaluates)
    answer = sane(trial_server, workload, Candidate(Arm(attn_implementation=ATTENTION, optim="adafactor"), 8, 2))
    assert "all done" not in answer.log
    assert not (folder / "out").exists()


SAYS_STEPS = """
from transformers import TrainerCallback
class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("ends step", state.global_step, flush=True)
own = trainer(per_device_train_batch_size=8)
own.add_callback(Say)
own.train()
"""


@pytest.mark.parametrize(
    ("batch", "accumulation", "steps"),
    # 64 samples are: 3 micro-steps and 1; 24, 24 and 16 samples; exactly 4 steps.
    [(16, 3, 5), (24, 1, 4), (16, 1, 3)],
)
def test_steps_that_an_epoch_cuts_short_are_not_counted(
    trial_server: ServerClient, folder: Path, batch: int, accumulation: int, steps: int
) -> None:
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=60.0)
    answer = trial_server.trial(inline(folder, SAYS_STEPS), Candidate(Arm(), batch, accumulation), effort)
    assert len(answer.completed.measurement.step_seconds_each) == 2
    assert answer.log.count("ends step") == steps


def test_data_for_less_than_a_step_are_an_error(trial_server: ServerClient, folder: Path) -> None:
    outcome = trial_server.trial(inline(folder, "trainer().train()"), Candidate(Arm(), 65, 1)).failed
    assert outcome.message == "its training data has 64 samples, too few for a step of 65"


def test_a_part_of_a_long_accumulation_stands_for_the_whole(trial_server: ServerClient) -> None:
    summarizes = of_command(str(OWN_CODE / "summarize_texts.py"), "--output_dir", "out")
    for workload, attention in ((trainer("build"), "sdpa"), (summarizes, ATTENTION)):
        candidate = Candidate(Arm(attn_implementation=attention), 2, 16)
        measured = trial_server.trial(workload, candidate).completed.measurement
        assert measured.micro_steps_run == 3
        assert measured.samples_per_second == pytest.approx(32 / measured.step_seconds)
        in_full = Effort(warmup_steps=1, min_steps=1, max_steps=2, max_seconds=60.0, max_micro_steps=16)
        assert trial_server.trial(workload, candidate, in_full).completed.measurement.micro_steps_run == 16


def test_a_trainer_of_one_s_own_is_measured(trial_server: ServerClient, folder: Path) -> None:
    candidate = Candidate(Arm("bf16", gradient_checkpointing=True, optim="adafactor"), 16, 2)
    answer = sane(trial_server, trainer("build"), candidate)
    assert "training begins" in answer.log
    assert "trains with 16 × 2, bf16 True, checkpointing True, adafactor" in answer.log
    assert "training is over" not in answer.log
    assert files(folder) == {"train.csv"}
    own = trial_server.model(trainer("build")).own
    assert (own.per_device_train_batch_size, own.gradient_accumulation_steps) == (4, 2)


def test_a_trainer_of_one_s_own_has_levers_without_a_field(trial_server: ServerClient, folder: Path) -> None:
    sane(trial_server, trainer("build"), Candidate(Arm("bf16", unpadded=True), 16, 2))
    graphed = trial_server.trial(trainer("build"), Candidate(Arm(cuda_graphs=True), 16, 2)).failed
    assert graphed.message == "CUDA graphs need a CUDA device; the training is on cpu"


def test_the_baseline_is_unmodified(trial_server: ServerClient, folder: Path) -> None:
    answer = sane(trial_server, trainer("build"), Candidate(Arm(), 4, 2), unmodified=True)
    assert "trains with 4 × 2, bf16 False, checkpointing False, adamw_torch" in answer.log


def test_arguments_that_are_made_twice_keep_the_overlay(trial_server: ServerClient, folder: Path) -> None:
    own = trial_server.model(trainer("copy_arguments")).own
    assert (own.per_device_train_batch_size, own.gradient_accumulation_steps) == (4, 1)
    sane(trial_server, trainer("copy_arguments"), Candidate(Arm(), 8, 3))


def test_a_function_finds_no_options_on_its_command_line(trial_server: ServerClient, folder: Path) -> None:
    sane(trial_server, trainer("parse_options"), Candidate(Arm(), 8))


USES_ALL_UP = """
held, size = [], 1 << 20
while size:
    try:
        held.append(bytes(size))
    except MemoryError:
        size //= 2
"""


def test_memory_really_runs_out(trial_server: ServerClient, folder: Path) -> None:
    outcome = trial_server.trial(trainer("build"), Candidate(Arm(), 32, 1), cap_bytes=2 * MIB).outcome
    assert isinstance(outcome, OutOfMemory)
    # Nothing is left either to say so.
    uses_all_up = inline(folder, f"{USES_ALL_UP}trainer().train()\n")
    assert isinstance(trial_server.trial(uses_all_up, Candidate(Arm(), 8), cap_bytes=60 * MIB).outcome, OutOfMemory)
    large = "config.hidden_size = config.intermediate_size = 2048\n"
    catches = inline(folder, f"{large}try:\n    trainer().train()\nexcept Exception:\n    pass\n")
    assert isinstance(trial_server.trial(catches, Candidate(Arm(), 8), cap_bytes=400 * MIB).outcome, OutOfMemory)


def test_fields_that_code_sets_once_its_arguments_are_made_are_set_again(
    trial_server: ServerClient, folder: Path
) -> None:
    """As SetFit does. What it makes of the batch there, for a total, is known by a run with its own."""
    text = "t = trainer()\nt.args.gradient_accumulation_steps = 32 // t.args.per_device_train_batch_size\nt.train()"
    workload, model = trial_server.prepared(inline(folder, text))
    assert (model.own.per_device_train_batch_size, model.own.gradient_accumulation_steps) == (8, 4)
    assert (model.interface.made_from, model.interface.place) == ("code", "run.py:7")
    sane(trial_server, workload, Candidate(Arm(), 4, 2))
    sane(trial_server, workload, Candidate(Arm(), 8, 4), unmodified=True)
    # A callback is later still.
    late = """
from transformers import TrainerCallback
class Late(TrainerCallback):
    def on_train_begin(self, args, *_, **__):
        args.gradient_accumulation_steps = 3
t = trainer()
t.add_callback(Late())
t.train()
"""
    kept = inline(folder, late)
    assert "is 3, asked was 2" in trial_server.trial(kept, Candidate(Arm(), 4, 2)).failed.message


def test_a_configuration_file_of_the_command_line_is_named(trial_server: ServerClient, folder: Path) -> None:
    """As of tools that make the arguments of a file of their own."""
    inline(folder, "trainer(per_device_train_batch_size=8).train()\n")
    (folder / "lora.yml").write_text("micro_batch_size: 8\neval_batch_size: 8\nbatch_flattening: 80\n")
    interface = trial_server.model(of_command("run.py", "lora.yml")).interface
    assert (interface.made_from, interface.place) == ("file", "lora.yml")


def test_what_one_compiles_by_its_backend_alone_is_known_and_can_be_left_uncompiled(
    trial_server: ServerClient, folder: Path
) -> None:
    """``torch_compile_backend`` compiles whatever ``torch_compile`` says."""
    workload = inline(folder, "trainer(torch_compile_backend='eager', use_liger_kernel=False).train()\n")
    assert trial_server.model(workload).own.candidate() == Candidate(Arm(torch_compile=True), 8, 1)
    sane(trial_server, workload, Candidate(Arm(), 4))
    sane(trial_server, workload, Candidate(Arm(torch_compile=True), 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('nothing to do')", "run.py ended without having trained"),
        ("import sys; sys.exit(3)", "run.py left with exit code 3"),
        ("raise SystemExit('no data')", "run.py left with exit code 1: no data"),
        ("import no_such_thing", "run.py raised ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def broken(:", "run.py raised SyntaxError"),
    ],
)
def test_a_script_that_cannot_be_measured_says_why(
    trial_server: ServerClient, folder: Path, text: str, message: str
) -> None:
    workload = inline(folder, text)
    answer = trial_server.inspection(workload)
    assert answer.problem.message.startswith(message)
    outcome = trial_server.trial(workload, Candidate(Arm(), 2, 3)).failed
    assert outcome.reason == "error"
    assert outcome.message.startswith(message)


@pytest.mark.parametrize("kind", ["except BaseException", "except", "finally"])
def test_a_script_that_catches_everything_is_stopped_all_the_same(
    trial_server: ServerClient, folder: Path, kind: str
) -> None:
    text = f"try:\n    trainer().train()\n{kind}:\n    print('goes on')\nprint('goes on')\n"
    answer = sane(trial_server, inline(folder, text), Candidate(Arm(), 4))
    assert "goes on" not in answer.log


def test_an_error_of_the_training_is_told_though_the_script_catches_it(
    trial_server: ServerClient, folder: Path
) -> None:
    text = "t = trainer()\nt.data_collator = lambda batch: 1 / 0\ntry:\n    t.train()\nexcept Exception:\n    pass\n"
    answer = trial_server.trial(inline(folder, text), Candidate(Arm(), 4))
    assert answer.failed.message == "run.py raised ZeroDivisionError: division by zero"
    assert answer.failed.during == "train"
    assert "run.py" in answer.failed.traceback.splitlines()[1]
    assert "ZeroDivisionError" in answer.log


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("forget", "build_trainer.py:forget returned None, not a transformers.Trainer"),
        ("return_the_class", "build_trainer.py:return_the_class returned the class SmoothTrainer, not a"),
        ("train_otherwise", "the Trainer of build_trainer.py:train_otherwise has a train method that never calls"),
        ("train_itself", "build_trainer.py:train_itself calls train itself"),
        ("no_such", "build_trainer.py has no function no_such"),
        ("shard_itself", "the TrainingArguments of the code set fsdp"),
        (
            "ignore",
            "build_trainer.py:ignore ignored its overrides: per_device_train_batch_size is 4, asked was 2; pass them",
        ),
    ],
)
def test_a_function_that_builds_no_trainer_to_measure_says_why(
    trial_server: ServerClient, function: str, message: str
) -> None:
    answer = trial_server.inspection(trainer(function))
    assert answer.problem.message.startswith(message)


def test_an_inspection_never_has_two_models(trial_server: ServerClient, folder: Path) -> None:
    model = trial_server.model(trainer("build_one_at_a_time"))
    assert model.own.per_device_train_batch_size == 4


def test_an_inspection_that_is_killed_says_by_what(trial_server: ServerClient) -> None:
    answer = trial_server.inspection(trainer("die_when_built"))
    assert answer.end.signal == signal.SIGKILL


def test_ranks_that_share_a_sample_are_refused(trial_server: ServerClient, folder: Path) -> None:
    """They are refused before the arguments are made, which a single process cannot do."""
    if not hasattr(pytest.importorskip("accelerate.utils"), "ParallelismConfig"):
        pytest.skip("this version of accelerate has no such ranks")
    text = (
        "from accelerate.utils import ParallelismConfig\nfrom transformers import TrainingArguments\n"
        "TrainingArguments(output_dir='out', parallelism_config=ParallelismConfig(cp_size=2))\n"
    )
    problem = trial_server.inspection(inline(folder, text)).problem
    assert "have several ranks share a sample (parallelism_config), which is not searched" in problem.message
    assert "--gpus 2 --strategy fsdp" in problem.hint


def test_an_override_that_is_ignored_is_named(trial_server: ServerClient) -> None:
    outcome = trial_server.trial(trainer("ignore_precision"), Candidate(Arm("bf16"), 4)).failed
    assert "ignored its overrides: bf16 is False, asked was True" in outcome.message


def test_a_loss_that_is_no_number_disqualifies(trial_server: ServerClient, folder: Path) -> None:
    text = "t = trainer(learning_rate=1e30, max_grad_norm=0.0, optim='sgd')\nt.train()\n"
    outcome = trial_server.trial(inline(folder, text), Candidate(Arm(optim="sgd"), 8)).failed
    assert (outcome.reason, outcome.message) == ("non_finite", "the loss of the last step is nan")


SPEAKS_UP_LATER = """
Trainer.init_hf_repo = lambda *_, **__: print("pushes")
arguments = TrainingArguments("out")
arguments.set_push_to_hub("me/model")
arguments.report_to, arguments.output_dir = ["tensorboard"], "elsewhere"
model = AutoModelForSequenceClassification.from_config(config)
trainer = Trainer(model, arguments, train_dataset=samples)
print("reports to", trainer.args.report_to)
trainer.train()
"""


def test_what_is_set_after_the_arguments_were_made_is_kept_quiet_too(trial_server: ServerClient, folder: Path) -> None:
    workload = inline(folder, SPEAKS_UP_LATER)
    trial_server.inspect(workload)
    answer = sane(trial_server, workload, Candidate(Arm(), 4))
    assert "reports to []" in answer.log
    assert "pushes" not in answer.log
    assert files(folder) == {"train.csv", "run.py"}


def test_a_model_that_checkpoints_by_itself_is_known_before_any_trial(trial_server: ServerClient, folder: Path) -> None:
    text = "t = trainer()\nt.model.gradient_checkpointing_enable()\nt.train()\n"
    model = trial_server.model(inline(folder, text))
    assert (model.always_checkpoints, model.own.arm.gradient_checkpointing) == (True, True)
    outcome = trial_server.trial(inline(folder, text), Candidate(Arm(), 4)).failed
    assert (
        outcome.message
        == "run.py trains otherwise than it was told: checkpointing of its model is True, asked was False"
    )
    # Its arguments may turn it on as well.
    both = inline(folder, text.replace("trainer()", "trainer(gradient_checkpointing=True)"))
    assert trial_server.model(both).always_checkpoints
    by_arguments = trial_server.model(inline(folder, "trainer(gradient_checkpointing=True).train()"))
    assert (by_arguments.always_checkpoints, by_arguments.own.arm.gradient_checkpointing) == (False, True)
    answer = sane(trial_server, inline(folder, text), Candidate(Arm(gradient_checkpointing=True), 4))
    assert "is_gradient_checkpointing" not in answer.log


def test_loading_processes_get_time_to_run_dry(trial_server: ServerClient, folder: Path) -> None:
    """Two processes have two batches each ready: four more steps pass unmeasured. Of a lookahead of 256, eight do."""
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=60.0)
    own = SAYS_STEPS.replace("size=8", "size=8, dataloader_num_workers=2")
    far = own.replace("workers=2", "workers=2, dataloader_prefetch_factor=256")
    for text, arm, ready in ((own, Arm(), 4), (far, Arm(), 8), (SAYS_STEPS, Arm(dataloader_num_workers=2), 4)):
        workload = inline(folder, text)
        asked = trial_server.model(workload).dataloader_num_workers
        answer = trial_server.trial(workload, Candidate(arm, 8), effort)
        assert len(answer.completed.measurement.step_seconds_each) == 2
        assert (asked, answer.log.count("ends step")) == (0 if arm.dataloader_num_workers else 2, 1 + ready + 2)


@pytest.mark.whole
def test_nothing_is_left_of_a_script_that_is_stopped_by_force(trial_server: ServerClient, folder: Path) -> None:
    text = "import sys, time\nprint('where', TrainingArguments('out').output_dir, flush=True)\ntime.sleep(600)\n"
    for limit_seconds in (8.0, 80.0):
        answer = trial_server.trial(inline(folder, text), Candidate(Arm(), 4), timeout_seconds=limit_seconds)
        assert answer.end.timed_out is True
        if "where " in answer.log:
            break
    where = Path(next(line for line in answer.log.splitlines() if line.startswith("where ")).removeprefix("where "))
    assert where.parent.name.startswith("autotune-trial-")
    assert not where.parent.exists()


NEEDS_TWO = """
class Pairs(Trainer):
    def __init__(self, model, args, **others):
        if args.per_device_train_batch_size != 2 * args.gradient_accumulation_steps:
            raise ValueError("batches of another shape cannot be compared")
        super().__init__(model, args, **others)
"""


def test_code_that_bears_no_other_batch_is_inspected_with_its_own(trial_server: ServerClient, folder: Path) -> None:
    """The batch that an inspection tries is not one that the user would train with."""
    text = "Pairs(AutoModelForSequenceClassification.from_config(config), TrainingArguments('out', "
    text += "per_device_train_batch_size=2, gradient_accumulation_steps=1), train_dataset=samples).train()\n"
    model = trial_server.model(inline(folder, NEEDS_TWO + text))
    assert model.own.per_device_train_batch_size == 2
    seen = {name: getattr(model.interface, name) for name in ("protection", "lengths", "shapes_vary", "obstacles")}
    assert model.interface == CodeInterface(made_from="code", place="run.py:15", **seen)


def test_a_batch_of_one_is_not_what_an_inspection_tries() -> None:
    from autotune.worker.user.trainer_code import probe

    for batch, accumulation in ((8, 1), (4, 4), (2, 1), (2, 8), (1, 1), (1, 16), (3, 5)):
        tried = probe(batch, accumulation)
        assert tried["per_device_train_batch_size"] not in (1, batch)
        if batch * accumulation % 4 == 0 and batch != 3:
            assert tried["per_device_train_batch_size"] * tried["gradient_accumulation_steps"] == batch * accumulation


ROLLOUTS = """
import dataclasses
@dataclasses.dataclass
class RolloutArguments(TrainingArguments):
    steps_per_generation: int | None = None
    def __post_init__(self):
        super().__post_init__()
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        if self.per_device_train_batch_size * self.steps_per_generation % 8:
            raise ValueError("generation_batch_size must be divisible")
own = RolloutArguments("out", num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=4)
Trainer(AutoModelForSequenceClassification.from_config(config), own, train_dataset=samples).train()
"""


def test_what_is_generated_for_a_whole_step_is_not_shortened(trial_server: ServerClient, folder: Path) -> None:
    text = ROLLOUTS.replace("    steps_per", "    num_generations: int = 8\n    steps_per", 1)
    measured = trial_server.trial(inline(folder, text), Candidate(Arm(), 4, 4), unmodified=True).completed.measurement
    assert measured.micro_steps_run == 4


def test_completions_of_a_prompt_and_packed_rows_are_seen(trial_server: ServerClient, folder: Path) -> None:
    fields = (
        "    num_generations: int = 8\n    generation_batch_size: int = 16\n    packing: bool = True\n    steps_per"
    )
    model = trial_server.model(inline(folder, ROLLOUTS.replace("    steps_per", fields, 1)))
    assert (model.interface.samples_a_prompt, model.interface.packs) == (8, True)
    assert model.interface.batch_matters is None


def test_batches_that_are_counted_for_generation_are_said_to_matter(trial_server: ServerClient, folder: Path) -> None:
    model = trial_server.model(inline(folder, ROLLOUTS.replace("num_generations=8", "steps_per_generation=4")))
    assert model.interface.samples_a_prompt == 1
    assert model.interface.batch_matters.startswith("steps_per_generation=4 counts batches")


def test_a_callback_that_stops_the_training_fails_no_trial(trial_server: ServerClient, folder: Path) -> None:
    stops = "from transformers import TrainerCallback\nclass Stop(TrainerCallback):\n"
    stops += "    def on_step_end(self, args, state, control, **_):\n        control.should_training_stop = True\n"
    text = stops + "own = trainer(per_device_train_batch_size=8)\nown.add_callback(Stop)\nown.train()\n"
    sane(trial_server, inline(folder, text), Candidate(Arm(), 8))


def test_a_run_of_wandb_is_started_by_no_mode(trial_server: ServerClient, folder: Path) -> None:
    (folder / "wandb.py").write_text("def init(**options):\n    raise SystemExit('mode is ' + options['mode'])\n")
    answer = trial_server.inspection(inline(folder, "import wandb\nwandb.init(mode='offline')\n"))
    assert "mode is disabled" in answer.problem.message


CACHES = """
import os, random
from datasets import Dataset
data = Dataset.from_dict({"n": list(range(64))})
if not os.path.exists("data"):
    data.save_to_disk("data")
data = Dataset.load_from_disk("data")
number = random.random()
data = data.map(lambda row: {"input_ids": [int(number * 0) + row["n"]] * 12, "labels": row["n"] % 2})
Trainer(AutoModelForSequenceClassification.from_config(config), TrainingArguments("out"), train_dataset=data).train()
"""


def test_cache_files_that_a_trial_makes_are_removed_with_it(
    trial_server: ServerClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were there before stay: the folder is a cache, so that what is written there is kept."""
    monkeypatch.setattr(trial_server, "protection", Protection("none"))
    workload = inline(folder, CACHES)
    trial_server.inspect(workload)
    before = {path.name for path in (folder / "data").glob("cache-*")}
    assert len(before) == 1
    sane(trial_server, workload, Candidate(Arm(), 8))
    assert {path.name for path in (folder / "data").glob("cache-*")} == before


def test_the_precision_that_a_launcher_sets_is_the_scripts_own_and_no_candidates(
    trial_server: ServerClient, folder: Path
) -> None:
    inline(
        folder,
        "def look(*_):\n    assert not torch.is_autocast_enabled('cpu'), 'autocast'\n"
        "made = trainer(use_cpu=True)\nmade.model.bert.register_forward_pre_hook(look)\nmade.train()\n",
    )
    workload = of_command("accelerate", "launch", "--num_processes", "1", "--mixed_precision", "bf16", "run.py")
    assert trial_server.model(workload).own.arm.precision == "bf16"
    assert trial_server.trial(workload, Candidate(Arm("fp32"), 4, 1)).completed
    outcome = trial_server.trial(workload, Candidate(Arm("bf16"), 4, 1)).failed
    assert "autocast" in outcome.message


LENGTHS = """
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
import torch
class Own(Trainer):
    pass
config = AutoConfig.for_model("llama", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
                              intermediate_size=32)
model = AutoModelForCausalLM.from_config(config)
samples = [{"input_ids": torch.arange(1, 5 + n % 19)} for n in range(64)]
def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    def pad(x, value):
        return torch.nn.functional.pad(x, (0, longest - len(x)), value=value)
    ids = [row["input_ids"] for row in rows]
    return {"input_ids": torch.stack([pad(x, 0) for x in ids]), "labels": torch.stack([pad(x, -100) for x in ids]),
            "attention_mask": torch.stack([pad(torch.ones_like(x), 0) for x in ids])}
arguments = TrainingArguments(output_dir="out", remove_unused_columns=False)
KIND(model, arguments, train_dataset=samples, data_collator=collate).train()
"""


def test_a_trainer_of_texts_is_looked_at_for_its_levers(trial_server: ServerClient, folder: Path) -> None:
    (folder / "run.py").write_text(LENGTHS.replace("KIND", "Own"))
    workload, model = trial_server.prepared(of_command("run.py"))
    assert model.interface.shapes_vary
    assert set(model.interface.obstacles) == {"sparse_prediction"}
    lengths = model.interface.lengths
    assert (sum(count for _, count in lengths.counts), lengths.longest, lengths.multiple) == (64, 22, 1)
    assert set(lengths.longest_samples[:3]) == {18, 37, 56}
    levers = Arm(length_multiple=16, fused_loss=True)
    measured = trial_server.trial(workload, Candidate(levers, 4, 2)).completed.measurement
    assert measured.samples_per_second == pytest.approx(8 / measured.step_seconds)
    assert (measured.run_steps, measured.run_epochs, measured.run_shapes) == (24, 3.0, 2), "16 and 32 tokens"
    rows = dataclasses.replace(levers, length_multiple=32, padding_free=True)
    measured = trial_server.trial(workload, Candidate(rows, 4, 2)).completed.measurement
    assert measured.samples_per_second == pytest.approx(8 / measured.step_seconds)


_BATCH = """
inner = collate
def collate(rows):
    batch = inner(rows)
    CHANGE
    return batch
Own(model"""
ODD_TEXTS = {
    "a stream": (
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self, held=samples):
        while True:
            yield from held
samples, arguments.max_steps = Stream(), 50
Own(model""",
        ("those of 32 that were drawn, of a stream", "rows without padding; batches are divided by their samples"),
        "its samples are a stream, whose order stays",
    ),
    "a tokenizer in the collator": (
        """
inner, samples = collate, ["w" * (5 + n % 19) for n in range(64)]
def collate(texts):
    return inner([{"input_ids": torch.arange(1, 1 + len(text))} for text in texts])
Own(model""",
        ("those of 32 that were drawn, of 64",),
        "its samples have no input_ids, by whose lengths a Trainer groups them",
    ),
    "no mask": (
        _BATCH.replace("CHANGE", "del batch['attention_mask']"),
        ("padding to few lengths; a batch has no input_ids with an attention_mask",),
        None,
    ),
    "positions": (
        _BATCH.replace("CHANGE", "batch['position_ids'] = 3 + batch['attention_mask'].cumsum(1)"),
        ("padding to few lengths; a batch has position_ids", "rows without padding; a batch has no token that counts"),
        None,
    ),
    "positions in order": (
        """
from transformers import GPT2LMHeadModel
class Ordered(GPT2LMHeadModel):
    def forward(self, position_ids=None, **inputs):
        return super().forward(**inputs)
Own(Ordered(AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=512))""",
        ("rows without padding; Ordered mixes the samples of a row with sdpa attention",),
        None,
    ),
    "a loss that counts padding": (
        """
from torch.nn import functional
class Counts(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels").clamp(min=0)
        return functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
Counts(model""",
        (
            "padding to few lengths; the loss of a batch is another",
            "rows without padding; the loss of a batch is another",
        ),
        None,
    ),
}
"""A Trainer of texts otherwise than usual, what is told of that, and why its samples cannot be grouped by length."""


@pytest.mark.parametrize(("code", "told", "order"), ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_odd_texts_are_told_and_trained_on(
    code: str, told: tuple[str, ...], order: str | None, trial_server: ServerClient, folder: Path
) -> None:
    (folder / "run.py").write_text(LENGTHS.replace("KIND(model", code))
    workload, model = trial_server.prepared(of_command("run.py"))
    assert model.interface.obstacles.get("train_sampling_strategy") == order
    lines = list(notes_on_lengths(request(search_effort="default", padding_free="auto"), model.interface))
    assert len(lines) == len(told)
    for line, words in zip(lines, told, strict=True):
        assert words in line
        assert "\n" not in line
    assert trial_server.trial(workload, Candidate(Arm(), 4)).completed


@pytest.mark.parametrize("by", ["code", "lever"])
def test_a_trainer_that_groups_by_length_is_measured_on_all_lengths(
    by: str, trial_server: ServerClient, folder: Path
) -> None:
    """Its first steps have the longest samples, of 22 tokens; the mean is 13, and batches are hardly padded."""
    code = LENGTHS.replace("range(64)", "range(640)").replace("KIND", "Own")
    if by == "code":
        code = code.replace("remove_", 'train_sampling_strategy="group_by_length", remove_')
    (folder / "run.py").write_text(code)
    workload, model = trial_server.prepared(of_command("run.py"))
    assert model.interface.lengths.order == ("group_by_length" if by == "code" else "random")
    effort = Effort(warmup_steps=1, min_steps=8, max_steps=8, max_seconds=100.0)
    arm = Arm(train_sampling_strategy="group_by_length" if by == "lever" else None)
    measured = trial_server.trial(workload, Candidate(arm, 4, 2), effort).completed.measurement
    assert measured.tokens_per_sample == pytest.approx(13, rel=0.15)
    # Of 80 steps: in the order of the code nearly each micro-batch has one of the 19 lengths by itself.
    assert measured.run_shapes == 19


def test_memory_that_is_kept_from_step_to_step_is_told(trial_server: ServerClient, folder: Path) -> None:
    """Four MiB of each."""
    text = """
from transformers import TrainerCallback
class Keeps(TrainerCallback):
    kept = []
    def on_step_end(self, *_, **__):
        self.kept.append(torch.ones(2**20))
keeps = trainer()
keeps.add_callback(Keeps())
keeps.train()
"""
    effort = Effort(warmup_steps=2, min_steps=18, max_steps=18, max_seconds=1000.0)
    measured = trial_server.trial(inline(folder, text), Candidate(Arm(), 4), effort).completed.measurement
    assert measured.growth_bytes == pytest.approx(4 * MIB, rel=0.5)
