"""Who owns something, and whether that process still runs."""

import dataclasses
import subprocess
import sys

from autotune.core.placement import _started, this_machine, this_owner


def test_this_process_is_there() -> None:
    assert not this_owner().is_gone()


def test_a_process_is_gone_once_it_was_killed_even_before_its_parent_notices() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    owner = dataclasses.replace(this_owner(), pid=child.pid, started=_started(child.pid))
    assert not owner.is_gone()
    child.kill()
    child.communicate()
    assert owner.is_gone()


def test_a_later_process_of_the_same_id_is_another() -> None:
    assert dataclasses.replace(this_owner(), started="1").is_gone()


def test_of_another_machine_nothing_is_known() -> None:
    owner = dataclasses.replace(this_owner(), host="gpu-2", machine=f"{this_machine()}!", pid=2**22 + 1)
    assert not owner.is_gone()
    assert owner.describe() == f"process {2**22 + 1} of {owner.user} on gpu-2"
