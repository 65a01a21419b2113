"""The declaration of a subscriber: what `@subscriber` writes down beside a function that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from .broker import Order
from .codec import Codec
from .middleware import Middleware
from .outcome import Backoff, ErrorRule

__all__ = ["ATTRIBUTE", "Batch", "Declaration", "declarations", "subscriber"]

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE: Final = "__streamfw_subscriptions__"
DEFAULT_DEAD_LETTER: Final = "<name>.dead"


class Batch(msgspec.Struct, frozen=True):
    """A handler that takes ``list[T]``: at most `size` messages; a batch that is not full waits `wait` seconds for
    more."""

    size: int
    wait: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1 or self.wait < 0:
            raise ValueError(f"{self!r}: size is at least 1, wait zero or more seconds")


class Declaration(msgspec.Struct, kw_only=True):
    """What one `@subscriber` says. Everything is checked at build, so that all mistakes come together."""

    handler: Callable[..., Any]
    source: object
    broker: str = "default"
    group: str | None = None
    workers: int = 1
    ordered_by: Order | None = None
    batch: Batch | None = None
    attempts: int | None = None
    backoff: Backoff = Backoff()
    on_error: Mapping[type[BaseException], ErrorRule] = {}
    dead_letter: str | None = DEFAULT_DEAD_LETTER
    timeout: float | None = None
    prefetch: int | None = None
    max_bytes: int = 64 * 1024 * 1024
    held: int = 10_000
    codec: Codec | None = None
    middleware: Sequence[Middleware] = ()
    publishes: str | None = None
    transactional: bool = False
    task_per_message: bool = False

    @property
    def name(self) -> str:
        """What the messages were published to: the string itself, or the source object's `name`."""
        return self.source if isinstance(self.source, str) else str(getattr(self.source, "name", ""))

    @property
    def where(self) -> str:
        """How errors call this subscriber."""
        handler = getattr(self.handler, "__qualname__", repr(self.handler))
        return f"{handler}({self.name!r})"


def subscriber(
    source: str | object,
    /,
    *,
    broker: str = "default",
    group: str | None = None,
    workers: int = 1,
    ordered_by: Order | None = None,
    batch: Batch | None = None,
    attempts: int | None = None,
    backoff: Backoff | None = None,
    on_error: Mapping[type[BaseException], ErrorRule] | None = None,
    dead_letter: str | None = DEFAULT_DEAD_LETTER,
    timeout: float | None = None,
    prefetch: int | None = None,
    max_bytes: int = 64 * 1024 * 1024,
    held: int = 10_000,
    codec: Codec | None = None,
    middleware: Sequence[Middleware] = (),
    publishes: str | None = None,
    transactional: bool = False,
    task_per_message: bool = False,
) -> Callable[[F], F]:
    """Mark a function as the handler of `source`: a name, or a broker's own source object.

    The function itself is returned, to be called in a unit test and given to `App`.

    - `broker`: which of the app's brokers. `group`: who competes with whom (default: the app's name).
    - `workers`: how many messages are handled at the same time in this process.
    - `ordered_by`: ``"key"``: messages of one key one after another, in order, over all processes of the group;
      ``"partition"`` likewise. A message that is tried again holds those behind it.
    - `batch`: the handler takes a list.
    - `attempts`: deliveries, the first included, before the dead letter; None: for ever. `backoff`: the pauses between.
      `on_error`: outcomes by type of exception, the first match wins.
    - `dead_letter`: the name failed messages go to (default ``<name>.dead``); None discards them.
    - `timeout`: seconds a handler may take; it is cancelled then, and counts as failed.
    - `prefetch`: messages to hold in this process (default: adapts itself). `max_bytes`: their bodies, at most.
    - `held`: how many messages may wait behind keys that wait for a retry, before fetching stops.
    - `codec`, `middleware`: this subscriber's own, inside the app's.
    - `publishes`: a name to publish the handler's return value to, before the message is acknowledged.
    - `transactional`: the handler runs inside a transaction that also ends the message.
    - `task_per_message`: each message in a task of its own, for libraries whose scope is the current task (costs about
      five times the rest of the dispatch).

    Mistakes are reported by `App.build()`, all at once.
    """

    def mark(handler: F) -> F:
        declaration = Declaration(
            handler=handler,
            source=source,
            broker=broker,
            group=group,
            workers=workers,
            ordered_by=ordered_by,
            batch=batch,
            attempts=attempts,
            backoff=backoff or Backoff(),
            on_error=on_error or {},
            dead_letter=dead_letter,
            timeout=timeout,
            prefetch=prefetch,
            max_bytes=max_bytes,
            held=held,
            codec=codec,
            middleware=middleware,
            publishes=publishes,
            transactional=transactional,
            task_per_message=task_per_message,
        )
        handler.__dict__.setdefault(ATTRIBUTE, []).append(declaration)
        return handler

    return mark


def declarations(handler: object) -> list[Declaration]:
    """What `@subscriber` wrote on `handler`: nothing, one or several."""
    found: list[Declaration] = getattr(handler, ATTRIBUTE, [])
    return found
