"""Where compiled kernels are kept."""

import stat
from pathlib import Path

from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.core.scratch import CACHE_VARIABLE, keep_compiled
from autotune.execution.child_process import server_environment


def test_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment)
    folder = Path(environment[CACHE_VARIABLE])
    assert folder == tmp_path / "autotune" / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_trials_are_told_the_folder(tmp_path: Path, cpu: Device) -> None:
    environment = server_environment(Placement.of(cpu), {"XDG_CACHE_HOME": str(tmp_path)}, offline=True)
    assert environment[CACHE_VARIABLE] == str(tmp_path / "autotune" / "compiled")


def test_the_users_own_folder_stays() -> None:
    environment = {CACHE_VARIABLE: "/elsewhere"}
    keep_compiled(environment)
    assert environment == {CACHE_VARIABLE: "/elsewhere"}


def test_where_no_folder_can_be_made_torch_chooses(tmp_path: Path) -> None:
    (tmp_path / "autotune").write_text("a file in its place")
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment)
    assert CACHE_VARIABLE not in environment
