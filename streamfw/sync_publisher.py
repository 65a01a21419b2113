"""Publishing from a handler that is not async."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from .errors import NotRunning
from .publisher import Publisher

if TYPE_CHECKING:
    from .outlet import PublishOptions

__all__ = ["SyncPublisher"]

T = TypeVar("T")
R = TypeVar("R")


class SyncPublisher(Generic[T]):
    """A `Publisher` for a `def` handler: ``receipts: Annotated[SyncPublisher[Receipt], "receipts"]``.

    Its methods block the thread that calls them until the broker has answered; any thread but the event loop's may.
    """

    __slots__ = ("_loop", "_publisher")

    def __init__(self, publisher: Publisher[T]) -> None:
        self._publisher = publisher
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Tell it which loop publishes; the app does that while it runs."""
        self._loop = loop

    @property
    def name(self) -> str:
        """What it publishes to."""
        return self._publisher.name

    def publish(self, payload: T, **options: Unpack[PublishOptions]) -> str:
        """Publish `payload` and return its message id once the broker has accepted it; see `Publisher.publish`.

        Raises what that raises, and `RuntimeError` in the thread of an event loop, which it would block.
        """
        return str(self._blocking(self._publisher.publish(payload, **options)))

    def request(self, payload: T, reply: type[R], *, timeout: float = 30.0, **options: Unpack[PublishOptions]) -> R:
        """Publish `payload` and return what its handler returned, as `reply`; see `Publisher.request`."""
        answer: R = self._blocking(self._publisher.request(payload, reply, timeout=timeout, **options))
        return answer

    def _blocking(self, publishing: Any) -> Any:
        loop = self._loop
        mistake: Exception | None = None
        if loop is None or loop.is_closed():
            mistake = NotRunning(f"the app of the publisher of {self.name!r} does not run (any more)")
        elif asyncio._get_running_loop() is not None:
            mistake = RuntimeError(f"{self!r} would block the event loop that this runs in: await a Publisher instead")
        if loop is None or mistake is not None:
            publishing.close()
            raise mistake or AssertionError
        return asyncio.run_coroutine_threadsafe(publishing, loop).result()

    def __repr__(self) -> str:
        return f"SyncPublisher({self.name!r})"
