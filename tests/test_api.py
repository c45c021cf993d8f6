"""Test the Python function: a light import, the options of the command, and a result that trains."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from checkout import ROOT
from messages import check_refusals

from autotune import api
from autotune.core.errors import AutotuneError, UnknownModelError, UnknownStudyError
from autotune.models.resolve import resolve_model
from autotune.space.features import how_to_add

BUILD = ROOT / "tests/own_code/build_trainer.py"
HEAVY = {"torch", "transformers", "datasets", "accelerate", "optuna", "sqlalchemy", "alembic", "rich", "numpy", "click"}

# No guard around what runs, a thread that is not the main one, as a notebook has it.
SEARCH = """
import json, os, sys, threading
import autotune.tuning.loop
import autotune
found = []
def work():
    found.append(autotune.search(model="bert-tiny", effective_batch=8, seq_len=16, device="cpu", trials=2,
                                 headroom="5%", time_budget="5m", study="mine", storage="mine.db"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
imported = sorted({name.partition(".")[0] for name in sys.modules})
"""
SCRIPT = (
    SEARCH
    + """
result = found[0]
arguments = result.training_arguments(output_dir="out", learning_rate=1e-4)
print(json.dumps({
    "text": str(result), "study": result.study, "speedup": result.speedup,
    "best": result.best.candidate.parameters(), "best_speed": result.best.measurement.samples_per_second,
    "baseline": result.baseline.candidate.parameters(), "feasible": result.best.feasible,
    "arguments": result.arguments, "model_arguments": result.model_arguments,
    "columns": list(result.trials.columns), "rows": len(result.trials), "records": result.records,
    "made": [type(arguments).__name__, arguments.output_dir, arguments.learning_rate,
             arguments.per_device_train_batch_size, arguments.bf16],
    "again": autotune.load("mine", storage="mine.db").document() == result.document(),
    "elsewhere": os.chdir("/") or autotune.load("mine", storage=result.storage).document() == result.document(),
}))
"""
)


def run_python(code: str, folder: Path, *, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own; ``cold`` starts it as users do, see ``warm``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with warm.cold(cold):
        return warm.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
        )


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.whole)], ids=["warm", "cold"])
def printed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the script above prints."""
    ended = run_python(SCRIPT, tmp_path_factory.mktemp("api"), cold=request.param)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    assert "study   mine\n" in ended.stderr
    return document


def test_importing_it_imports_nothing(tmp_path: Path) -> None:
    ended = run_python("import autotune, sys; print(dir(autotune), *sys.modules, sep='\\n')", tmp_path, cold=True)
    names, *modules = ended.stdout.splitlines()
    assert "'search'" in names
    assert "'Result'" in names
    assert not {module.partition(".")[0] for module in modules} & HEAVY
    assert not [module for module in modules if module.startswith("autotune.")]


def test_a_search_imports_no_torch(tmp_path: Path) -> None:
    """Only ``training_arguments`` does. Its trials answer from a formula, and are processes all the same."""
    interpreter = tmp_path / "python"
    stand_in = ROOT / "tests" / "faults" / "stand_in.py"
    path = f'PYTHONPATH="{ROOT / "tests"}:$PYTHONPATH"'
    interpreter.write_text(f'#!/bin/sh\nshift 3\n{path} exec "{sys.executable}" "{stand_in}" "$@"\n')
    interpreter.chmod(0o755)
    code = f"import os, sys; sys.executable = {str(interpreter)!r}; os.environ['FAULTS_FOLDER'] = {str(tmp_path)!r}"
    ended = run_python(code + SEARCH + "print(*imported, len(found[0].trials))", tmp_path, cold=True)
    assert ended.returncode == 0, ended.stderr
    *imported, trials = ended.stdout.split()
    assert int(trials) == len((tmp_path / "runs").read_text().splitlines()) == 2
    assert {"autotune", "optuna"} <= set(imported)
    assert not set(imported) & {"torch", "transformers", "accelerate", "click", "rich"}


def test_the_result_tells_what_was_found(printed: dict[str, Any]) -> None:
    assert printed["text"].startswith("Best: per-device batch ")
    assert printed["best"]["per_device_train_batch_size"] * printed["best"]["gradient_accumulation_steps"] == 8
    assert printed["best_speed"] > 0
    assert printed["feasible"] is True
    assert printed["baseline"]["per_device_train_batch_size"] == 8
    assert printed["speedup"] > 0
    assert printed["rows"] == len(printed["records"]) == 2
    assert set(printed["columns"]) == set(printed["records"][0])
    assert printed["again"] is True


def test_the_result_makes_training_arguments(printed: dict[str, Any]) -> None:
    batch = printed["best"]["per_device_train_batch_size"]
    assert printed["made"] == ["TrainingArguments", "out", 1e-4, batch, printed["best"]["precision"] == "bf16"]
    assert printed["arguments"]["per_device_train_batch_size"] == batch
    assert printed["model_arguments"]["dtype"] == "float32"


BAD_VALUES: list[dict[str, Any]] = [
    {"objective": "speed"}, {"sampler": "best"}, {"effective_batch": 0}, {"trials": True}, {"effective_batch": "64"},
    {"effective_batch": 64.0}, {"world_size": None}, {"padding": 1.0}, {"padding": None}, {"tolerance": [1]},
    {"time_budget": float("nan")}, {"memory_limit": 24}, {"memory_limit": True}, {"fresh": "no"}, {"split": 0},
    {"precision": [1]}, {"optim": []}, {"dtype": float}, {"progress": "yes"}, {"script": 5},
    {"script": ["train.py", "--epochs", 3]}, {"memory_limit": "24 bananas"}, {"time_budget": "soon"},
    {"headroom": "lots"}, {"study": "../up"}, {"model": {"hidden_size": 64}}, {"storage": None},
    # Trials are other processes.
    {"dataset": [{"text": "one", "label": 0}]}, {"dataset": {"text": ["one"], "label": [0]}},
    {"script": "python s/plain.py", "model": None}, {"script": Path("s/plain.py"), "model": None},
]  # fmt: skip


def test_messages_of_bad_values(tmp_path: Path) -> None:
    storage = tmp_path / "absent.db"
    usual = {"model": "bert-tiny", "device": "cpu", "storage": storage}
    cases: dict[str, Callable[[], object]] = {
        " ".join(f"{name}={value!r}" for name, value in options.items()): functools.partial(
            api.search, **{**usual, **options}
        )
        for options in BAD_VALUES
    }
    cases["an object as tokenizer"] = functools.partial(api.search, **usual, tokenizer=object())
    cases["load(None)"] = functools.partial(api.load, None, storage=storage)
    check_refusals("values", cases)
    assert not storage.exists()


class AskedError(Exception):
    """Stands for a search that would begin; its arguments are the request and the storage."""


Ask = Callable[..., tuple[Any, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """A function that returns request and storage of the search that would begin on the CPU."""

    def begin(request: Any, storage: str, *_: Any, **__: Any) -> None:
        raise AskedError(request, storage)

    def ask(*words: Any, **options: Any) -> tuple[Any, str]:
        with pytest.raises(AskedError) as asked:
            api.search(*words, device="cpu", **options)
        request, storage = asked.value.args
        return request, storage

    monkeypatch.setattr(api, "run_search", begin)
    return ask


def test_paths_are_taken_wherever_text_is(ask: Ask, tmp_path: Path) -> None:
    """Model, data, tokenizer, storage; a script's words, a trainer's file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(resolve_model("bert-tiny").config))
    (data := tmp_path / "rows.jsonl").write_text('{"text": "one", "label": 0}\n')
    request, storage = ask(model, 8, dataset=data, tokenizer=model, storage=tmp_path / "a.db")
    assert (request.workload.model, storage) == (str(model), str(tmp_path / "a.db"))
    assert (request.workload.data.source, request.workload.data.tokenizer) == (str(data), str(model))
    for own in ({"script": ["python", BUILD, Path("out")]}, {"trainer": BUILD}):
        source = ask(effective_batch=8, **own)[0].workload.source
        assert source.file == str(BUILD)
        assert source.argv == (("out",) if "script" in own else ())


def test_numbers_are_what_they_are_on_the_command_line(ask: Ask) -> None:
    request, _ = ask("bert-tiny", np.int64(8), headroom=0.05, time_budget=90, tolerance="2%")
    assert type(request.effective_batch) is int
    assert (request.effective_batch, request.headroom.fraction) == (8, 0.05)
    assert (request.time_budget_seconds, request.tolerance) == (90.0, 0.02)


def build(overrides: dict[str, Any]) -> None:
    """A function of a file, as far as can be seen without calling it."""


def renamed(overrides: dict[str, Any]) -> None:
    """What is offered under this name is another."""


original, renamed = renamed, build  # type: ignore[assignment]


def test_a_trainer_may_be_a_function_of_a_file(ask: Ask) -> None:
    source = ask(effective_batch=8, trainer=build)[0].workload.source
    assert (source.kind, source.file, source.function) == ("build", str(Path(__file__).resolve()), "build")


def test_messages_of_functions_that_are_refused() -> None:
    """What an import of the file would not find: nested, nameless, of a notebook, hidden, no function."""

    def nested(overrides: dict[str, Any]) -> None:
        pass

    cell: dict[str, Any] = {}
    exec(compile("def build(overrides): pass", "/tmp/ipykernel_1/2.py", "exec"), cell)
    functions = {
        "nested": nested,
        "nameless": lambda overrides: None,
        "another of the name": original,
        "partial": functools.partial(build),
        "of a notebook": cell["build"],
        "of C": len,
        "no function": 3,
    }
    cases: dict[str, Callable[[], object]] = {
        name: functools.partial(api.search, effective_batch=8, trainer=function, device="cpu")
        for name, function in functions.items()
    }
    cases["verified with one's own code"] = functools.partial(
        api.search, effective_batch=8, trainer=BUILD, device="cpu", verify=True
    )
    check_refusals("functions", cases, Path(__file__).parent)


# The function and its search in one file, as a script has them.
OWN = """
import sys
sys.path.insert(0, {folder!r})
import autotune
from build_trainer import build as other
def build(overrides):
    return other(overrides)
{guard}
    print(repr(autotune.search(effective_batch=8, trainer=build, device="cpu", trials=1, storage="own.db")))
"""


def test_a_function_is_trained_with_and_searches_only_once(tmp_path: Path) -> None:
    """A file that searches whenever it is imported is told of the guard."""
    for guard, is_right in (('if __name__ == "__main__":', True), ("if True:", False)):
        (tmp_path / "own.py").write_text(OWN.format(folder=str(BUILD.parent), guard=guard))
        ended = run_python("import runpy; runpy.run_path('own.py', run_name='__main__')", tmp_path)
        if is_right:
            assert ended.stdout.startswith("Best: per-device batch "), ended.stderr
        else:
            assert "a search began while trials ran own.py:build" in ended.stderr.splitlines()[-1]
            assert 'under if __name__ == "__main__":' in ended.stderr.splitlines()[-1]


VERIFIED = """
import dataclasses, json
import autotune
from autotune import api
from autotune.core.errors import PromiseMissedError
options = dict(model="bert-tiny", effective_batch=8, seq_len=16, device="cpu", trials=1, study="v", storage="v.db")
shown, real = [], api.verify
def breaks(*words, **options):
    found = real(*words, **options)
    obtained = dataclasses.replace(found.obtained, loss_problem="the loss is not a number")
    broken = dataclasses.replace(found, obtained=obtained)
    shown.append(repr(broken))
    return broken
api.verify = breaks
try:
    autotune.search(**options, verify=True)
except PromiseMissedError as error:
    shown.append(str(error))
result = autotune.load("v", storage="v.db")
print(json.dumps([*shown, repr(result), str(result), repr(result.best)]))
"""


@pytest.mark.whole
def test_a_search_may_end_with_a_stock_run(tmp_path: Path) -> None:
    """What is not kept raises, and says where the result is; the result's own text is short."""
    ended = run_python(VERIFIED, tmp_path)
    assert ended.returncode == 0, ended.stderr
    verification, error, shown, text, best = json.loads(ended.stdout)
    assert "with a stock Trainer" in ended.stderr
    assert verification in ended.stderr
    assert "samples/s of" in verification
    assert "the loss is not a number" in error
    assert f"the result is autotune.load('v', storage={str(tmp_path / 'v.db')!r})" in error
    assert shown == text
    assert text.startswith("Best: ")
    assert best.startswith("trial 0: 8 × 1 ")
    assert len(best) < 200
    assert len(best.splitlines()) == len(verification.splitlines()) == 1


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModelError):
        api.search("no-such-model-at-all", device="cpu", storage=str(tmp_path / "a.db"))
    with pytest.raises((UnknownStudyError, AutotuneError)):
        api.load("absent", storage=str(tmp_path / "a.db"))


def test_a_plot_needs_matplotlib_or_is_one(tmp_path: Path) -> None:
    """With an extra to install where it is not there."""
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import autotune\n"
        f"autotune.search('bert-tiny', 8, seq_len=16, device='cpu', trials=1, storage={str(tmp_path / 'p.db')!r},"
        " study='p', progress=False)\n"
        f"result = autotune.load('p', storage={str(tmp_path / 'p.db')!r})\n"
        "try:\n"
        "    axes = result.plot()\n"
        "    print('axes', axes.get_ylabel(), len(axes.get_lines()))\n"
        "except autotune.errors.InvalidRequestError as error:\n"
        "    print(error)\n"
    )
    ended = run_python(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr, "nothing is told where nothing shall be"
    said = ended.stdout.strip()
    missing = f"a plot needs matplotlib, which is not installed. {how_to_add('plot')}"
    assert said == missing or said.startswith("axes samples/s ")
