"""Stop a training in a Python that the user's code starts, at its first backward pass. Every such Python imports this.

Such a process has no trial's limits and nothing measures it, so what it would write is what a training writes.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    """Run the next ``sitecustomize`` on the path, under its own name."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        # Python looks there for what it has just imported, so that the name must not be missing meanwhile.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_run_the_next()
if "AUTOTUNE_WRITABLE" in os.environ:
    from autotune.worker.user.sandbox import refuse_attributes

    refuse_attributes(os.environ["AUTOTUNE_WRITABLE"].split(os.pathsep))
if "AUTOTUNE_STOP" in os.environ:
    from autotune.worker.user.guard import guard_started_python

    guard_started_python()
