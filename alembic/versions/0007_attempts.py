"""The service runs its jobs itself: attempts in place of agents and their leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add what is known of an attempt; drop the agents, and the leases that they held on jobs."""
    op.add_column("autotune_jobs", sa.Column("losses", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("autotune_jobs", sa.Column("heard", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("autotune_jobs", sa.Column("device", sa.JSON(), nullable=True))
    # Where a job ran is kept of its agent's record.
    jobs = sa.table("autotune_jobs", sa.column("owner", sa.String), sa.column("device", sa.JSON))
    agents = sa.table(
        "autotune_agents",
        sa.column("id", sa.String),
        sa.column("host", sa.String),
        sa.column("device", sa.JSON),
    )
    connection = op.get_bind()
    for agent, host, device in connection.execute(sa.select(agents.c.id, agents.c.host, agents.c.device)).all():
        where = {
            "host": host,
            "name": device.get("name"),
            "kind": device.get("kind"),
            "uuids": [uuid for uuid in [device.get("uuid")] if uuid],
        }
        connection.execute(jobs.update().where(jobs.c.owner == agent).values(device=where))
    for column in ("owner", "lease_token", "lease_expires_at"):
        op.drop_column("autotune_jobs", column)
    op.drop_table("autotune_agents")


def downgrade() -> None:
    """Make the columns and the table of agents again, empty."""
    op.add_column("autotune_jobs", sa.Column("owner", sa.String(32), nullable=True))
    op.add_column("autotune_jobs", sa.Column("lease_token", sa.String(32), nullable=True))
    op.add_column("autotune_jobs", sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True))
    for column in ("device", "heard", "losses"):
        op.drop_column("autotune_jobs", column)
    op.create_table(
        "autotune_agents",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("host", sa.String(512), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gone_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_autotune_agents")),
    )
