"""Simulate a training step with fake tensors, to know what it allocates without memory or a GPU.

Importing these modules changes nothing. ``step.FakeTraining`` patches torch, so it needs a process of its own.
"""
