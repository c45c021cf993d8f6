"""Verify a study's result: a stock ``Trainer`` against its promise, and the winner's loss against the baseline's."""
