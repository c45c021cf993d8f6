"""Test which libraries of the user's code are imported once for all trials."""

import os
import sys
from pathlib import Path

import pytest
import warm

from autotune.core.training_source import TrainingSource, find_script
from autotune.worker.imports import imports_of

SCRIPT = """
import os, helpers
import lightning.pytorch as pl
from transformers import ElectraModel, NoSuchModel
try:
    from trl import SFTTrainer
except ImportError:
    SFTTrainer = None
os.environ["HF_HOME"] = "somewhere"
import datasets
def later(): import peft
"""
HELPERS = """
import helpers
import nowhere
from torchvision.models import *
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingSource:
    """A script with a module of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helpers.py").write_text(HELPERS)
    return find_script(["train.py"])


def test_they_are_those_imported_before_the_environment_is_changed(source: TrainingSource) -> None:
    assert imports_of(source) == [
        ("torchvision.models", None),
        ("lightning.pytorch", None),
        ("transformers", "ElectraModel"),
        ("transformers", "NoSuchModel"),
        ("trl", "SFTTrainer"),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "import settings",
        "from settings import NAME",
        "os.environ |= {'HF_HOME': 'x'}",
        "if 'HF_HOME' not in os.environ: os.environ['HF_HOME'] = 'x'",
        "def set_home(): os.environ['HF_HOME'] = 'x'\nset_home()",
        "from later import set_home\nset_home()",
        "from dotenv import load_dotenv\nload_dotenv()",
    ],
)
def test_nothing_is_imported_after_what_may_change_the_environment(
    tmp_path: Path, source: TrainingSource, statement: str
) -> None:
    (tmp_path / "settings.py").write_text("import os\nos.environ['HF_HOME'] = 'x'\nNAME = 1\n")
    (tmp_path / "later.py").write_text("import os\ndef set_home():\n    os.environ['HF_HOME'] = 'x'\n")
    (tmp_path / "train.py").write_text(f"import os, lightning\n{statement}\nimport datasets\n")
    assert imports_of(source) == [("lightning", None)]


@pytest.mark.parametrize("own", ["evaluate.py", "evaluate/__init__.py"])
def test_files_of_the_users_own_are_not_taken_for_libraries(tmp_path: Path, source: TrainingSource, own: str) -> None:
    """Python finds them first, as they lie beside the script."""
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("import timm\n")
    (tmp_path / "train.py").write_text("import evaluate\nimport trl\n")
    assert imports_of(source) == [("timm", None), ("trl", None)]


def test_a_file_that_cannot_be_read_has_none(tmp_path: Path, source: TrainingSource) -> None:
    (tmp_path / "train.py").write_text("import lightning\ndef broken(")
    assert imports_of(source) == []


def test_the_server_imports_them_and_goes_on_where_one_is_missing(source: TrainingSource) -> None:
    code = """
import sys
from autotune.core.training_source import find_script
from autotune.core.workload import Workload
from autotune.worker.imports import import_everything
import_everything(Workload.of_source(find_script(["train.py"])).document())
print("transformers.models.electra.modeling_electra" in sys.modules)
"""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = warm.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert ran.stdout.split() == ["True"], ran.stderr[-2000:]
