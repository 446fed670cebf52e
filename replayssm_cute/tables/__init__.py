"""Tuned tables: which tile config serves a problem at a batch size on one GPU.

`schema` says what a table is, `files` reads, merges and writes them, `lookup` answers the run-time question.
The shipped tables lie beside these modules as JSON files.
"""

from .files import load, read, shipped, update, user_paths, write
from .lookup import Choice, Tables, candidates, choose, forget, use
from .schema import SCHEMA, Cell, Manifest, Table, TableError, merge

__all__ = [
    "SCHEMA",
    "Cell",
    "Choice",
    "Manifest",
    "Table",
    "TableError",
    "Tables",
    "candidates",
    "choose",
    "forget",
    "load",
    "merge",
    "read",
    "shipped",
    "update",
    "use",
    "user_paths",
    "write",
]
