"""Run trials of the user's own training code."""
