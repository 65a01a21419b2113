"""GitHub's webhooks as types, with a handler for each: one module a family.

A message is ``{"event": "issues", "payload": {...}}``; `event` says which type it becomes. A body that fits none of
them, or lacks a field that its type needs, cannot be decoded: it goes to the dead letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

from . import accounts, code, issues, projects, pulls, repositories, runs, security
from .base import Event, handle, handlers

__all__ = [
    "AnyEvent",
    "Event",
    "accounts",
    "code",
    "handle",
    "handlers",
    "issues",
    "projects",
    "pulls",
    "repositories",
    "runs",
    "security",
]

if TYPE_CHECKING:
    AnyEvent: TypeAlias = Event
else:  # every type that has a handler, told apart by its tag
    AnyEvent = Union[tuple(handlers)]  # noqa: UP007 - there is no other spelling for a tuple of types
