"""Test that exports of several kinds of winners load into the installed transformers, and train."""

import ast
import dataclasses
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from arbitrary import WORDS, candidates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import check_messages
from reported import OLD_FIELDS, SOURCE, report_of
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError, NoResultError
from autotune.core.look import Look
from autotune.core.outcome import Completed, Failed
from autotune.core.schema import decode
from autotune.core.workload import Workload
from autotune.results.export import Export, beside_lines, make_export, render
from autotune.results.forms import FORMATS
from autotune.results.report import Report
from autotune.space.training_arguments import TunedArguments, checkpointing_field
from autotune.store.records import TrialRecord

LOADER = Path(__file__).with_name("load_exports.py")

FSDP = Arm(
    "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2, transformer_layer_cls_to_wrap="BertLayer",
    sync_each_batch=True,
)  # fmt: skip
WINNERS: dict[str, tuple[str, Candidate]] = {
    "cpu-fp32": ("cpu", Candidate(Arm("fp32"), 8)),
    "cpu-bf16-checkpointing": ("cpu", Candidate(Arm("bf16", gradient_checkpointing=True), 4, 3)),
    "cpu-adafactor-eager": ("cpu", Candidate(Arm("fp32", False, "eager", "adafactor"), 2, 2)),
    "cuda-fp32": ("cuda", Candidate(Arm("fp32"), 8, 2)),
    "cuda-tf32": ("cuda", Candidate(Arm("tf32"), 8)),
    "cuda-bf16": ("cuda", Candidate(Arm("bf16"), 32, 2)),
    "cuda-fsdp": ("cuda", Candidate(FSDP, 16, 2)),
    "cuda-fp16-checkpointing": ("cuda", Candidate(Arm("fp16", gradient_checkpointing=True), 16)),
}


def export_of(name: str, fields: tuple[str, ...], workload: Workload | None = None) -> Export:
    device_kind, candidate = WINNERS[name]
    return make_export(report_of(candidate, device_kind, fields, workload))


@pytest.fixture(scope="module")
def fields() -> tuple[str, ...]:
    """The fields of the installed ``TrainingArguments``."""
    from transformers import TrainingArguments

    return tuple(field.name for field in dataclasses.fields(TrainingArguments))


@given(candidates(), st.sampled_from(["cpu", "cuda"]), WORDS, WORDS, st.none() | WORDS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_every_form_says_the_same_of_any_winner(
    fields: tuple[str, ...], candidate: Candidate, device_kind: str, model: str, device: str, data: str | None
) -> None:
    """Whatever stands in the names: no comment ends early, no quote is left open."""
    workload = dataclasses.replace(
        tiny_workload("bert-tiny"), model=model, data=None if data is None else DataSpec(data, "json", "1")
    )
    report = report_of(candidate, device_kind, fields, workload)
    report.environment["device_name"] = device
    export = make_export(report)
    arguments = json.loads(render(export, "json"))
    assert arguments == export.arguments == decode(arguments, TunedArguments)
    assert arguments.keys() <= TunedArguments.__annotations__.keys()
    assert yaml.safe_load(render(export, "yaml")) == arguments
    flags = shlex.split(render(export, "cli"))
    # What is the default anyway, and would not outlive $(…), is no flag.
    said = {name: value for name, value in arguments.items() if value is not None and not isinstance(value, dict)}
    assert [flag.removeprefix("--") for flag in flags[::2]] == list(said)
    assert [as_flag(value) for value in said.values()] == flags[1::2]
    script = ast.parse(render(export, "python"))
    assert model in {node.value for node in ast.walk(script) if isinstance(node, ast.Constant)}
    made = script.body[-1]
    assert isinstance(made, ast.Assign)
    assert isinstance(made.value, ast.Call)
    assert {word.arg: ast.literal_eval(word.value) for word in made.value.keywords} == arguments
    for line in render(export, "env").splitlines():
        assert len(shlex.split(line)) == 1
    assert all(len(line.splitlines()) == 1 for line in beside_lines(export))
    # Variables of the environment may be none at all.
    texts = [render(export, form) for form in FORMATS if form != "env"]
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in texts)


