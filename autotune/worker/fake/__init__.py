"""Simulate a training step with fake tensors, to know what it allocates without memory or a GPU.

Importing these modules changes nothing. ``step.trace_step`` patches torch, so it has to run in a process of its own.
"""
