"""Run the command line, as the console script ``autotune`` and ``python -m autotune`` do.

This module imports nothing before ``main`` runs, so that a Ctrl-C while the command line is imported ends in one line.
"""

from __future__ import annotations


def main() -> None:
    """Import the command line and run it; always ends with ``SystemExit``."""
    try:
        from autotune.cli.main import main as run

        run()
    except KeyboardInterrupt:
        _end_interrupted()


def _end_interrupted() -> None:
    """Exit with code 130 and a line on stderr, as ``autotune.cli.main`` does, whose import a Ctrl-C may interrupt."""
    import sys

    # Python forgets an earlier Ctrl-C within an ``exec``; see autotune.cli.main._forget_interrupt.
    exec("")
    print("autotune: interrupted", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
