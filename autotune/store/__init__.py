"""Keep studies in a database: one file, or a database on a server.

``opening.open_store`` returns a ``repository.Store``; records go in and come out as the frozen values of ``records``.
Only the controlling process of a search writes. Modules that import SQLAlchemy or Alembic, which takes a part of a
second, are imported where they are first used: the trial server can start meanwhile.
"""
