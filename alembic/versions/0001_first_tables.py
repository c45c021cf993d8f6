"""Environments, workloads, studies and trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the four tables."""
    for name in ("autotune_environments", "autotune_workloads"):
        op.create_table(
            name,
            sa.Column("id", sa.String(32), nullable=False),
            sa.Column("fingerprint", sa.String(64), nullable=False),
            sa.Column("document", sa.JSON(), nullable=False),
            sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
            sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{name}")),
            sa.UniqueConstraint("fingerprint", name=op.f(f"uq_{name}_fingerprint")),
        )
    _create_studies()
    _create_trials()


def _create_studies() -> None:
    op.create_table(
        "autotune_studies",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("workload_id", sa.String(32), nullable=False),
        sa.Column("environment_id", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("ceiling", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("stopped_because", sa.Text(), nullable=True),
        sa.Column("best_trial_id", sa.String(32), nullable=True),
        sa.Column("baseline_trial_id", sa.String(32), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("autotune_version", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["workload_id"],
            ["autotune_workloads.id"],
            name=op.f("fk_autotune_studies_workload_id_autotune_workloads"),
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["autotune_environments.id"],
            name=op.f("fk_autotune_studies_environment_id_autotune_environments"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_autotune_studies")),
        sa.UniqueConstraint("name", name=op.f("uq_autotune_studies_name")),
    )


def _create_trials() -> None:
    op.create_table(
        "autotune_trials",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("study_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("candidate", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("log_path", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("workload_id", sa.String(32), nullable=False),
        sa.Column("environment_id", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id"], ["autotune_studies.id"], name=op.f("fk_autotune_trials_study_id_autotune_studies")
        ),
        sa.ForeignKeyConstraint(
            ["workload_id"],
            ["autotune_workloads.id"],
            name=op.f("fk_autotune_trials_workload_id_autotune_workloads"),
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["autotune_environments.id"],
            name=op.f("fk_autotune_trials_environment_id_autotune_environments"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_autotune_trials")),
    )
    op.create_index(op.f("ix_autotune_trials_study_id_number"), "autotune_trials", ["study_id", "number"])
    op.create_index(
        op.f("ix_autotune_trials_environment_id_workload_id"), "autotune_trials", ["environment_id", "workload_id"]
    )


def downgrade() -> None:
    """Drops the four tables with everything in them."""
    for name in ("autotune_trials", "autotune_studies", "autotune_workloads", "autotune_environments"):
        op.drop_table(name)
