"""Test optional features, such as expandable segments and pinning to one core, from the command line to the export."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from histories import history_of, ran_out
from hypothesis import given
from hypothesis import strategies as st
from messages import check_refusals
from recorded import ComputedRunner, measurement, run_policy
from reported import OLD_FIELDS, report_of
from searching import BERT_LARGE, ceiling_of, new_store, prepared, request, search
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.inspection import ModelFacts
from autotune.core.outcome import Completed
from autotune.core.units import GIB
from autotune.devices.cores import can_pin
from autotune.devices.listing import find_device
from autotune.estimate.history import History
from autotune.results.export import Export, beside_lines, make_export, render
from autotune.results.warnings import compiled_notes
from autotune.space.arms import packages_of, why_unpredictable
from autotune.space.features import (
    EXTRAS,
    allocator_settings,
    allocator_variable,
    how_to_add,
    is_compatible,
    optim_package,
    require_compiler,
    segments_expand,
    version_of,
    with_expandable_segments,
)
from autotune.space.space import Batches, Space, choose_arms
from autotune.store.repository import Store
from autotune.tuning.allowed import check_request
from autotune.tuning.optuna_study import candidate_of, distributions, params_of
from autotune.tuning.policy import Acquisition
from autotune.tuning.strategies import training_state_bytes

PLAIN = Arm("bf16")
EXPANDING = Arm("bf16", expandable_segments=True)
# What a batch needs beyond what it allocates: a tenth with the default allocator.
FRAGMENTED = 1.1


def expanding_arms() -> tuple[Arm, ...]:
    return choose_arms(
        ("bf16", "tf32"), "auto", ("sdpa",), ("sgd",), model_checkpoints=True, expandable_segments="auto"
    )


class TestSettings:
    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            ({}, {}),
            ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"expandable_segments": "True"}),
            ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, b:2", "PYTORCH_ALLOC_CONF": "a:3"}, {"a": "1", "b": "2"}),
            (
                {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],a:1"},
                {"roundup_power2_divisions": "[256:1,512:2]", "a": "1"},
            ),
        ],
    )
    def test_are_read_as_torch_reads_them(self, environment: dict[str, str], expected: dict[str, str]) -> None:
        assert allocator_settings(environment) == expected

    @pytest.mark.parametrize("expand", [True, False])
    @given(
        others=st.dictionaries(st.sampled_from(["max_split_size_mb", "garbage_collection_threshold"]), st.just("8")),
        before=st.sampled_from([None, "True", "False"]),
    )
    def test_ours_is_put_over_the_environments_and_the_others_stay(
        self, expand: bool, others: dict[str, str], before: str | None
    ) -> None:
        settings = {**others, **({"expandable_segments": before} if before else {})}
        environment = {"PYTORCH_ALLOC_CONF": ",".join(f"{name}:{value}" for name, value in settings.items())}
        text = with_expandable_segments(environment, expand=expand)
        if text is None:
            assert not expand
            assert before is None
        else:
            assert allocator_settings({"PYTORCH_ALLOC_CONF": text}) == {**others, "expandable_segments": str(expand)}
            assert segments_expand({"PYTORCH_ALLOC_CONF": text}) is expand

    @pytest.mark.parametrize(
        ("version", "name"),
        [("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"), ("2.9.0", "PYTORCH_ALLOC_CONF"), ("2.13.0+cu130", "PYTORCH_ALLOC_CONF")],
    )
    def test_the_variable_bears_the_name_of_its_time(self, version: str, name: str) -> None:
        assert allocator_variable(version) == name


class TestWhatIsTried:
    def test_arms_whose_segments_expand_come_last(self) -> None:
        assert [arm.expandable_segments for arm in expanding_arms()] == [False] * 4 + [True] * 4

    def test_only_an_answer_that_was_asked_for_is_recorded(self) -> None:
        assert "expandable_segments" not in request().document()
        assert request(expandable_segments="auto").document()["expandable_segments"] == "auto"

    def searched(self, line_bytes: int, step_seconds: Any = None) -> History:
        """A search at effective batch 64 where a sample takes 1 GiB and fragmentation a tenth of that."""
        space = Space(expanding_arms(), Batches(64))
        runner = ComputedRunner(
            lambda c: (
                c.per_device_train_batch_size
                * GIB
                * (0.5 if c.arm.gradient_checkpointing else 1)
                * (1 if c.arm.expandable_segments else FRAGMENTED)
            ),
            step_seconds or (lambda c: c.gradient_accumulation_steps * (0.1 + 0.01 * c.per_device_train_batch_size)),
            lambda c: 0.95,
        )
        return run_policy(Acquisition(space), runner, History(ceiling_of(line_bytes, headroom=0)))

    def test_they_win_where_memory_kept_the_best_from_a_larger_batch(self) -> None:
        history = self.searched(33 * GIB, lambda c: c.gradient_accumulation_steps * (
            0.1 + (0.05 if c.arm.gradient_checkpointing else 0.01) * c.per_device_train_batch_size
        ))  # fmt: skip
        winner = history.winner()
        assert winner.candidate.arm.expandable_segments
        assert winner.candidate.per_device_train_batch_size == 32
        assert sum(tried.candidate.arm.expandable_segments for tried in history.tried) <= 2

    def test_they_are_not_asked_for_where_there_is_room(self) -> None:
        history = self.searched(100 * GIB)
        assert not any(tried.candidate.arm.expandable_segments for tried in history.tried)


class TestMemory:
    def test_running_out_rules_out_the_default_allocator_and_not_the_other_way_round(self) -> None:
        assert history_of(ran_out(EXPANDING, 32)).ruled_out_by(Candidate(PLAIN, 32)) is not None
        assert history_of(ran_out(PLAIN, 32)).ruled_out_by(Candidate(EXPANDING, 32)) is None

    def test_a_trial_may_reserve_the_line_and_is_judged_by_having_run(self, tmp_path: Path) -> None:
        """What it reserved may read too high, even above the line."""
        given_ = prepared(
            expandable_segments="on", precisions=("bf16",), gradient_checkpointing="off", measure_baseline=False
        )
        line = given_.ceiling.line_bytes
        fits = given_.space.candidate(EXPANDING, 32)
        runner = ComputedRunner(lambda c: 2 * line)
        runner.faults = {fits: [Completed(measurement(fits, 0.1, line - 1, int(line * 1.17)))]}
        for batch in (8, 16):
            smaller = given_.space.candidate(EXPANDING, batch)
            runner.faults[smaller] = [Completed(measurement(smaller, 1.0, line // 2, line // 2))]
        with new_store(tmp_path) as store:
            run = search(store, runner, given=given_)
        assert {job.cap_bytes for job in runner.jobs} == {line}
        assert run.best.candidate == fits


class TestPackages:
    @pytest.mark.parametrize(
        ("optim", "package"),
        [
            ("adamw_torch", None),
            ("adamw_torch_fused", None),
            ("adafactor", None),
            ("rmsprop", None),
            ("sgd", None),
            ("adamw_torch_8bit", "torchao"),
            ("adamw_torch_4bit", "torchao"),
            ("adamw_bnb_8bit", "bitsandbytes"),
            ("paged_adamw_8bit", "bitsandbytes"),
            ("rmsprop_bnb", "bitsandbytes"),
            ("galore_adamw_8bit", "galore-torch"),
        ],
    )
    def test_every_optimizer_names_what_it_needs(self, optim: str, package: str | None) -> None:
        assert optim_package(optim) == package

    def test_every_optimizer_that_transformers_gets_elsewhere_is_known(self) -> None:
        from transformers import trainer_optimizer as theirs

        for names, package in (
            (theirs._BITSANDBYTES_OPTIMIZERS, "bitsandbytes"),
            (theirs._TORCHAO_OPTIMIZERS, "torchao"),
        ):
            assert {optim_package(name.value) for name in names} == {package}
        own = ("ADAMW_TORCH", "ADAMW_TORCH_FUSED", "ADAFACTOR", "SGD", "ADAGRAD", "RMSPROP")
        assert {optim_package(theirs.OptimizerNames[name].value) for name in own} == {None}

    def test_what_is_not_installed_is_refused_with_its_extra(self) -> None:
        if version_of("bitsandbytes") is not None:
            pytest.skip("bitsandbytes is installed here")
        with pytest.raises(InvalidRequestError) as caught:
            check_request(request(optims=("adamw_bnb_8bit",)))
        assert "bitsandbytes, which is not installed" in caught.value.message
        assert caught.value.hint == how_to_add("bitsandbytes")

    def test_every_extra_that_is_named_is_there(self) -> None:
        extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        for package, extra in EXTRAS.items():
            assert extras["optional-dependencies"][extra][0].startswith(package)

    def test_flash_attention_goes_with_16_bits_alone(self) -> None:
        flash = Arm("tf32", attn_implementation="flash_attention_2")
        assert not is_compatible(flash, "float32")
        assert is_compatible(flash, "bfloat16")
        assert is_compatible(replace(flash, precision="bf16"), "float32")
        assert is_compatible(Arm("tf32"), "float32")

    def test_only_what_is_measured_with_a_package_depends_on_its_version(self) -> None:
        assert packages_of(PLAIN) == ()
        assert prepared().environment["packages"] == {"torch": "2.13.0", "transformers": "5.23.0"}


class TestCompiling:
    def test_the_winner_alone_is_compiled_and_at_the_end(self, store: Store) -> None:
        """Compiling saves a fifth of a step's time, and takes a tenth more memory."""
        runner = ComputedRunner(
            lambda c: c.per_device_train_batch_size * GIB * (1.1 if c.arm.torch_compile else 1.0) / 2,
            lambda c: (
                c.gradient_accumulation_steps
                * (0.2 + 0.01 * c.per_device_train_batch_size)
                * (0.8 if c.arm.torch_compile else 1)
                * (2 if c.arm.precision == "tf32" else 1)
            ),
        )
        options = {"torch_compile": "auto", "cuda_graphs": "off", "search_effort": "default"}
        run = search(store, runner, precisions=("bf16", "tf32"), **options)
        compiled = [c.arm.torch_compile for c in runner.candidates]
        # A larger batch that did not fit may fit compiled, which keeps less.
        assert 1 <= compiled.count(True) <= 2
        assert compiled[-1]
        assert run.best.candidate.arm.torch_compile
        assert run.best.candidate.per_device_train_batch_size == 32
        assert runner.jobs[-1].effort.max_micro_steps == run.best.candidate.gradient_accumulation_steps

    def test_the_report_says_when_it_pays(self) -> None:
        plain, compiled = Candidate(PLAIN, 32, 2), Candidate(Arm("bf16", torch_compile=True), 32, 2)
        # 0.1 s a step, 40 s to compile.
        outcomes = [
            (plain, Completed(measurement(plain, 1.0, GIB, GIB))),
            (compiled, Completed(replace(measurement(compiled, 0.9, GIB, GIB), compile_seconds=40.0))),
        ]
        report = report_of(plain, "cuda", OLD_FIELDS)
        trials = tuple(replace(report.trials[0], candidate=c, outcome=o) for c, o in outcomes)
        (note,) = compiled_notes(replace(report, trials=trials))
        assert "takes 40.0 s to compile" in note
        assert "pays off after 401 optimizer steps" in note or "pays off after 400 optimizer steps" in note

    def test_predictions_are_not_asked_of_what_compiles(self) -> None:
        assert not why_unpredictable(PLAIN, BERT_LARGE)
        assert why_unpredictable(replace(PLAIN, torch_compile=True), BERT_LARGE)
        assert not why_unpredictable(Arm(optim="adamw_bnb_8bit"), BERT_LARGE)
        assert why_unpredictable(Arm(optim="ademamix_8bit"), BERT_LARGE)
        assert not why_unpredictable(Arm(optim="adafactor"), BERT_LARGE)
        quantized = replace(BERT_LARGE, dtype="bfloat16", peft="lora", lora_rank=8, quantize="4bit")
        assert not why_unpredictable(PLAIN, quantized)
        assert why_unpredictable(PLAIN, replace(quantized, lora_options={"use_dora": True}))


