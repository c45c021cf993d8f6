"""Who works on a study, and until when that holds without another sign of life."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table, empty."""
    op.create_table(
        "autotune_leases",
        sa.Column("name", sa.String(544), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("host", sa.String(256), nullable=False),
        sa.Column("machine", sa.String(256), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process_started", sa.String(32), nullable=False),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_autotune_leases")),
    )


def downgrade() -> None:
    """Drop the table; searches then go unnoticed by other hosts."""
    op.drop_table("autotune_leases")
