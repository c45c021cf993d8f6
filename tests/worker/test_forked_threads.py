"""Test that forks of forks compute with several threads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

POOL = Path(__file__).parents[1] / "stand_ins" / "slow_pthreadpool.c"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is Linux's")
def test_threads_of_a_fork_that_ask_for_their_pool_at_once_all_get_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler to make torch's thread pool slow with")
    library = tmp_path / "slow.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(POOL), "-ldl"], check=True, timeout=240)
    words = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("attend_in_forks.py"))]
    variables = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120, env=variables)
    assert done.stdout.split() == ["computed"] * 2
