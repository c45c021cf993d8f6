"""Answer requests under ``/v1``, by subject."""
