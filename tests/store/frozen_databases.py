"""Databases as earlier autotunes wrote them, and migrations after those of today.

``tests/store/recorded_searches/search_REVISION.sql`` was written by the autotune of that revision: the search of
``searching.request`` over the recorded landscape, two trials completed, one out of memory, one running. Beside it is
what that revision kept besides: answers of trial processes, jobs of a service with their events, tokens.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from autotune.store.opening import head_revision, migrations_folder

FOLDER = Path(__file__).parent / "recorded_searches"
REVISIONS = sorted(path.stem.removeprefix("search_") for path in FOLDER.glob("search_*.sql"))

SCRIPT = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{head}"


def upgrade():
    op.create_table("autotune_extra", sa.Column("id", sa.Integer, primary_key=True))
    with op.batch_alter_table("autotune_studies", recreate="always") as batch:
        batch.add_column(sa.Column("comment", sa.Text()))
    op.execute("UPDATE autotune_studies SET comment = name")
    {ending}
"""


def run_sql(path: Path, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
    """Run one statement on a SQLite file, without any of autotune, and return its rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def write_frozen(folder: Path, revision: str) -> Path:
    """Make the database of a revision in the folder."""
    path = folder / "frozen.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"search_{revision}.sql").read_text())
    return path


@contextmanager
def later_migration(folder: Path, ending: str) -> Iterator[None]:
    """Have databases migrated by the project's migrations and one more, which ends as given, within the block."""
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "9999_extra.py").write_text(SCRIPT.format(ending=ending, head=head_revision()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.store.opening.migrations_folder", lambda: folder)
        yield
