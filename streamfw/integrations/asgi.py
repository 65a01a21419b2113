"""An app inside a web application: Starlette, FastAPI, or whatever has an ASGI lifespan.

    stream = App(ship)
    web = Starlette(routes=[Route("/health", health(stream))], lifespan=lifespan(stream))

The app runs from the server's startup to its shutdown, in the server's event loop, so an endpoint publishes with
``await stream.publish(..)``. Nothing here needs a web framework.

**A subscriber that ends with an error does not end the web application.** ASGI servers cannot be ended from their
lifespan: uvicorn and hypercorn go on to serve when it breaks, on what the lifespan has closed already. So the body of
the lifespan is not cancelled: the error is logged, `health` answers 503 from then on, what still works goes on (other
subscribers, publishing), and the error is raised when the server shuts down. Whoever watches the health restarts the
process; where nobody does, ``exit_on_failure=True`` has the server shut down at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from streamfw.app import App

__all__ = ["STATE", "HealthEndpoint", "Lifespan", "health", "lifespan"]

logger = logging.getLogger("streamfw")

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]

STATE: Final = "streamfw"
"""The key of the app in the lifespan's state: ``request.state.streamfw`` in an endpoint."""


def lifespan(
    app: App,
    inner: Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]] | None = None,
    *,
    exit_on_failure: bool = False,
) -> Lifespan:
    """A lifespan that runs `app`.

    `inner` is the web application's own (``@asynccontextmanager async def own(web): ..``). It is entered first and left
    last, so that what it opens is there for handlers until the last has finished; the state it yields is kept, and the
    app joins it as `STATE`.

    `exit_on_failure`: when a subscriber ends with an error, send this process SIGTERM, at which every ASGI server shuts
    down, so that a supervisor starts it again.

    Entering raises what `App.running` raises: the server does not start. The lifespan's end drains the app (at most its
    ``drain_timeout``; let the server's own limit be longer), and raises the error that a subscriber has ended with.
    """

    @asynccontextmanager
    async def run(web: Any) -> AsyncGenerator[Mapping[str, Any], None]:
        async with AsyncExitStack() as stack:
            state = None if inner is None else await stack.enter_async_context(inner(web))
            await stack.enter_async_context(app.running(on_failure=_exit if exit_on_failure else _go_on))
            yield {**(state or {}), STATE: app}

    return run


def _go_on(error: BaseException) -> None:
    """The app has logged it, and its health tells it."""


def _exit(error: BaseException) -> None:
    if threading.current_thread() is threading.main_thread():
        logger.error("a subscriber has ended: sending SIGTERM to this process, so that its server shuts down")
        signal.raise_signal(signal.SIGTERM)
    else:  # a server in a thread has no signals, and its process is not its own
        logger.error("a subscriber has ended; this server runs in a thread, so nobody can shut it down from here")


def health(app: App, *, details: bool = True) -> HealthEndpoint:
    """An ASGI application that answers 200 while every subscriber has a live source, else 503; no I/O.

    The body is JSON: ``{"ok": false, "subscribers": {"ship('orders')": {"ok": false, "detail": "..."}}}``; with
    `details` False only ``ok``, for endpoints that strangers see. To be mounted, or given to a Starlette ``Route``.
    """
    return HealthEndpoint(app, details)


class HealthEndpoint:
    """See `health`."""

    def __init__(self, app: App, details: bool) -> None:
        self._app, self._details = app, details

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one GET or HEAD."""
        if scope["type"] != "http":
            raise RuntimeError(f"the health endpoint speaks HTTP, not {scope['type']}")
        if scope["method"] not in ("GET", "HEAD"):
            return await _answer(send, 405, b"", [(b"allow", b"GET, HEAD")])
        told = self._app.health()
        body = msgspec.json.encode(told if self._details else {"ok": told.ok})
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        await _answer(send, 200 if told.ok else 503, body, headers, empty=scope["method"] == "HEAD")


async def _answer(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]], empty: bool = False
) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if empty else body})
