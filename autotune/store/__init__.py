"""Keep studies in a database: one file with Optuna's tables and autotune's own.

``opening.open_store`` returns a ``repository.Store``; records go in and come out as the frozen values of ``records``.
Only the controlling process of a search writes. Modules that import SQLAlchemy, Alembic or Optuna, which takes half a
second, are imported where they are first used: the trial server can start meanwhile.
"""
