"""The queue of a service: jobs, what happened to them, agents and tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, empty."""
    op.create_table(
        "autotune_jobs",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("study", sa.String(512), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("needs_kind", sa.String(16), nullable=True),
        sa.Column("needs_gpu", sa.String(64), nullable=True),
        sa.Column("needs_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("needs_count", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("is_cancel_asked", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(32), nullable=True),
        sa.Column("lease_token", sa.String(32), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("status", sa.JSON(), nullable=True),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("submitted_by", sa.String(64), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_autotune_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_autotune_jobs_id")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_autotune_jobs_idempotency_key")),
    )
    op.create_index(op.f("ix_autotune_jobs_state_number"), "autotune_jobs", ["state", "number"])
    op.create_index(op.f("ix_autotune_jobs_study"), "autotune_jobs", ["study"])
    op.create_table(
        "autotune_job_events",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_autotune_job_events")),
    )
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
    op.create_table(
        "autotune_tokens",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_autotune_tokens")),
        sa.UniqueConstraint("digest", name=op.f("uq_autotune_tokens_digest")),
    )


def downgrade() -> None:
    """Drop the tables with the queue; studies stay."""
    for table in ("autotune_tokens", "autotune_agents", "autotune_job_events", "autotune_jobs"):
        op.drop_table(table)