def as_flag(value: object) -> str:
    """What an argument parser is given for a value."""
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


@pytest.fixture(scope="module")
def answers(fields: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every form of every export became in a fresh process; the machine's abilities under ``machine``."""
    folder = tmp_path_factory.mktemp("exports")
    workload = tiny_workload("bert-tiny", config={"vocab_size": 1000}, model=str(folder / "model"))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(workload.config))
    for name in WINNERS:
        (folder / name).mkdir()
        for form in FORMATS:
            (folder / name / f"export.{form}").write_text(render(export_of(name, fields, workload), form))
    told = warm.output_of(str(LOADER), str(folder), cwd=folder, env=one_gpu_at_most())
    machine, *found = (json.loads(line) for line in told.splitlines() if line.startswith('{"'))
    return {"machine": machine, **{answer["name"]: answer for answer in found}}


def one_gpu_at_most() -> dict[str, str]:
    """This environment with its first GPU alone, since a Trainer spreads its batches over all that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": visible}


def loaded(answers: dict[str, dict[str, Any]], name: str, form: str) -> dict[str, Any]:
    """What a form became; skips where transformers refuses it for want of a GPU that can do it."""
    device_kind, candidate = WINNERS[name]
    answer = answers[name][form]
    lacking = device_kind == "cuda" and answers["machine"].get(candidate.arm.precision) is False
    if lacking and "error" in answer:
        pytest.skip(f"no GPU with {candidate.arm.precision} here, without which transformers says: {answer['error']}")
    assert "error" not in answer, answer["error"]
    return dict(answer["loaded"])


LOADED_FORMS = ("json file", "keywords", "yaml file", "command line", "python")


@pytest.mark.parametrize("form", LOADED_FORMS)
@pytest.mark.parametrize("name", WINNERS)
def test_every_form_loads_without_a_warning_as_it_was_exported(
    answers: dict[str, dict[str, Any]], fields: tuple[str, ...], name: str, form: str
) -> None:
    arguments = loaded(answers, name, form)
    exported = export_of(name, fields).arguments
    if form == "command line":
        exported = {key: value for key, value in exported.items() if not isinstance(value, dict)}
    assert {key: arguments[key] for key in exported} == exported


@pytest.mark.parametrize("name", WINNERS)
def test_the_script_loads_the_model_as_measured(answers: dict[str, dict[str, Any]], name: str) -> None:
    arm = WINNERS[name][1].arm
    assert loaded(answers, name, "python")["model"] == {"attention": arm.attn_implementation, "dtype": "torch.float32"}


@pytest.mark.parametrize("name", WINNERS)
def test_a_trainer_trains_with_it(answers: dict[str, dict[str, Any]], name: str) -> None:
    device_kind, candidate = WINNERS[name]
    trained = loaded(answers, name, "training")
    arm = candidate.arm
    if arm.precision == "fp16" and trained["device"] == "cpu":
        pytest.skip("no GPU here, and transformers leaves fp16 out without one")
    assert trained["steps"] == 2
    assert trained["batches"] == [candidate.per_device_train_batch_size] * 2 * candidate.gradient_accumulation_steps
    assert trained["checkpointing"] is arm.gradient_checkpointing
    assert trained["optimizer"] == ("Adafactor" if arm.optim == "adafactor" else "AdamW")
    of_precision = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    assert trained["dtypes"] == [of_precision.get(arm.precision, "torch.float32")]
    assert trained["device"] == ("cuda" if device_kind == "cuda" and answers["machine"]["cuda"] else "cpu")


def test_an_old_transformers_gets_its_own_names() -> None:
    arguments = export_of("cpu-bf16-checkpointing", OLD_FIELDS).arguments
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not [key for key in arguments if key.startswith("activation")]


def test_tf32_is_exported_as_it_was_measured(fields: tuple[str, ...]) -> None:
    report = report_of(Candidate(Arm("bf16"), 8), "cuda", fields)
    assert make_export(report).arguments["tf32"] is None
    assert "--tf32" not in render(make_export(report), "cli")
    # Studies of before say that it was switched off.
    report.environment["measurement_revision"] = 2
    assert make_export(report).arguments["tf32"] is False
    del report.environment["measurement_revision"]
    assert make_export(report).arguments["tf32"] is False
    assert "--tf32 false" in render(make_export(report), "cli")


def test_only_what_was_tuned_is_exported(fields: tuple[str, ...]) -> None:
    exported = export_of("cuda-bf16", fields)
    assert set(exported.measured_arguments) == {
        "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "tf32",
        checkpointing_field(fields), "optim", "torch_compile", "use_liger_kernel",
    }  # fmt: skip
    assert json.loads(render(exported, "json")) == exported.arguments


def test_the_evaluation_has_the_batch_that_training_was_measured_with(fields: tuple[str, ...]) -> None:
    """The Trainer's own 8 need not fit. What a user's own code evaluates with is the user's, and was not run."""
    exported = export_of("cpu-adafactor-eager", fields)
    assert exported.arguments == {**exported.measured_arguments, "per_device_eval_batch_size": 2}
    own = export_of("cuda-bf16", fields, tiny_workload("bert-tiny", task="own", model="train.py:build"))
    assert own.arguments == own.measured_arguments
    said = " ".join(beside_lines(own))
    assert "no evaluation was run: with per_device_eval_batch_size up to 32" in said
    assert "compute_metrics" in said


