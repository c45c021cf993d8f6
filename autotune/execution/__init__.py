"""The parent side of a trial: where trials run. Local processes today, other launchers beside them later."""

from autotune.execution.executor import LocalRunner

__all__ = ["LocalRunner"]
