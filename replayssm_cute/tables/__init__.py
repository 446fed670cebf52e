"""Tuned tables: which tile config serves a problem at a batch size on one GPU.

`schema` says what a table is, with the checks of `fields`; `files` reads, merges and writes them, `lookup` answers the
run-time question.
The shipped tables lie beside these modules as JSON files, those that were only estimated in a folder of their own.
"""

from .fields import TableError
from .files import ESTIMATED, estimated, estimated_folder, load, read, shipped, slug, update, user_paths, write
from .lookup import Choice, Tables, candidates, choose, forget, use
from .schema import SCHEMA, Cell, Manifest, Table, kernels_named, merge

__all__ = [
    "ESTIMATED",
    "SCHEMA",
    "Cell",
    "Choice",
    "Manifest",
    "Table",
    "TableError",
    "Tables",
    "candidates",
    "choose",
    "estimated",
    "estimated_folder",
    "forget",
    "kernels_named",
    "load",
    "merge",
    "read",
    "shipped",
    "slug",
    "update",
    "use",
    "user_paths",
    "write",
]
