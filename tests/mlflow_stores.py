"""New databases of MLflow in tests: their tables are copied from an earlier one of this process.

MLflow makes them by all migrations since its first release, half a second of processor each.
"""

import sqlite3
import sys
import threading
from functools import wraps

_LOCK = threading.Lock()
_TABLES: list[sqlite3.Connection] = []  # in memory, before any row is written


def copy_tables() -> None:
    """From now on, if MLflow's databases have been used in this process at all."""
    utils = sys.modules.get("mlflow.store.db.utils")
    if utils is None or hasattr(utils._initialize_tables, "__wrapped__"):
        return
    migrate = utils._initialize_tables

    @wraps(migrate)
    def initialize(engine) -> None:
        if engine.dialect.name != "sqlite" or not utils._is_empty_database(engine):
            migrate(engine)
            return
        with _LOCK:
            if not _TABLES:
                migrate(engine)
                _TABLES.append(sqlite3.connect(":memory:", check_same_thread=False))
                _copy(engine.url.database, _TABLES[0], into_memory=True)
            else:
                _copy(engine.url.database, _TABLES[0])

    utils._initialize_tables = initialize


def _copy(path: str, kept: sqlite3.Connection, *, into_memory: bool = False) -> None:
    stored = sqlite3.connect(path)
    try:
        stored.backup(kept) if into_memory else kept.backup(stored)
    finally:
        stored.close()
