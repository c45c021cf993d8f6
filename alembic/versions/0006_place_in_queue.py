"""An index in the order in which jobs are claimed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# A job of the next higher priority goes before a hundred that were submitted earlier.
_PLACE = sa.text("(number - 100 * priority)")


def upgrade() -> None:
    """Make the index."""
    op.create_index(op.f("ix_autotune_jobs_state_place"), "autotune_jobs", ["state", _PLACE])


def downgrade() -> None:
    """Drop it; claims then sort every job that waits."""
    op.drop_index(op.f("ix_autotune_jobs_state_place"), table_name="autotune_jobs")
