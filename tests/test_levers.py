"""Levers beside the fields of ``TrainingArguments``: the allocator's segments, from the command line to the export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import ComputedRunner, measurement, out_of_memory, run_policy
from searching import ceiling_of, new_store, prepared, request, search
from test_export import OLD_FIELDS, report_of
from test_history import history_of, ran_out

from autotune.device import find_device
from autotune.errors import DeviceError
from autotune.export import beside_lines, make_export, render
from autotune.history import History
from autotune.levers import allocator_settings, allocator_variable, segments_expand, with_expandable_segments
from autotune.memory import prediction_class
from autotune.policy import ThroughputPolicy
from autotune.space import Batches, Space, choose_arms
from autotune.trial import Arm, Candidate, Completed
from autotune.units import GIB

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
        [
            ("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"),
            ("2.9.0", "PYTORCH_ALLOC_CONF"),
            ("2.13.0+cu130", "PYTORCH_ALLOC_CONF"),
        ],
    )
    def test_the_variable_bears_the_name_of_its_time(self, version: str, name: str) -> None:
        assert allocator_variable(version) == name


class TestWhatIsTried:
    def test_arms_whose_segments_expand_come_last(self) -> None:
        assert [arm.expandable_segments for arm in expanding_arms()] == [False] * 4 + [True] * 4

    def test_a_cpu_has_no_such_lever(self) -> None:
        with pytest.raises(DeviceError, match="no segments"):
            replace(request(expandable_segments="on"), device=find_device("cpu")).check()

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
        )
        return run_policy(ThroughputPolicy(space), runner, History(ceiling_of(line_bytes, headroom=0)))

    def test_they_win_where_memory_kept_the_best_from_a_larger_batch(self) -> None:
        history = self.searched(33 * GIB, lambda c: c.gradient_accumulation_steps * (
            0.1 + (0.05 if c.arm.gradient_checkpointing else 0.01) * c.per_device_train_batch_size
        ))  # fmt: skip
        winner = history.winner()
        assert winner is not None
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

    def test_both_allocate_the_same(self) -> None:
        assert prediction_class(PLAIN) == prediction_class(EXPANDING)

    def test_a_trial_may_reserve_the_line_and_is_judged_by_having_run(self, tmp_path: Path) -> None:
        """What it reserved may read too high, even above the line."""
        given_ = prepared(
            expandable_segments="on", precisions=("bf16",), gradient_checkpointing="off", measure_baseline=False
        )
        line = given_.ceiling.line_bytes
        fits = given_.space.candidate(EXPANDING, 32)
        runner = ComputedRunner(lambda c: 2 * line)
        runner.faults = {
            given_.space.candidate(EXPANDING, batch): [out_of_memory(line)] for batch in (8, 16, 64)
        } | {fits: [Completed(measurement(fits, 0.1, line - 1, int(line * 1.17)))]}  # fmt: skip
        with new_store(tmp_path) as store:
            run = search(store, runner, given=given_)
        assert {job.cap_bytes for job in runner.jobs} == {line}
        assert run.best.candidate == fits


class TestExport:
    EXPORT = make_export(report_of(Candidate(EXPANDING, 32, 2), "cuda", OLD_FIELDS))

    def test_the_arguments_hold_fields_of_the_trainer_alone(self) -> None:
        assert not [name for name in self.EXPORT.arguments if "segments" in name]

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
