"""Simulate a machine with the GPUs of a stand-in NVML library, asked in child processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import warm

from autotune import devices as device_module

LIBRARY = "libnvidia-ml.so.1"
STAND_INS = Path(__file__).parent / "stand_ins"
PROJECT = Path(device_module.__file__).parents[2]
# Settings with which a process is started anew.
_READ_AT_START = {"LD_LIBRARY_PATH", "PYTHONPATH"}
# What the code that is run may call.
_NAMES = "\n".join(
    f"from autotune.{room} import *" for room in ("core.device", "devices.host", "devices.listing", "devices.nvml")
)


def uuid_of(number: int) -> str:
    """The UUID that the stand-in library gives GPU ``number``."""
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


class Machine:
    """A machine with the stand-in library and one of the two bindings; questions are asked in a child process."""

    def __init__(self, library_folder: Path, binding_folder: Path | None) -> None:
        self.library_folder = library_folder
        self.folders = [str(PROJECT)] if binding_folder is None else [str(binding_folder), str(PROJECT)]

    def ask(self, code: str, **settings: str) -> Any:
        """What ``answer`` holds after ``code`` ran, with ``settings`` in its environment."""
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        folders = [*self.folders, str(PROJECT / "studies")]
        environment |= {"PYTHONPATH": os.pathsep.join(folders), **settings}
        start = "import json, os"
        if settings.keys() & _READ_AT_START:
            environment = {"LD_LIBRARY_PATH": str(self.library_folder), **environment}
        else:
            # For a fork of a warm process it is too late to be told where libraries are: one that is loaded is found.
            start += f", ctypes\nctypes.CDLL({str(self.library_folder / LIBRARY)!r})"
        program = f"{start}\n{_NAMES}\n{code}\nprint(json.dumps(answer))"
        # With -P, which starts nothing in turn.
        return json.loads(warm.output_of("-P", "-c", program, env=environment))

    def devices(self, **settings: str) -> list[dict[str, Any]]:
        return self.ask("answer = [d.document() for d in list_devices()]", **settings)

    def listing(self, **settings: str) -> tuple[list[tuple[str, str]], str | None]:
        """Label and beginning of the UUID of every GPU, and the problem."""
        devices, problem = self.ask("answer = [d.document() for d in list_devices()], nvml_problem()", **settings)
        assert devices[-1]["label"] == "cpu"
        return [(found["label"], found["uuid"][:12]) for found in devices[:-1]], problem


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder that stands for ``/``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def compile_library(folder: Path) -> Path:
    """The stand-in library, compiled into a folder."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the stand-in library is found through LD_LIBRARY_PATH, which only Linux has")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) to build the stand-in NVML library with")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY)]
    subprocess.run([*command, str(STAND_INS / "nvml.c")], check=True, timeout=240)
    return folder