def test_a_study_without_a_winner_has_nothing_to_export(fields: tuple[str, ...]) -> None:
    report = report_of(Candidate(Arm(), 8), "cpu", fields)
    without = dataclasses.replace(report.study, best_trial_id=None, state="finished")
    unfinished = dataclasses.replace(report, study=without)
    with pytest.raises(NoResultError, match="'a study' has no feasible trial"):
        make_export(unfinished)
    running = dataclasses.replace(unfinished, study=dataclasses.replace(without, state="running"))
    with pytest.raises(NoResultError, match="'a study' has not ended"):
        make_export(running)
    failed = dataclasses.replace(report.trials[0], outcome=Failed("error", "no"))
    with pytest.raises(NoResultError, match="'a study' has no feasible trial"):
        make_export(dataclasses.replace(report, trials=(failed,)))


def own_export(kind: str, *, world_size: int = 1) -> Export:
    """An export of a script that trains with accelerate or Lightning, measured on a CPU."""
    made = report_of(Candidate(Arm("bf16"), 8, 2), "cpu", ())
    interface = {"kind": kind, "searched": ["batch", "accumulation", "precision"]}
    study = dataclasses.replace(made.study, request={"world_size": world_size})
    workload = {**made.workload, "task": "own", "source": {**SOURCE, "interface": interface}}
    return make_export(dataclasses.replace(made, study=study, workload=workload))


