"""Test the translation of a candidate to fields of the installed ``TrainingArguments``."""

import pytest

from autotune.core.candidate import PRECISIONS, Arm, Candidate, Precision
from autotune.space.training_arguments import checkpointing_field, training_arguments

OLD = {"gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "fp16", "tf32", "optim", "use_cpu"}
NEW = OLD | {"activation_checkpointing", "activation_checkpointing_kwargs"}


@pytest.mark.parametrize(("fields", "name"), [(OLD, "gradient_checkpointing"), (NEW, "activation_checkpointing")])
def test_checkpointing_bears_the_name_of_its_time(fields: set[str], name: str) -> None:
    assert checkpointing_field(fields) == name
    on = training_arguments(Candidate(Arm(gradient_checkpointing=True), 8), fields, "cuda")
    assert on[name] is True
    assert on[f"{name}_kwargs"] == {"use_reentrant": False}
    offloaded = Arm(gradient_checkpointing=True, offload_activations=True)
    kwargs = training_arguments(Candidate(offloaded, 8), fields, "cuda")[f"{name}_kwargs"]
    assert kwargs == {"use_reentrant": False, "offload": True}
    off = training_arguments(Candidate(Arm(), 8), fields, "cuda")
    assert off[name] is False
    assert [key for key in off if "checkpointing" in key] == [name]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_said_and_so_is_what_it_is_not(precision: Precision) -> None:
    arguments = training_arguments(Candidate(Arm(precision), 8), NEW, "cuda")
    said = {name: arguments[name] for name in ("bf16", "fp16")}
    assert said == {name: name == precision for name in said}
    # Else the default of TrainingArguments: what stays in float32 beside an autocast keeps its precision.
    assert arguments["tf32"] is (True if precision == "tf32" else None)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("device_kind", "revision"), [("cuda", 1), ("cuda", 2), ("cpu", 3)])
def test_what_was_measured_without_tf32_is_exported_so(precision: Precision, device_kind: str, revision: int) -> None:
    arguments = training_arguments(Candidate(Arm(precision), 8), NEW, device_kind, revision)
    assert arguments["tf32"] is (precision == "tf32")


def test_a_compiled_fp32_stays_without_tf32() -> None:
    """TrainingArguments turns it on for compiled models where nothing is said."""
    assert training_arguments(Candidate(Arm("fp32", torch_compile=True), 8), NEW, "cuda")["tf32"] is False
    assert training_arguments(Candidate(Arm("bf16", torch_compile=True), 8), NEW, "cuda")["tf32"] is None


def test_levers_are_said_also_where_they_are_off() -> None:
    arguments = training_arguments(Candidate(Arm(torch_compile=True), 8), NEW, "cuda")
    assert arguments["torch_compile"] is True
    assert arguments["use_liger_kernel"] is False


def test_only_a_cpu_is_asked_for() -> None:
    assert training_arguments(Candidate(Arm(), 8), NEW, "cpu")["use_cpu"] is True
    assert "use_cpu" not in training_arguments(Candidate(Arm(), 8), NEW, "cuda")