class TestAdapters:
    LORA = replace(BERT_LARGE, peft="lora", lora_rank=16)

    def test_adapters_need_less_than_training_everything(self) -> None:
        model = ModelFacts("Model", 10**9, 10**6, ("sdpa",))
        least = training_state_bytes(replace(request(), workload=self.LORA), model)
        assert least == 4 * 10**6 * 4 + (10**9 - 10**6) * 4
        quantized = replace(self.LORA, dtype="bfloat16", quantize="4bit")
        assert training_state_bytes(replace(request(), workload=quantized), model) < least / 7

    def test_the_export_says_how_to_put_them_on(self) -> None:
        workload = replace(tiny_workload("bert-tiny"), peft="lora", lora_rank=8, quantize="4bit")
        export = make_export(report_of(Candidate(PLAIN, 8), "cuda", OLD_FIELDS, workload))
        beside = " ".join(beside_lines(export))
        assert "load_in_4bit=True" in beside
        assert "LoraConfig(r=8, lora_alpha=16, target_modules='all-linear', task_type='SEQ_CLS')" in beside
        compile(render(export, "python"), "export.py", "exec")
        assert "get_peft_model(model" in render(export, "python")
        assert not [name for name in export.arguments if "lora" in name or "bit" in name]


class TestExport:
    EXPORT = make_export(report_of(Candidate(EXPANDING, 32, 2), "cuda", OLD_FIELDS))

    def test_the_variable_is_said_beside_them_and_in_every_form_that_can(self) -> None:
        setting = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        assert any(setting in line for line in beside_lines(self.EXPORT))
        assert render(self.EXPORT, "env") == setting + "\n"
        assert setting in render(self.EXPORT, "yaml")
        python = render(self.EXPORT, "python")
        assert python.index("os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'") < python.index(
            "import torch"
        )

    def test_nothing_is_said_where_nothing_need_be_set(self) -> None:
        assert render(make_export(report_of(Candidate(PLAIN, 32, 2), "cuda", OLD_FIELDS)), "env") == ""


