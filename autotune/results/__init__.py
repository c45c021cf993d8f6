"""A study for its readers: report, text, JSON, plots, exports, the Optuna dashboard."""
