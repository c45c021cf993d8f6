"""Run the child side of a trial. Only this package imports torch, transformers and datasets.

No other package imports it. The controller starts ``python -m autotune.worker.server``.
"""
