"""Provide the command line: options, output and exit codes. Only this package prints and exits."""
