"""Adapt private names of torch, transformers, accelerate, datasets and TRL, in modules named after the library.

Most private names are imported where used, so that a version without one breaks only what needs it. ``tests/contracts``
checks on the installed versions that every name exists and behaves as assumed here.
"""
