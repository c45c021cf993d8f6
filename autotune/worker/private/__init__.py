"""Adapt private names of torch, transformers, accelerate and datasets, one module for each library.

A private name is imported where it is used, so that a version without it breaks only what needs it. ``tests/contracts``
checks on the installed versions that every name exists and behaves as assumed here.
"""
