"""Test the help of the command line, and how fast it is shown."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import Run, environment

from autotune import __version__
from autotune.cli.main import cli, exit_codes
from autotune.cli.search import search
from autotune.core import errors


def every_command(group: click.Group, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of each command, those of groups within among them."""
    for name in group.list_commands(click.Context(group)):
        yield (*words, name)
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from every_command(command, *words, name)


HEAVY = {
    *("torch", "transformers", "datasets", "accelerate", "optuna", "sqlalchemy", "alembic", "rich", "pynvml", "numpy"),
    *("msgspec", "fastapi", "uvicorn"),
}


def modules_after(code: str, folder: Path) -> set[str]:
    """The top-level modules that a child has imported at the end of ``code``."""
    program = f"import sys\n{code}\nprint(*sorted(m.partition('.')[0] for m in sys.modules), file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.split())


def runs_of(*arguments: str) -> str:
    """A program that runs a command and survives its exit."""
    return f"from autotune.cli.main import main\ntry:\n    main({list(arguments)!r})\nexcept SystemExit:\n    pass\n"


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = runs_of("--help") + runs_of("search", "--help") + runs_of("--version")
    assert not modules_after(code, tmp_path) & HEAVY


def test_commands_that_only_look_import_no_torch_and_no_database(tmp_path: Path) -> None:
    """``pynvml`` may be there, to ask for GPUs."""
    code = runs_of("devices") + runs_of("models") + runs_of("search", "--model", "bert-tiny", "--trials", "0")
    assert not modules_after(code, tmp_path) & (HEAVY - {"pynvml"})


def test_the_controlling_process_never_imports_torch(tmp_path: Path) -> None:
    """Everything that a search, a report or an export needs on this side, imported."""
    code = "import autotune.cli.search, autotune.cli.studies, autotune.cli.view, autotune.tuning.run\n"
    code += "import autotune.results.export, autotune.results.dashboard"
    assert not modules_after(code, tmp_path) & {"torch", "transformers", "datasets", "accelerate"}


@pytest.mark.parametrize("words", list(every_command(cli)), ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(words: tuple[str, ...], option: str, run: Run) -> None:
    ran = run(*words, option)
    assert ran.code == 0
    assert ran.stdout.startswith(f"Usage: autotune {' '.join(words)}")
    assert "--help" in ran.stdout
    assert not ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= 100


def test_no_command_shows_the_help(run: Run) -> None:
    ran = run()
    assert ran.code == 0
    assert ran.stdout == run("--help").stdout


def test_version(run: Run) -> None:
    assert run("--version").stdout.split()[-1] == __version__


def test_every_option_of_search_stands_under_one_heading() -> None:
    """An option that is forgotten there would not be shown at all, or twice."""
    named = [name for names in search.sections.values() for name in names]
    options = {str(param.name) for param in search.params if isinstance(param, click.Option)}
    assert sorted(named) == sorted(options - {"help_all"})


def test_help_has_the_usual_options_and_where_to_find_the_others(run: Run) -> None:
    usual = run("search", "--help").stdout
    assert len(usual.splitlines()) <= 60
    assert "--lever NAME[=VALUE]" in usual
    assert "fused_loss=auto|on|off" in run("search", "--help-all").stdout
    assert {"--model", "--effective-batch", "--help-all"} <= set(usual.split())
    assert "--batch-multiple" not in usual
    assert "--batch-multiple" in run("search", "--help-all").stdout


def test_every_option_of_search_is_explained(run: Run) -> None:
    shown = run("search", "--help-all").stdout
    for param in search.params:
        if isinstance(param, click.Argument):
            assert param.name == "script"
            assert shown.startswith("Usage: autotune search [OPTIONS] [-- SCRIPT ...]\n")
            continue
        assert isinstance(param, click.Option)
        assert param.help, param.name
        assert (f"  {param.name}=" if param.hidden else param.opts[0]) in shown


def test_help_lists_every_exit_code(run: Run) -> None:
    shown = run("--help").stdout
    lines = shown[shown.index("Exit codes:") :].splitlines()[1:]
    listed = {int(line.split()[0]) for line in lines if line[2:3].isdigit()}
    assert listed == set(exit_codes())


def test_every_kind_of_error_has_an_exit_code_of_its_own() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AutotuneError)
    ]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(exit_codes())
    assert not set(codes) & {0, 130}


def test_no_line_of_the_list_of_commands_is_cut(run: Run) -> None:
    """click ends a line that is too long with three dots."""
    text = run("--help").stdout.partition("Commands:")[2]
    assert "..." not in text
    assert "``" not in text
