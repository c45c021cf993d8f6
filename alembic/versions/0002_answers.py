"""What trial processes answered, kept in a table of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ENVIRONMENTS = sa.table("autotune_environments", sa.column("fingerprint", sa.String))


def upgrade() -> None:
    """Makes the table, and takes inspections out of the environments, where they lay before.

    They are not moved: their keys hold a digest of the code that made them, so that no later one would find them.
    """
    op.create_table(
        "autotune_answers",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_autotune_answers")),
    )
    op.execute(sa.delete(_ENVIRONMENTS).where(_ENVIRONMENTS.c.fingerprint.startswith("inspection:")))


def downgrade() -> None:
    """Drops the table; what it held is asked again."""
    op.drop_table("autotune_answers")
