"""Command lines with placeholders: what is recognised, refused, filled, left out."""

import json
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
from messages import check_refusals

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.launch_command import without_launchers
from autotune.core.placeholders import Template, read_template
from autotune.core.training_source import find_script

ON = Candidate(Arm("bf16", gradient_checkpointing=True), 16, 4)
OFF = Candidate(Arm("fp32"), 8, 8)


def template(line: str) -> Template:
    return read_template(shlex.split(line), (), "/")


def filled(line: str, candidate: Candidate = ON) -> str:
    words, _ = template(line).fill(candidate, "/nowhere")
    return shlex.join(words)


@pytest.mark.parametrize(
    ("line", "on", "off"),
    [
        ("--batch-size {batch} --accum {accumulation}", "--batch-size 16 --accum 4", "--batch-size 8 --accum 8"),
        ("--batch_size={batch} total={effective_batch}", "--batch_size=16 total=64", "--batch_size=8 total=64"),
        ("-b{batch} --tokens {effective_tokens:128}", "-b16 --tokens 8192", "-b8 --tokens 8192"),
        ("--dtype '{precision:fp32=float32,bf16=bfloat16}'", "--dtype bfloat16", "--dtype float32"),
        ("--precision {precision}", "--precision bf16", "--precision fp32"),
        ("'{checkpointing:on=--grad-checkpointing}' -v", "--grad-checkpointing -v", "-v"),
        # Several words for one value, and the absence of an option for another.
        ("'{precision:bf16=--amp --amp-dtype bfloat16}' -v", "--amp --amp-dtype bfloat16 -v", "-v"),
        # An option whose value would be empty goes with it; a flag before options stays.
        ("-v --amp-dtype '{precision:fp32=,bf16=bfloat16}'", "-v --amp-dtype bfloat16", "-v"),
        ("amp={precision:fp32=,bf16=bf16} -v", "amp=bf16 -v", "-v"),
        ("--verbose '{checkpointing:on=--gc}'", "--verbose --gc", "--verbose"),
        ("--gc {checkpointing} --flag '{checkpointing:on=1,off=0}'", "--gc true --flag 1", "--gc false --flag 0"),
        # Other braces are the script's own.
        ("--json '{\"batch\": 1}' --name run-{now} {a,b}", "--json '{\"batch\": 1}' --name 'run-{now}' '{a,b}'", None),
    ],
)
def test_the_values_stand_in_place(line: str, on: str, off: str | None) -> None:
    assert filled(line) == on
    assert filled(line, OFF) == (on if off is None else off)


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("-v --batch-size {batch} --accum={accumulation} x", "-v x"),
        ("-b{batch} lr=1 batch={batch} '{checkpointing:on=--gc}'", "lr=1"),
        # What follows a placeholder without an option would take its place.
        ("train {batch} 3", None),
        ("--lr 1 size{batch}", None),
    ],
)
def test_its_own_defaults_are_those_without_the_options(line: str, own: str | None) -> None:
    words = template(line).own_words()
    assert (None if words is None else " ".join(words)) == own


TAKEN = """\
--dtype {precision:fp32=float32,bf16=bfloat16}
--dtype={precision:fp32=float32,bf16=bfloat16} -v
{checkpointing:on=--gc,off=--no-gc}
"""
WRONG = """\
{precision:f32=a}
{precision:bf16}
{checkpointing:yes=--gc}
{batch:8}
{effective_tokens:many}
'{precision:fp32=a}' '{precision:bf16=b}'
"""


def test_messages_of_placeholders_that_are_refused() -> None:
    cases = {line: partial(template, line) for line in WRONG.splitlines()}
    for line in TAKEN.splitlines():
        expanded = subprocess.check_output(["bash", "-c", f"echo {line}"], text=True)
        cases[f"braces that a shell took of {line}"] = partial(template, expanded)
    check_refusals("placeholders", cases)


def test_the_precisions_are_those_that_have_a_name() -> None:
    assert template("--dtype {precision}").precisions is None
    assert template("'{precision:bf16=bfloat16,fp32=float32}'").precisions == ("fp32", "bf16")
    assert template("'{precision:bf16=--amp}'").precisions == ("fp32", "bf16")
    both = "'{precision:fp16=--amp,bf16=--amp}' --amp-dtype '{precision:fp16=float16,bf16=bfloat16,fp32=}'"
    assert template(both).precisions == ("fp32", "fp16", "bf16")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", "batch: {batch}\ndtype: '{precision:fp32=float,bf16=bf16}'\n", "batch: 16\ndtype: 'bf16'\n"),
        ("c.toml", "batch = {batch}\n[other]\nx = {{}}\n", "batch = 16\n[other]\nx = {{}}\n"),
        ("c.json", '{"batch": {batch}, "gc": {checkpointing}}', '{"batch": 16, "gc": true}'),
        ("c.py", "batch = {batch}\nprint(f'{batch}')\n", "batch = 16\nprint(f'{batch}')\n"),
    ],
)
def test_a_configuration_file_is_copied_with_the_values(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "plain.yaml").write_text("a: 1")
    for words in ([name, "plain.yaml"], [f"--config={name}", "plain.yaml"]):
        found = read_template(words, (), str(tmp_path))
        assert found.files == (str(tmp_path / name),)
        assert "batch" in found.names
        assert found.own_words() is None
        (word, other), _ = found.fill(ON, str(tmp_path / "copies"))
        assert other == "plain.yaml"
        assert Path(word.rpartition("=")[2]).read_text() == expected
    assert (tmp_path / name).read_text() == text


def test_another_configuration_is_another_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    Path("c.json").write_text(json.dumps({"batch": "{batch}", "lr": 1}))
    words = ["python", "train.py", "--config", "c.json"]
    before = find_script(words)
    Path("c.json").write_text(json.dumps({"batch": "{batch}", "lr": 2}))
    assert find_script(words).digest != before.digest
    assert before.as_it_is_now().digest == find_script(words).digest


def test_variables_of_the_environment_may_have_placeholders() -> None:
    for words in (["BATCH={batch}", "python", "t.py"], ["env", "BATCH={batch}", "python", "t.py"]):
        launched = without_launchers(words)
        assert (launched.words, launched.variables) == (("t.py",), (("BATCH", "{batch}"),))
    assert read_template((), launched.variables, "/").fill(ON, "/nowhere") == ((), {"BATCH": "16"})
    with pytest.raises(InvalidRequestError, match="begins with a variable"):
        without_launchers(["OMP_NUM_THREADS=1", "python", "t.py", "{batch}"])
