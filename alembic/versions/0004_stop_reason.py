"""Why a search ended as a word, and the arms that it left out as a list; before, both were lines of one text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_STUDIES = sa.table(
    "autotune_studies",
    sa.column("id", sa.String),
    sa.column("state", sa.String),
    sa.column("stopped_because", sa.Text),
    sa.column("stop_reason", sa.String),
    sa.column("left_out", sa.JSON(none_as_null=True)),
)
# How the sentences of earlier revisions began; any other of an interrupted search was the message of an error.
_BEGINNINGS = {
    "no remaining candidate is worth a trial": "nothing_left",
    "the budget of ": "trials",
    "the time budget of ": "time",
    "the sampler proposed nothing new": "nothing_new",
    "interrupted": "interrupted",
}


def upgrade() -> None:
    """Adds the two columns and fills them from the text, of which the first line stays."""
    op.add_column("autotune_studies", sa.Column("stop_reason", sa.String(16), nullable=True))
    op.add_column("autotune_studies", sa.Column("left_out", sa.JSON(), nullable=True))
    connection = op.get_bind()
    texts = sa.select(_STUDIES.c.id, _STUDIES.c.state, _STUDIES.c.stopped_because)
    for study_id, state, text in connection.execute(texts.where(_STUDIES.c.stopped_because.is_not(None))).all():
        # An error's message may have several lines; only this reason was followed by arms.
        sentence, *lines = text.split("\n")
        otherwise = "error" if state == "interrupted" else None
        reason = next((word for start, word in _BEGINNINGS.items() if text.startswith(start)), otherwise)
        arms = [line.partition(": ") for line in lines] if reason == "nothing_left" else []
        left_out = [{"arms": names.split("; "), "reason": why} for names, _, why in arms]
        values = {
            "stop_reason": reason,
            "left_out": left_out or None,
            "stopped_because": sentence if left_out else text,
        }
        connection.execute(sa.update(_STUDIES).where(_STUDIES.c.id == study_id).values(**values))


def downgrade() -> None:
    """Puts the arms back into the text and drops the columns."""
    connection = op.get_bind()
    for study_id, text, left_out in connection.execute(
        sa.select(_STUDIES.c.id, _STUDIES.c.stopped_because, _STUDIES.c.left_out)
    ).all():
        lines = [f"{'; '.join(each['arms'])}: {each['reason']}" for each in left_out or []]
        if lines:
            whole = "\n".join([text, *lines])
            connection.execute(sa.update(_STUDIES).where(_STUDIES.c.id == study_id).values(stopped_because=whole))
    op.drop_column("autotune_studies", "left_out")
    op.drop_column("autotune_studies", "stop_reason")
