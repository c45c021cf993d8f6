"""Write the API's description, with which a test compares what the service says."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "studies")]

from serving import StandInEngine

from autotune.service.app import make_app
from autotune.service.pages import add_pages
from autotune.service.searches import Searches
from autotune.store.opening import open_store


def main() -> None:
    """Write ``openapi.json`` beside this file."""
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/a.db") as store:
        described = make_app(Searches(store, f"{folder}/a.db", StandInEngine()), extend=add_pages).openapi()
    (Path(__file__).parent / "openapi.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
