"""Test the reference against the code: generated pages, commands that parse, names that exist."""

import ast
import re
import shlex

import click
import pytest
import reference
from checkout import ROOT
from pages import blocks, commands, pages, read

from autotune.api import Result
from autotune.cli.main import cli
from autotune.core.candidate import Arm, Candidate
from autotune.space.training_arguments import training_arguments
from autotune.tuning.environment import _VARIABLE_PREFIXES, _VARIABLES

DOCUMENTED = sorted(
    {line for page in pages() for line in commands(page.read_text(encoding="utf-8")) if line.startswith("autotune ")}
)


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_the_generated_pages_are_those_of_the_code(name: str) -> None:
    """Write them anew with ``make docs-reference``."""
    assert read(f"reference/{name}") == reference.PAGES[name](), "make docs-reference writes the page anew"


@pytest.mark.parametrize("line", DOCUMENTED)
def test_commands_that_are_shown_parse(line: str) -> None:
    """Every option in a console block exists and takes such a value; nothing is run."""
    _, name, *words = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    command.make_context(name, words, **cli.context_settings)


def test_python_blocks_are_python() -> None:
    """Those that are not run by another test at least compile."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for block in [*blocks(text, "python"), *blocks(text, "py")]:
            if not block.startswith("def ") or ") -> " not in block:
                ast.parse(block)


def test_the_session_uses_what_a_result_has() -> None:
    (session,) = blocks(read("how-to/python.md"), "pycon")
    for line in session.splitlines():
        ast.parse(line.removeprefix(">>> "))
    used = set(re.findall(r"result\.(\w+)", session))
    assert used
    assert used <= set(dir(Result))


def test_the_variables_of_a_measurement_are_named() -> None:
    listed = read("reference/environment.md").split("## Variables that belong to a measurement")[1]
    single = {name for name in _VARIABLES if not name.startswith(_VARIABLE_PREFIXES)}
    assert set(re.findall(r"`([A-Z0-9_]+)`", listed)) == single | set(_VARIABLE_PREFIXES)


def test_the_variables_of_autotune_are_named() -> None:
    """Every name that begins with AUTOTUNE_."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "autotune").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\"(AUTOTUNE_[A-Z_]+)\"", text)}
    assert used == set(re.findall(r"`(AUTOTUNE_[A-Z_]+)`", read("reference/environment.md")))


@pytest.mark.parametrize("checkpointing", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_tuned_fields_are_named(checkpointing: str) -> None:
    """Every field that a trial is given stands on the page."""
    arm = Arm("bf16", True, "sdpa", "adamw_torch_fused", dataloader_num_workers=2, dataloader_prefetch_factor=4)
    fields = {checkpointing, "torch_compile", "use_liger_kernel"}
    given = training_arguments(Candidate(arm, 8, 2), fields, "cpu").keys() - {f"{checkpointing}_kwargs"}
    assert given <= set(re.findall(r"`(\w+)`", read("reference/training-arguments.md")))
