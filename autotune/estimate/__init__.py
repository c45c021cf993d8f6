"""Predict peak memory, bound throughput and pool measurements, to decide which candidates to try."""
