"""The search as a function: light to import, the command's options, a result that trains."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from autotune import api
from autotune.cli.search import search as command
from autotune.errors import AutotuneError, InvalidRequestError, UnknownModelError, UnknownStudyError

HEAVY = {"torch", "transformers", "datasets", "accelerate", "optuna", "sqlalchemy", "alembic", "rich", "numpy", "click"}

# No guard around what runs, a thread that is not the main one, as a notebook has it.
SCRIPT = """
import json, sys, threading
import autotune.loop
import autotune
found = []
def work():
    found.append(autotune.search(model="bert-tiny", effective_batch=8, seq_len=16, device="cpu", trials=2,
                                 headroom="5%", time_budget="5m", study="mine", storage="mine.db"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
result = found[0]
imported = sorted({name.partition(".")[0] for name in sys.modules})
arguments = result.training_arguments(output_dir="out", learning_rate=1e-4)
print(json.dumps({
    "text": str(result), "study": result.study, "speedup": result.speedup, "imported": imported,
    "best": result.best.candidate.parameters(), "best_speed": result.best.measurement.samples_per_second,
    "baseline": result.baseline.candidate.parameters(), "feasible": result.best.feasible,
    "arguments": result.arguments, "model_arguments": result.model_arguments,
    "columns": list(result.trials.columns), "rows": len(result.trials), "records": result.records,
    "made": [type(arguments).__name__, arguments.output_dir, arguments.learning_rate,
             arguments.per_device_train_batch_size, arguments.bf16],
    "again": autotune.load("mine", storage="mine.db").document() == result.document(),
}))
"""


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script above prints."""
    ended = run_python(SCRIPT, tmp_path_factory.mktemp("api"))
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    assert "study mine on cpu" in ended.stderr
    return document


def test_importing_it_imports_nothing(tmp_path: Path) -> None:
    """Not even by naming what is there."""
    ended = run_python("import autotune, sys; print(dir(autotune), *sys.modules, sep='\\n')", tmp_path)
    names, *modules = ended.stdout.splitlines()
    assert "'search'" in names
    assert "'Result'" in names
    assert not {module.partition(".")[0] for module in modules} & HEAVY
    assert not [module for module in modules if module.startswith("autotune.")]


def test_a_search_imports_no_torch(printed: dict[str, Any]) -> None:
    """Only ``training_arguments`` does."""
    assert not set(printed["imported"]) & {"torch", "transformers", "accelerate", "click", "rich"}


def test_the_result_tells_what_was_found(printed: dict[str, Any]) -> None:
    """Winner, baseline, every trial."""
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
    """Those of the winner with more beside them."""
    batch = printed["best"]["per_device_train_batch_size"]
    assert printed["made"] == ["TrainingArguments", "out", 1e-4, batch, printed["best"]["precision"] == "bf16"]
    assert printed["arguments"]["per_device_train_batch_size"] == batch
    assert printed["model_arguments"]["dtype"] == "float32"


def test_it_has_the_options_of_the_command() -> None:
    """Under the same names; what only a terminal needs is left out, ``verify`` is asked of the result."""
    theirs = {str(param.name) for param in command.params} - {"as_json", "verify", "no_baseline"}
    assert theirs == set(inspect.signature(api.search).parameters) - {"baseline", "progress"}


def test_its_defaults_are_those_of_the_command() -> None:
    """Whether filled in by the command line or here."""
    ours = {name: param.default for name, param in inspect.signature(api.search).parameters.items()}
    for param in command.params:
        default = param.default
        if param.name in ours and isinstance(default, str) and param.name not in ("trial_timeout", "storage"):
            assert str(ours[str(param.name)]) == default, param.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "speed"}, "objective='speed' is not one of 'throughput', 'max-batch'"),
        ({"sampler": "best"}, "sampler='best'"),
        ({"task": "chess"}, "task='chess'"),
        ({"effective_batch": 0}, "effective_batch=0 is not a whole number from 1"),
        ({"trials": 1.5}, "trials=1.5"),
        ({"trials": True}, "trials=True"),
        ({"padding": 1.0}, "padding=1.0 is not a share"),
        ({"memory_limit": "24 bananas"}, "memory_limit='24 bananas'"),
        ({"time_budget": "soon"}, "time_budget='soon'"),
        ({"headroom": "lots"}, "'lots' is not a headroom"),
        ({"study": "../up"}, "is not a study name"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before any process is started or file made."""
    storage = tmp_path / "absent.db"
    with pytest.raises(InvalidRequestError) as refused:
        api.search("bert-tiny", device="cpu", storage=str(storage), **options)
    assert said in refused.value.message
    assert refused.value.hint
    assert not storage.exists()


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, a study."""
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
    assert said == "a plot needs matplotlib, which is not installed. pip install 'autotune[plot]'" or said.startswith(
        "axes samples/s "
    )
