"""A publisher: one type of payload to one name."""

from __future__ import annotations

from typing import Generic, TypeVar, Unpack

from .errors import NotRunning
from .outlet import Outlet, PublishOptions

__all__ = ["Publisher"]

T = TypeVar("T")
R = TypeVar("R")


class Publisher(Generic[T]):
    """Publishes one type of payload to one name.

    As a parameter of a handler: ``receipts: Annotated[Publisher[Receipt], "receipts"]``. Or made anywhere and given to
    the app, ``receipts = Publisher[Receipt]("receipts"); app = App(ship, publishers=[receipts])``; `broker` is which of
    the app's brokers it goes to.
    """

    __slots__ = ("_outlet", "broker", "name")

    def __init__(self, name: str, *, broker: str = "default") -> None:
        self.name = name
        self.broker = broker
        self._outlet: Outlet | None = None

    def bind(self, outlet: Outlet) -> None:
        """Tell it where it publishes; the app does that at build."""
        self._outlet = outlet

    def _bound(self) -> Outlet:
        if self._outlet is None:
            raise NotRunning(f"publisher of {self.name!r} belongs to no app: App(.., publishers=[it])")
        return self._outlet

    async def publish(self, payload: T, **options: Unpack[PublishOptions]) -> str:
        """Publish `payload` and return its message id once the broker has accepted it.

        See `PublishOptions`. Concurrent publishes go together. Raises a `PublishError`, or `NotRunning`; `ValueError`
        and `TypeError` on malformed options.
        """
        return await self._bound().publish(self.name, payload, **options)

    async def request(
        self, payload: T, reply: type[R], *, timeout: float = 30.0, **options: Unpack[PublishOptions]
    ) -> R:
        """Publish `payload` and return what its handler returned, as `reply`.

        Many may be in flight. Raises `ReplyTimeout` after `timeout` seconds (an answer that comes later is counted, not
        delivered), `DecodeError`, a `PublishError`, and `Unsupported` where the broker carries no replies.
        """
        return await self._bound().request(self.name, payload, reply, timeout, **options)

    def __repr__(self) -> str:
        return f"Publisher({self.name!r}, broker={self.broker!r})"
