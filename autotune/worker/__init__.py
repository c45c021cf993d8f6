"""The child side of a trial: the only code that imports torch, transformers and datasets.

Nobody imports this package; ``python -m autotune.worker.server`` starts it.
"""