@pytest.mark.parametrize(("world_size", "kind"), [(1, "NO"), (2, "MULTI_CPU")])
def test_a_loop_with_an_accelerator_gets_its_precision_from_a_file(tmp_path: Path, world_size: int, kind: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(render(own_export("accelerate", world_size=world_size), "accelerate"))
    loaded = load_config_from_file(str(path))
    assert (loaded.distributed_type, loaded.num_processes) == (kind, world_size)
    assert (loaded.mixed_precision, loaded.use_cpu) == ("bf16", True)


def test_deepspeed_is_started_by_a_launcher_also_alone(fields: tuple[str, ...]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    report = report_of(Candidate(Arm("bf16", strategy="zero2-offload"), 4, 2), "cuda", fields)
    report.environment["host"] = {"usable_cores": 16}
    alone = make_export(report)
    words = shlex.split(render(alone, "torchrun"))
    # The optimizer on the CPU uses all cores.
    assert words[0] == "OMP_NUM_THREADS=16"
    assert words[words.index("--nproc_per_node") + 1] == "1"
    settings = json.loads(words[words.index("--deepspeed") + 1])
    assert settings == alone.arguments["deepspeed"]
    assert any("torchrun --nproc_per_node 1" in line for line in beside_lines(alone))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accelerate.yaml"
        path.write_text(render(alone, "accelerate"))
        config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes) == ("DEEPSPEED", 1)
    # What the argument says is not said twice.
    assert (config.deepspeed_config, config.mixed_precision) == ({"zero3_init_flag": False}, None)
    # ZeRO-3 shards a model while it is loaded, once transformers knows of it.
    script = render(
        make_export(report_of(Candidate(Arm("bf16", strategy="zero3", ranks=2), 4), "cuda", fields)), "python"
    )
    assert script.index("TrainingArguments(") < script.index("from_pretrained(")


def test_an_offloading_winner_for_several_devices_is_started_on_all_of_them(fields: tuple[str, ...]) -> None:
    report = report_of(Candidate(Arm("bf16", strategy="zero2-offload"), 4, 2), "cuda", fields)
    report.environment["host"] = {"usable_cores": 16}
    report.study.request["world_size"] = 4
    words = shlex.split(render(make_export(report), "torchrun"))
    assert (words[0], words[words.index("--nproc_per_node") + 1]) == ("OMP_NUM_THREADS=4", "4")


def test_other_code_in_one_process_needs_no_launcher() -> None:
    with pytest.raises(InvalidRequestError, match="this study measured one"):
        render(own_export("lightning"), "accelerate")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"file": "/home/ada/train.py", "argv": ["--name", "a b"]}, "train.py --name 'a b'"),
        ({"file": "/home/ada/code/train.py", "argv": []}, "code/train.py"),
        ({"file": "/opt/train.py", "argv": []}, "/opt/train.py"),
        ({"file": "/opt/package/train.py", "module": "package.train", "argv": ["--fast"]}, "-m package.train --fast"),
        # What it reads its settings from has to be changed, flags are not read.
        ({"file": "/home/ada/train.py", "argv": ["a.yaml"], "interface": {"from": "file"}}, "train.py a.yaml"),
        ({"file": "/home/ada/train.py", "kind": "build", "function": "build"}, "train.py"),
    ],
)
def test_the_users_own_script_is_launched_with_its_own_options(source: dict[str, Any], expected: str) -> None:
    made = report_of(Candidate(Arm("bf16", strategy="ddp", ranks=2), 8, 2), "cpu", ("bf16",))
    source = {**SOURCE, "interface": {"from": "flags"}, **source}
    export = make_export(dataclasses.replace(made, workload={**made.workload, "task": "own", "source": source}))
    line = render(export, "torchrun")
    start = f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 {expected}"
    takes_flags = source["kind"] == "script" and source["interface"]["from"] == "flags"
    assert line == (f"{start} {render(export, 'cli')}" if takes_flags else f"{start}\n")


@pytest.mark.parametrize(("made_from", "form"), [("flags", "cli"), ("file", "json"), ("code", "python")])
def test_the_form_that_a_script_is_told_is_the_one_it_reads(made_from: str, form: str) -> None:
    """What is named after a search and what is said beside the export agree."""
    made = report_of(Candidate(Arm("bf16"), 8, 2), "cpu", ("bf16",))
    workload = {**made.workload, "task": "own", "source": {**SOURCE, "interface": {"from": made_from}}}
    export = make_export(dataclasses.replace(made, workload=workload))
    assert export.usual_form == form
    assert f"(--format {form})" in beside_lines(export)[0]


