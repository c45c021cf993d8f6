"""The command line: wiring and rendering; the one place that prints and exits."""
