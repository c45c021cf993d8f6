"""Reach names that torch, transformers, accelerate and datasets do not promise to keep, one module for each library.

Each name is imported where it is used, so that a version without it breaks only what needs it. ``tests/contracts``
checks on the installed versions that every name exists and behaves as it is assumed to here.
"""