@pytest.mark.parametrize(("kind", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_compiling_is_refused_where_there_is_no_compiler(
    kind: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequestError, match=r"--lever torch_compile=on needs a compiler: there is no g"):
        require_compiler(kind, "--lever torch_compile=on")
    monkeypatch.setenv(variable, str(compiler))
    require_compiler(kind, "--lever torch_compile=on")
    monkeypatch.setenv(variable, "/missing/c++")
    with pytest.raises(InvalidRequestError, match=f"{variable} is /missing/c\\+\\+, which is not there"):
        require_compiler(kind, "--lever torch_compile=on")


PINNED = Arm("bf16", cpu_affinity=True)
LOADING = Arm("bf16", dataloader_num_workers=2, cpu_affinity=True)


class TestRequest:
    def test_auto_is_the_default_and_not_recorded(self) -> None:
        assert request().cpu_affinity == "auto"
        assert "cpu_affinity" not in request().document()
        assert request(cpu_affinity="off").document()["cpu_affinity"] == "off"
        assert request(cpu_affinity="on").document()["cpu_affinity"] == "on"

    @pytest.mark.parametrize(
        ("options", "pins"),
        [
            ({}, "auto"),
            ({"cpu_affinity": "on"}, "on"),
            ({"cpu_affinity": "off"}, "off"),
            ({"world_size": 2}, "off"),
            ({"objective": "max-batch"}, "off"),
        ],
    )
    def test_what_is_really_tried(self, options: dict[str, object], pins: str) -> None:
        assert request(**options).pins == pins

    def test_messages_of_refused_features(self) -> None:
        on_cpu = dataclasses.replace(request(), device=find_device("cpu"), memory_limit_bytes=None)
        assert on_cpu.pins == "off"
        asked = {
            "expandable segments of a CPU": replace(on_cpu, expandable_segments="on"),
            "Liger on a CPU": replace(on_cpu, liger="on"),
            "4 bits without adapters": request(workload=replace(BERT_LARGE, quantize="4bit")),
            "one core of a CPU": replace(on_cpu, cpu_affinity="on"),
            "cores for two processes": request(cpu_affinity="on", world_size=2),
        }
        check_refusals("features", {name: partial(check_request, each) for name, each in asked.items()})


class TestSpace:
    def test_auto_leaves_the_arms_as_they_are_and_lets_the_winner_be_pinned(self) -> None:
        space = prepared().space
        assert not any(arm.cpu_affinity for arm in space.arms)
        assert space.contains(space.candidate(PINNED, 32))
        assert space.contains(space.candidate(dataclasses.replace(PINNED, dataloader_num_workers=2), 32))

    def test_on_pins_every_arm(self) -> None:
        space = prepared(cpu_affinity="on").space
        assert all(arm.cpu_affinity for arm in space.arms)
        assert not space.contains(space.candidate(PLAIN, 32))

    def test_off_never_does(self) -> None:
        space = prepared(cpu_affinity="off").space
        assert not space.contains(space.candidate(PINNED, 32))

    def test_it_is_optunas_parameter_where_arms_differ_in_it(self) -> None:
        for choice, is_parameter in (("auto", False), ("off", False), ("on", True)):
            given = prepared(cpu_affinity=choice)
            assert ("cpu_affinity" in distributions(given.space, given.baseline, "tpe")) is is_parameter
        candidate = given.space.candidate(PINNED, 32)
        names = distributions(given.space, given.baseline, "tpe")
        assert candidate_of(params_of(candidate, names), given.space) == candidate


def export_of(arm: Arm, core: int | None = 3) -> Export:
    report = report_of(Candidate(arm, 8), "cuda", OLD_FIELDS)
    trial = report.trials[0]
    measured = dataclasses.replace(trial.outcome.measurement, cpu_core=core)
    trial = dataclasses.replace(trial, outcome=Completed(measured))
    return make_export(dataclasses.replace(report, trials=(trial,)))


class TestExportCpuAffinity:
    def test_the_arguments_say_nothing_of_it(self) -> None:
        assert export_of(PINNED).arguments == export_of(PLAIN, None).arguments
        assert not [name for name in export_of(PINNED).arguments if "affinity" in name or "core" in name]

    def test_the_command_is_started_on_that_core(self) -> None:
        assert any("taskset -c 3 " in line for line in beside_lines(export_of(PINNED)))
        assert "# put taskset -c 3 before" in render(export_of(PINNED), "yaml")
        assert not any("taskset" in line for line in beside_lines(export_of(PLAIN, None)))

    def test_loading_processes_are_not_pinned(self) -> None:
        (line,) = (line for line in beside_lines(export_of(LOADING)) if "taskset" in line)
        assert "--format python" in line
        assert "taskset -c" not in line

    def test_the_python_form_pins_itself_before_torch_is_imported(self) -> None:
        text = render(export_of(PINNED), "python")
        assert text.index("os.sched_setaffinity(0, {3})") < text.index("import torch")
        assert "os.sched" not in render(export_of(PLAIN, None), "python")

    @pytest.mark.skipif(not can_pin(), reason="this system cannot pin")
    def test_its_lines_pin_the_process_and_free_what_is_forked(self, tmp_path: Path) -> None:
        core = max(os.sched_getaffinity(0))
        lines = render(export_of(LOADING, core), "python").partition("import torch")[0]
        script = tmp_path / "train.py"
        script.write_text(
            lines
            + "import json, multiprocessing\n"
            + "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
            + "    child = pool.apply(os.sched_getaffinity, (0,))\n"
            + "print(json.dumps([sorted(os.sched_getaffinity(0)), sorted(child)]))\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True)
        assert json.loads(done.stdout) == [[core], sorted(os.sched_getaffinity(0))]
