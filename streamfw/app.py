"""The application: brokers, subscribers and a lifespan; built once, then run.

`App.running` is the life of an app in one context manager; `App.run` is that with signals and an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .broker import Broker, Connection, Health
from .build import Builder, Built
from .codec import Codec, JsonCodec
from .config import Settings, load
from .errors import BrokerError, BuildError, ConfigError, NotRunning
from .message import Headers, HeaderValues
from .middleware import Middleware
from .publisher import Publisher, outgoing, send
from .runtime.pump import Pump
from .runtime.settler import backoff
from .subscriber import Declaration, declarations, subscriber

__all__ = ["App", "AppHealth"]

logger = logging.getLogger("streamfw")
F = TypeVar("F", bound=Callable[..., Any])
Lifespan = Callable[..., AsyncIterator[Any]]


class AppHealth(msgspec.Struct, frozen=True):
    """`ok` when every subscriber has a live source; otherwise `subscribers` says what each of them has."""

    ok: bool
    subscribers: dict[str, Health]


class App:
    """An application.

        app = App(ship, bill, name="shop")
        app.run()

    - `subscribers`: functions marked with `@subscriber`; more come with `app.subscriber`.
    - `name`: the default group of its subscribers.
    - `brokers`: name to URL (or a `Broker`); ``default`` is the one that subscribers use unless they say otherwise.
    - `lifespan`: an async generator function; what it yields is the state that handlers take by type
      (``Annotated[Pool, State]``); yield a tuple for several. It may take the app as its parameter.
    - `middleware`: around every handler, the first outermost. `codec`: how bodies are encoded (default JSON).
    - `publishers`: `Publisher` objects that belong to this app.
    - `drain_timeout`: seconds that handlers may take to finish when the app stops.
    - `config`: the configuration file (default ``streamfw.toml``, if there is one).

    Arguments win over the environment, the environment over the file. Both are read once, by `build` or by the first
    look at `settings`.
    """

    def __init__(
        self,
        *subscribers: Callable[..., Any],
        name: str | None = None,
        brokers: Mapping[str, str | Broker] | None = None,
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (),
        publishers: Sequence[Publisher[Any]] = (),
        codec: Codec | None = None,
        drain_timeout: float | None = None,
        config: str | Path | None = None,
    ) -> None:
        self._handlers: list[Callable[..., Any]] = list(subscribers)
        self._name, self._drain_timeout, self._config = name, drain_timeout, config
        self._brokers: dict[str, str | Broker] = dict(brokers or {})
        self._lifespan, self._middleware = lifespan, list(middleware)
        self._publishers = list(publishers)
        self._codec: Codec = codec or JsonCodec()
        self._built: Built | None = None
        self._settings: Settings | None = None
        self._connections: dict[str, Connection] = {}
        self._pumps: list[Pump] = []
        self._running = False
        self._failure: BaseException | None = None
        self._host: asyncio.Task[Any] | None = None
        self._interrupted = self._draining = False
        self.state: tuple[object, ...] = ()

    # -- declaring

    def subscriber(self, source: str | object, /, **options: Any) -> Callable[[F], F]:
        """Like `streamfw.subscriber`, and the function belongs to this app at once."""
        mark = subscriber(source, **options)

        def add(handler: F) -> F:
            marked = mark(handler)
            if handler not in self._handlers:
                self._handlers.append(handler)
            self._built = None
            return marked

        return add

    def use(self, broker: str | Broker, name: str = "default") -> None:
        """Let `name` be this broker, over whatever the configuration says. Before the app is built."""
        self._brokers[name] = broker
        self._built = None

    def configure(self, config: str | Path) -> None:
        """Read this configuration file, over the one that the app was made with. Before the app is built."""
        self._config, self._settings, self._built = config, None, None

    def broker(self, name: str = "default") -> Broker:
        """The broker in force under this name; builds the app. Raises `NotRunning` where there is none."""
        brokers = self.build().brokers
        if name not in brokers:
            raise NotRunning(f"there is no broker {name!r}; known are {', '.join(brokers)}")
        return brokers[name]

    @property
    def settings(self) -> Settings:
        """The settings in force. Raises `ConfigError`."""
        if self._settings is None:
            settings = load(self._config)
            if self._name is not None:
                settings.name = self._name
            if self._drain_timeout is not None:
                settings.drain_timeout = self._drain_timeout
            self._settings = settings
        return self._settings

    # -- building

    def build(self) -> Built:
        """Check and compile everything, once; no I/O but the configuration file.

        Raises one `ExceptionGroup` that names every mistake (`BuildError`, `ConfigError`).
        """
        if self._built is None:
            try:
                settings = self.settings
            except ConfigError as error:
                raise ExceptionGroup(f"the app cannot be built:\n  1. {error}\n", [error]) from None
            builder = Builder(
                settings, self._brokers, self._codec, self._middleware, self._connection, self._state_type()
            )
            self._built = builder.build(self._declarations(builder), self._publishers)
        return self._built

    def _declarations(self, builder: Builder) -> list[Declaration]:
        found: list[Declaration] = []
        for handler in self._handlers:
            marked = declarations(handler)
            if not marked:
                name = getattr(handler, "__qualname__", repr(handler))
                builder.wrong(name, "is not marked with @subscriber, so nobody knows what it handles")
            found.extend(marked)
        return found

    def _state_type(self) -> Any:
        """The type that the lifespan says it yields; Any when it does not say, None without a lifespan."""
        if self._lifespan is None:
            return None
        try:
            returns = typing.get_type_hints(self._lifespan).get("return")
        except Exception:  # an annotation that cannot be evaluated: found out when it yields
            return Any
        arguments = typing.get_args(returns)
        return arguments[0] if arguments else Any

    # -- publishing

    async def publish(
        self,
        name: str,
        payload: object,
        *,
        broker: str = "default",
        key: str | None = None,
        headers: HeaderValues | Headers | None = None,
        delay: float = 0.0,
        message_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        priority: int = 0,
    ) -> str:
        """Publish to `name` and return the message id once the broker has accepted it; see `Publisher.publish`."""
        message = outgoing(
            self._codec,
            name,
            payload,
            key=key,
            headers=headers,
            delay=delay,
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
            priority=priority,
        )
        await send(self._connection(broker), message)
        return message.message_id

    def _connection(self, name: str) -> Connection:
        connection = self._connections.get(name)
        if connection is None:
            raise NotRunning(f"broker {name!r} is not connected: publish inside app.running(), or in a handler")
        return connection

    def connection(self, broker: str = "default") -> Connection:
        """The open connection of a broker, while the app runs. Raises `NotRunning`."""
        return self._connection(broker)

    # -- running

    @asynccontextmanager
    async def running(self) -> AsyncIterator[App]:
        """Run the app for the life of the context; drain at its end.

        Raises what `build` raises, a `BrokerError` that waiting cannot help, and, inside the body, the error that
        ended a subscriber (the body is cancelled then).
        """
        if self._running:
            raise NotRunning("the app runs already")
        built = self.build()
        self._running, self._failure, self._interrupted, self._draining = True, None, False, False
        self._host = asyncio.current_task()
        try:
            async with AsyncExitStack() as stack:
                for name, broker in built.brokers.items():
                    self._connections[name] = await self._patiently(
                        f"broker {name!r} ({broker.describe()})", partial(self._connect, stack, broker)
                    )
                self.state = await self._enter_lifespan(stack)
                self._bind_states(built)
                stack.push_async_callback(self._drain)
                await self._start(built)
                yield self
        except asyncio.CancelledError:
            if self._failure is None:
                raise
        finally:
            host, self._host = self._host, None
            self._running, self._connections, self._pumps, self.state = False, {}, [], ()
            if self._interrupted and host is not None:
                host.uncancel()
        if self._failure is not None:
            raise self._failure

    async def _connect(self, stack: AsyncExitStack, broker: Broker) -> Connection:
        return await stack.enter_async_context(broker.connect())

    async def _patiently(self, what: str, attempt: Callable[[], Any]) -> Any:
        """Do `attempt`, again and again while the server is away, for `Settings.wait` seconds."""
        loop = asyncio.get_running_loop()
        wait = self.settings.wait
        deadline = None if wait is None else loop.time() + wait
        tries = 0
        while True:
            try:
                return await attempt()
            except BrokerError as error:
                pause = min(backoff(tries), 5.0)
                tries += 1
                if not error.transient or (deadline is not None and loop.time() + pause > deadline):
                    raise
                logger.warning("%s: %s; trying again", what, error)
                await asyncio.sleep(pause)

    async def _enter_lifespan(self, stack: AsyncExitStack) -> tuple[object, ...]:
        if self._lifespan is None:
            return ()
        parameters = inspect.signature(self._lifespan).parameters
        manager: Any = self._lifespan(self) if parameters else self._lifespan()
        if not hasattr(manager, "__aenter__"):
            manager = contextlib.asynccontextmanager(lambda: manager)() if hasattr(manager, "__anext__") else manager
        entered: AbstractAsyncContextManager[Any] = manager
        state = await stack.enter_async_context(entered)
        return state if isinstance(state, tuple) else (state,)

    def _bind_states(self, built: Built) -> None:
        errors = []
        for one in built.subscribers:
            for parameter, kind in one.compiled.states.items():
                base = typing.get_origin(kind) or kind
                found = [value for value in self.state if isinstance(base, type) and isinstance(value, base)]
                if found:
                    one.compiled.bind(parameter, found[0])
                else:
                    message = f"parameter {parameter!r}: the lifespan yielded no {kind!r}, but {self.state!r:.200}"
                    errors.append(BuildError(one.declaration.where, message))
        if errors:
            raise ExceptionGroup("the lifespan does not yield what handlers take", errors)

    async def _start(self, built: Built) -> None:
        for one in built.subscribers:
            pump = one.pump = Pump(one.make_plan(one.source), self._pump_failed)
            connection = self._connection(one.broker)
            await self._patiently(one.declaration.where, partial(pump.open, connection))
            self._pumps.append(pump)
        for pump in self._pumps:
            pump.start()
        logger.info("%s runs with %d subscribers", self.settings.name, len(self._pumps))

    def _pump_failed(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logger.error("a subscriber ended: %s", error)
            if self._host is not None and not self._interrupted and not self._draining:
                self._interrupted = True
                self._host.cancel()

    async def _drain(self) -> None:
        """Drain all pumps under one deadline. A cancellation that arrives meanwhile (ours may be late) is not lost, and
        does not leave sources open: it is raised when the drain is over, which is bounded."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        ends = [asyncio.ensure_future(pump.drain(deadline)) for pump in self._pumps]
        cancelled = False
        while pending := [end for end in ends if not end.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                cancelled = True
        for end in ends:
            if not end.cancelled() and (error := end.exception()) is not None:
                logger.error("while draining: %r", error, exc_info=error)
        if cancelled:
            raise asyncio.CancelledError

    def health(self) -> AppHealth:
        """Whether every subscriber has a live source; no I/O."""
        subscribers = {pump.plan.where: pump.health() for pump in self._pumps}
        return AppHealth(self._running and all(one.ok for one in subscribers.values()), subscribers)

    @property
    def pumps(self) -> Sequence[Pump]:
        """The running pumps, for what watches them."""
        return self._pumps

    def run(self, *, wait: float | None = None) -> None:
        """Run until SIGINT or SIGTERM, then drain. Returns after a drain; raises `SystemExit`: 1 after a failure, 130
        after a second signal, which ends at once.

        `wait`: seconds to wait for a server that is away at start (default: the configuration's, or for ever).
        """
        from .runtime.main import run

        code = run(self, wait)
        if code:
            sys.exit(code)
