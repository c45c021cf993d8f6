"""A training step on fake tensors: what it would allocate, with no memory and no GPU.

Importing these modules changes nothing; ``step.trace_step`` patches torch, so it belongs in a
process of its own.
"""
