"""Stop a training in a Python that the user's code starts, at its first backward pass. Every such Python imports this.

Such a process has none of a trial's limits and is not measured: it would train on, and write what a training writes.
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
        # Python looks up the module that it has just imported in ``sys.modules``, so the name must be there.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_run_the_next()
if "AUTOTUNE_WRITABLE" in os.environ:
    from autotune.worker.user.sandbox import refuse_attributes

    refuse_attributes(os.environ["AUTOTUNE_WRITABLE"].split(os.pathsep))
if "AUTOTUNE_STOP" in os.environ:
    from autotune.worker.user.guard import guard_started_python

    guard_started_python()
