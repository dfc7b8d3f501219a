"""What a single job does with known scores: read, refresh or nothing.

Revision 0011, after 0010. Works with the code before it: the column may be null.
"""

import sqlalchemy as sa
from alembic import op

from storage.indexing import is_postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("cache", sa.Text(), nullable=True)
    op.add_column("jobs", column, if_not_exists=is_postgresql())


def downgrade() -> None:
    op.drop_column("jobs", "cache")
