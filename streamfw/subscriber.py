"""The declaration of a subscriber: what `@subscriber` writes down beside a function that stays as it is."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, TypeVar, Unpack

import msgspec

from .broker import Order
from .codec import Codec
from .middleware import Middleware
from .outcome import Backoff, ErrorRule
from .placement import RunIn

__all__ = ["ATTRIBUTE", "Batch", "Declaration", "Options", "declarations", "declare", "subscriber"]

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
    run_in: RunIn | None = None
    prefetch: int | None = None
    max_bytes: int = 64 * 1024 * 1024
    held: int = 10_000
    codec: Codec | None = None
    middleware: Sequence[Middleware] = ()
    publishes: str | None = None
    replies_to: Sequence[str] | None = None
    transactional: bool = False
    task_per_message: bool = False
    durations: bool | None = None
    unknown: Mapping[str, object] = {}

    @property
    def name(self) -> str:
        """What the messages were published to: the string itself, or the source object's `name`."""
        return self.source if isinstance(self.source, str) else str(getattr(self.source, "name", ""))

    @property
    def where(self) -> str:
        """How errors call this subscriber."""
        return f"{self.handler_name}({self.name!r})"

    @property
    def handler_name(self) -> str:
        """The handler's name, with that of its class where it has one."""
        return str(getattr(self.handler, "__qualname__", repr(self.handler)))


class Options(TypedDict, total=False):
    """The options of a subscriber; `subscriber` says what they mean."""

    broker: str
    group: str | None
    workers: int
    ordered_by: Order | None
    batch: Batch | None
    attempts: int | None
    backoff: Backoff | None
    on_error: Mapping[type[BaseException], ErrorRule] | None
    dead_letter: str | None
    timeout: float | None
    run_in: RunIn | None
    prefetch: int | None
    max_bytes: int
    held: int
    codec: Codec | None
    middleware: Sequence[Middleware]
    publishes: str | None
    replies_to: Sequence[str] | None
    transactional: bool
    task_per_message: bool
    durations: bool | None


def subscriber(source: str | object, /, **options: Unpack[Options]) -> Callable[[F], F]:
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
    - `timeout`: seconds a handler may take; it is cancelled then, and counts as failed (a thread cannot be cancelled:
      it is waited for, and then counts as failed).
    - `run_in`: where a `def` handler runs: ``"thread"`` (the default), or ``"process"`` for work that keeps a processor
      busy. An `async def` handler runs in the event loop.
    - `prefetch`: messages to hold in this process (default: adapts itself). `max_bytes`: their bodies, at most.
    - `held`: how many messages may wait behind keys that wait for a retry, before fetching stops.
    - `codec`, `middleware`: this subscriber's own, inside the app's.
    - `publishes`: a name to publish the handler's return value to, before the message is acknowledged.
    - `replies_to`: the addresses (as patterns) that a return value may be sent to as a reply, since the sender names
      them (default: the broker's own reply inboxes; an empty list: none).
    - `transactional`: the handler runs inside a transaction that also ends the message.
    - `task_per_message`: each message in a task of its own, for libraries whose scope is the current task (costs about
      five times the rest of the dispatch).
    - `durations`: count how long the handler takes, for the metrics (default: as the app says, which is no).

    Mistakes are reported by `App.build()`, all at once.
    """

    if isinstance(source, types.FunctionType):
        raise TypeError(f'@subscriber needs what it subscribes to: @subscriber("a name") above {source.__qualname__}')

    def mark(handler: F) -> F:
        declaration = declare(handler, source, options)
        try:
            vars(handler).setdefault(ATTRIBUTE, []).append(declaration)
        except (TypeError, AttributeError):
            raise TypeError(f"@subscriber marks a function, not {handler!r}") from None
        return handler

    return mark


def declare(handler: Callable[..., Any], source: object, options: Mapping[str, Any]) -> Declaration:
    """The declaration of these options. Those that there are none of are kept, to be reported at build."""
    known = {name: value for name, value in options.items() if name in Options.__annotations__}
    unknown = {name: value for name, value in options.items() if name not in known}
    for name, default in (("backoff", Backoff()), ("on_error", {})):
        if known.get(name) is None:
            known[name] = default
    return Declaration(handler=handler, source=source, unknown=unknown, **known)


def declarations(handler: object) -> list[Declaration]:
    """What `@subscriber` wrote on `handler`: nothing, one or several."""
    found: list[Declaration] = getattr(handler, ATTRIBUTE, [])
    return found
