"""Identifiers, and what the schema's DDL shares with the statements.

Every identifier is quoted, every value is bound; the one name a user chooses is the schema's.
"""

from __future__ import annotations

__all__ = ["DEFAULT_SCHEMA", "PLACE", "checked_schema", "quoted"]

DEFAULT_SCHEMA = "streamfw"
# Stands for the quoted schema in DDL and statements; no SQL of ours has braces otherwise.
PLACE = "{schema}"


def quoted(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def checked_schema(name: str) -> str:
    """`name`, when it can be a schema's. Raises `ValueError` otherwise.

    A dollar sign is refused because the functions' bodies are dollar-quoted and hold the name.
    """
    if (
        not name
        or len(name.encode("utf-8", "surrogatepass")) > 63
        or "\0" in name
        or "$" in name
        or not name.isprintable()
    ):
        raise ValueError(f"schema={name!r}: 1 to 63 bytes of printable text without '$' are needed")
    return name
