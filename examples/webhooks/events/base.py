"""What all events share, and the table of their handlers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["Event", "Named", "Numbered", "Payload", "User", "handle", "handlers", "on"]


class Named(msgspec.Struct, frozen=True):
    name: str


class Numbered(msgspec.Struct, frozen=True):
    number: int
    title: str

    def __str__(self) -> str:
        return f"#{self.number} {self.title}"


class User(msgspec.Struct, frozen=True):
    login: str


class Repository(msgspec.Struct, frozen=True):
    full_name: str


class Installed(msgspec.Struct, frozen=True):
    account: User | None = None


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What most webhooks have."""

    action: str = ""
    repository: Repository | None = None
    organization: User | None = None
    installation: Installed | None = None
    sender: User | None = None


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """An event of GitHub; `payload` is the body of its webhook."""

    payload: Payload

    @property
    def name(self) -> str:
        """GitHub's name of the event."""
        return str(self.__struct_config__.tag)

    @property
    def owner(self) -> str:
        """Whose event it is: the repository, else the organisation, else the account. It orders the events."""
        p = self.payload
        if p.repository is not None:
            return p.repository.full_name
        account = p.organization or (p.installation.account if p.installation else None) or p.sender
        return account.login if account is not None else "github"


E = TypeVar("E", bound=Event)
Handler = Callable[..., Awaitable[str]]

handlers: dict[type[Event], Handler] = {}
_takes_attempt: set[type[Event]] = set()


def on(handler: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    """Mark the handler of one type of event, by the annotation of its parameter `event`. It returns a line for the
    summary; it may take `attempt`, which delivery this is (1 is the first)."""
    kind: type[Event] = typing.get_type_hints(handler)["event"]
    if kind in handlers:
        raise TypeError(f"{kind.__name__} has a handler already")
    if "attempt" in inspect.signature(handler).parameters:
        _takes_attempt.add(kind)
    handlers[kind] = handler
    return handler


def handle(event: Event, attempt: int) -> Awaitable[str]:
    """Call the handler of `event`."""
    kind = type(event)
    arguments: dict[str, Any] = {"attempt": attempt} if kind in _takes_attempt else {}
    return handlers[kind](event, **arguments)