def test_messages_beside_an_export() -> None:
    """What each form cannot contain, and the forms that contain it as a comment or a line of code."""
    fields = ("bf16", "fp16", "tf32", "gradient_checkpointing", "optim", "use_cpu", "fsdp", "deepspeed")
    own = tiny_workload("bert-tiny", task="own", model="train.py:build")
    packed = make_export(report_of(Candidate(Arm("bf16", padding_free=True), 4), "cuda", fields))
    plain = report_of(Candidate(Arm("bf16"), 8, 2), "cpu", fields)
    zero = report_of(Candidate(Arm("bf16", strategy="zero2-offload", ranks=2), 4, 2), "cuda", fields)
    zero.environment.update(host={"usable_cores": 16}, ranks={"world_size": 2})
    zero.study.request["world_size"] = 2
    applied = report_of(
        Candidate(Arm("bf16", gradient_checkpointing=True, checkpointed_layers=4, unpadded=True), 4), "cuda", fields
    )

    def measured(report: Report, **changes: Any) -> TrialRecord:
        outcome = report.trials[0].outcome
        assert isinstance(outcome, Completed)
        changed = dataclasses.replace(outcome, measurement=dataclasses.replace(outcome.measurement, **changes))
        return dataclasses.replace(report.trials[0], outcome=changed)

    by_itself = (("every_n_layers", 3), ("pad_to_multiple_of", 64))
    stock = report_of(
        Candidate(Arm("bf16", gradient_checkpointing=True, checkpointed_layers=4, length_multiple=64), 4), "cuda",
        (*fields, "activation_checkpointing"),
    )  # fmt: skip
    look = Look(("8 × 2 is another training than 16 × 1: it has other gradients",), "--batch-multiple 32 keeps it")
    looked_at = dataclasses.replace(
        plain, study=dataclasses.replace(plain.study, look=look), trials=(measured(plain, divides_loss=True),)
    )

    older = {**plain.environment, "packages": {**plain.environment["packages"], "transformers": "5.5.4"}}

    def of_script(report: Report, **source: Any) -> Export:
        workload = {**report.workload, "task": "own", "source": {**SOURCE, **source}}
        return make_export(dataclasses.replace(report, workload=workload))

    launched = {"variables": [["ACCELERATE_MIXED_PRECISION", "bf16"]]}
    by_arm = {precision: report_of(Candidate(Arm(precision), 8, 2), "cpu", ("bf16",)) for precision in ("fp32", "bf16")}
    exports = {
        "other model arguments": export_of(
            "cpu-adafactor-eager", fields, tiny_workload("bert-tiny", seq_len=32, dtype="bfloat16", padding=0.25)
        ),
        "one's own, tf32 unset": export_of("cuda-bf16", fields, own),
        "one's own, tf32": export_of("cuda-tf32", fields, own),
        "one's own, a variable": make_export(
            report_of(Candidate(Arm("bf16", expandable_segments=True), 4), "cuda", fields, own)
        ),
        "a launcher's precision that was not measured": of_script(by_arm["fp32"], **launched),
        "a launcher's precision that was measured": of_script(by_arm["bf16"], **launched),
        "packed rows": dataclasses.replace(packed, row_tokens=512),
        "applied settings": make_export(applied),
        "applied settings, a script": of_script(applied),
        "a look": make_export(looked_at),
        "a look, transformers 5.5": make_export(dataclasses.replace(looked_at, environment=older)),
        "another order": make_export(
            report_of(Candidate(Arm("bf16", train_sampling_strategy="group_by_length"), 4), "cuda", fields)
        ),
        "what transformers does itself": make_export(
            dataclasses.replace(stock, trials=(measured(stock, stock_settings=by_itself, divides_loss=True),))
        ),
    }
    cases = {name: beside_lines(export) for name, export in exports.items()}
    cases |= {f"{name}, python": render(exports[name], "python").splitlines() for name in exports}
    ranks = make_export(zero)
    zero.environment["packages"] = older["packages"]
    assert not make_export(zero).accelerate_divides, "DeepSpeed divides by itself"
    for form in ("json", "cli", "python", "env", "accelerate", "torchrun"):
        cases[f"ZeRO on two ranks, beside {form}"] = beside_lines(ranks, form)
    cases["ZeRO on two ranks, env"] = render(ranks, "env").splitlines()
    cases["ZeRO on two ranks, accelerate"] = render(ranks, "accelerate").splitlines()
    on_cpu = make_export(report_of(Candidate(Arm("bf16", strategy="ddp", ranks=2), 4), "cpu", fields))
    cases["two ranks on a CPU, accelerate"] = render(on_cpu, "accelerate").splitlines()
    check_messages("exports", cases)
