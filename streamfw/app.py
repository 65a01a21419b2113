"""The application: brokers, subscribers and a lifespan; built once, then run.

`App.running` is the life of an app in one context manager; `App.run` is that with signals and an exit code.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar, Unpack

import msgspec

from .broker import Broker, Connection
from .build import Builder, Built
from .codec import Codec, JsonCodec
from .config import Settings, near, read
from .errors import BrokerError, BrokerUnavailable, BuildError, ConfigError, NotRunning
from .injection import Injector
from .lifespan import Lifespan, find_state, lifespan_mistakes, open_lifespan, state_type
from .middleware import Middleware
from .observe.health import AppHealth, health_of
from .observe.logs import configure_logging
from .observe.metrics import Metric, collect
from .observe.tracing import Observation, Tracer
from .outlet import Outlet, PublishMiddleware, PublishOptions
from .placement import offload_mistakes
from .publisher import Publisher
from .router import Router
from .runtime import blocking
from .runtime.plan import Counters
from .runtime.pump import Pump
from .runtime.replies import Inbox
from .runtime.settler import backoff
from .runtime.watchdog import Watchdog
from .subscriber import Declaration, Options, declarations, subscriber

__all__ = ["App", "AppHealth"]

logger = logging.getLogger("streamfw")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")


class App:
    """An application.

        app = App(ship, bill, name="shop")
        app.run()

    - `subscribers`: functions marked with `@subscriber`, and `Router` objects; more come with `app.subscriber`.
    - `name`: the default group of its subscribers.
    - `brokers`: name to URL (or a `Broker`); ``default`` is the one that subscribers use unless they say otherwise.
    - `lifespan`: an async generator function, or a function that gives an async context manager; what it yields is the
      state that handlers take by type (``Annotated[Pool, State]``); yield a tuple for several. It may take the app as
      its parameter.
    - `middleware`: around every handler, the first outermost; `publish_middleware`: around every publish. `codec`: how
      bodies are encoded (default JSON).
    - `publishers`: `Publisher` objects that belong to this app.
    - `drain_timeout`: seconds that handlers may take to finish when the app stops.
    - `threads`: how many `def` handlers may run at the same time (default 40). `processes`: how many child processes
      handlers with ``run_in="process"`` have (default: one for each of their workers).
    - `watchdog`: seconds that a handler may block the event loop before the log says so (default 1.0; None: never).
    - `tracer`: what sees each handler and publish begin and end (`streamfw.observe.Tracer`).
    - `durations`: count how long handlers take, for `metrics`; a subscriber may say otherwise.
    - `config`: the configuration file (default ``streamfw.toml``, if there is one).

    Arguments win over the environment, the environment over the file. Both are read once, by `build` or by the first
    look at `settings`.
    """

    def __init__(
        self,
        *subscribers: Callable[..., Any] | Router,
        name: str | None = None,
        brokers: Mapping[str, str | Broker] | None = None,
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (),
        publish_middleware: Sequence[PublishMiddleware] = (),
        publishers: Sequence[Publisher[Any]] = (),
        codec: Codec | None = None,
        drain_timeout: float | None = None,
        threads: int | None = None,
        processes: int | None = None,
        watchdog: float | EllipsisType | None = ...,
        tracer: Tracer[Any] | None = None,
        durations: bool = False,
        config: str | Path | None = None,
    ) -> None:
        self._handlers: list[Callable[..., Any] | Router] = list(subscribers)
        self._name, self._config = name, config
        options = {"drain_timeout": drain_timeout, "threads": threads, "processes": processes}
        self._given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
        if watchdog is not ...:
            self._given["watchdog"] = watchdog
        self._mistakes: list[tuple[str, str]] = list(offload_mistakes(self._given))
        given: object = brokers or {}
        if not isinstance(given, Mapping):
            self._mistakes.append(("brokers", f'names and their URLs, {{"default": ..}}, not {type(given).__name__}'))
            given = {}
        if name == "":
            self._mistakes.append(("name", "the name of an app is not empty"))
        self._brokers: dict[str, str | Broker] = dict(given)
        self._lifespan, self._middleware = lifespan, middleware
        self._publish_middleware, self._publishers = publish_middleware, list(publishers)
        self._codec: Codec = codec if codec is not None else JsonCodec()
        self._observation, self._injectors = Observation(tracer, durations), list[Injector]()
        self._built: Built | None = None
        self._settings: Settings | None = None
        self._connections: dict[str, Connection] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._pumps: list[Pump] = []
        self._running = self._started = False
        self._patience: float | None = None  # until when, of the loop's clock, a server is waited for at start
        self._failure: BaseException | None = None
        self._host: asyncio.Task[Any] | None = None
        self._on_failure: Callable[[BaseException], None] = self._interrupt
        self._interrupted = self._draining = False
        self._ends_process = False
        self._on_connect: Callable[[str, Connection], None] | None = None  # for tests, which watch what is published
        self.state: tuple[object, ...] = ()

    # -- declaring

    def subscriber(self, source: str | object, /, **options: Unpack[Options]) -> Callable[[F], F]:
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

    def inject(self, injector: Injector) -> None:
        """Let `injector` fill the parameters of handlers that are of its kind. Before the app is built."""
        self._injectors.append(injector)
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
        """The settings in force. Raises `ConfigError`, the first of them."""
        settings, errors = self._read()
        if errors:
            raise errors[0]
        return settings

    def _read(self) -> tuple[Settings, list[ConfigError]]:
        if self._settings is None:
            settings, errors = read(self._config)
            if self._name is not None:
                settings.name = self._name
            for option, value in self._given.items():
                setattr(settings, option, value)
            if errors:
                return settings, errors
            self._settings = settings
        return self._settings, []

    # -- building

    def build(self) -> Built:
        """Check and compile everything, once; no I/O but the configuration file.

        Raises one `ExceptionGroup` that names every mistake (`BuildError`, `ConfigError`).
        """
        if self._built is None:
            settings, errors = self._read()
            builder = Builder(
                settings,
                errors,
                self._brokers,
                self._codec,
                self._middleware,
                self._publish_middleware,
                self._connection,
                self._inbox,
                state_type(self._lifespan),
                self._observation,
                self._injectors,
            )
            for where, mistake in (*self._mistakes, *lifespan_mistakes(self._lifespan)):
                builder.wrong(where, mistake)
            self._built = builder.build(self._declarations(builder), self._publishers)
        return self._built

    def _declarations(self, builder: Builder) -> list[Declaration]:
        found: list[Declaration] = []
        for handler in self._handlers:
            if isinstance(handler, Router):
                found.extend(handler.declarations())
                continue
            marked = declarations(handler)
            if not marked:
                name = getattr(handler, "__qualname__", repr(handler))
                builder.wrong(name, "is not marked with @subscriber, so nobody knows what it handles")
            found.extend(marked)
        return found

    # -- publishing

    async def publish(
        self, name: str, payload: object, *, broker: str = "default", **options: Unpack[PublishOptions]
    ) -> str:
        """Publish to `name` and return the message id once the broker has accepted it; see `Publisher.publish`."""
        return await self._outlet(broker).publish(name, payload, **options)

    async def request(
        self,
        name: str,
        payload: object,
        reply: type[R],
        *,
        timeout: float = 30.0,
        broker: str = "default",
        **options: Unpack[PublishOptions],
    ) -> R:
        """Publish to `name` and return what its handler returned, as `reply`; see `Publisher.request`."""
        return await self._outlet(broker).request(name, payload, reply, timeout, **options)

    def _outlet(self, name: str) -> Outlet:
        outlet = self._built.outlets.get(name) if self._built is not None else None
        if outlet is None:
            self._connection(name)  # says whether there is no such broker, or it is not connected
            raise NotRunning(f"broker {name!r} is not connected")
        return outlet

    def _inbox(self, name: str) -> Inbox:
        inbox = self._inboxes.get(name)
        if inbox is None:
            capabilities = self.broker(name).capabilities
            member = os.urandom(8).hex()
            inbox = self._inboxes[name] = Inbox(name, self._connection(name), capabilities, member, self._pump_failed)
        return inbox

    def _connection(self, name: str) -> Connection:
        connection = self._connections.get(name)
        if connection is None:
            if self._started:
                raise ConfigError(f"brokers.{name}", f"there is no broker {name!r}{near(name, self._connections)}")
            raise NotRunning(f"broker {name!r} is not connected: publish inside app.running(), or in a handler")
        return connection

    def connection(self, broker: str = "default") -> Connection:
        """The open connection of a broker, while the app runs. Raises `NotRunning`, `ConfigError` for another name."""
        return self._connection(broker)

    # -- running

    @asynccontextmanager
    async def running(
        self, *, on_failure: Callable[[BaseException], None] | None = None, ends_process: bool = False
    ) -> AsyncIterator[App]:
        """Run the app for the life of the context; drain at its end.

        Raises what `build` raises, a `BrokerError` that waiting cannot help, and, inside the body, the error that
        ended a subscriber: the body is cancelled then. With `on_failure` that is called instead, in the loop; what
        still works goes on, `health` tells the error, and it is raised at the end of the body.

        A drain waits for handlers in threads, however long they take. With `ends_process` (as `run` has it) it ends
        the process instead, with exit code 1, 5 s after its deadline.
        """
        self._not_in_a_child()
        self._ends_process = ends_process
        if self._running:
            raise NotRunning("the app runs already")
        built = self.build()
        self._running, self._failure, self._interrupted, self._draining = True, None, False, False
        self._host, self._on_failure = asyncio.current_task(), on_failure or self._interrupt
        wait = self.settings.wait
        self._patience = None if wait is None else asyncio.get_running_loop().time() + wait
        try:
            async with AsyncExitStack() as stack:
                for name, broker in built.brokers.items():
                    self._connections[name] = await self._patiently(
                        f"broker {name!r} ({broker.describe()})", partial(self._connect, stack, name, broker)
                    )
                self.state = await self._enter_lifespan(stack)
                self._bind_states(built)
                await stack.enter_async_context(built.offload.running())
                self._watch_the_loop(stack)
                stack.push_async_callback(self._drain)
                await self._start(built)
                self._started = True
                yield self
        except asyncio.CancelledError:
            if self._failure is None:
                raise
        finally:
            host, self._host = self._host, None
            self._running = self._started = False
            self._connections, self._inboxes, self._pumps, self.state = {}, {}, [], ()
            if self._interrupted and host is not None:
                host.uncancel()
        if self._failure is not None:
            raise self._failure

    @staticmethod
    def _not_in_a_child() -> None:
        if blocking.IN_CHILD:
            raise RuntimeError(
                "a process for handlers has imported this module, and that has run the app: what runs it belongs under "
                "`if __name__ == '__main__':`"
            )

    def _watch_the_loop(self, stack: AsyncExitStack) -> None:
        if self.settings.watchdog:
            watchdog = Watchdog(self.settings.watchdog, lambda: self._pumps)
            watchdog.start()
            stack.callback(watchdog.stop)

    async def _connect(self, stack: AsyncExitStack, name: str, broker: Broker) -> Connection:
        connection = await stack.enter_async_context(broker.connect())
        if self._on_connect is not None:
            self._on_connect(name, connection)
        return connection

    async def _patiently(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do `attempt`, again and again while the server is away; the whole start may take `Settings.wait` seconds."""
        loop = asyncio.get_running_loop()
        tries = 0
        while True:
            try:
                async with asyncio.timeout_at(self._patience) as bound:
                    return await attempt()
            except TimeoutError as error:
                if not bound.expired():
                    raise
                raise BrokerUnavailable(f"{what}: no answer within wait={self.settings.wait:g} s") from error
            except BrokerError as error:
                left = math.inf if self._patience is None else self._patience - loop.time()
                if not error.transient or left <= 0:
                    raise
                logger.warning("%s: %s; trying again", what, error)
                await asyncio.sleep(min(backoff(tries), 5.0, left))
                tries += 1

    async def _enter_lifespan(self, stack: AsyncExitStack) -> tuple[object, ...]:
        if self._lifespan is None:
            return ()
        state = await stack.enter_async_context(open_lifespan(self._lifespan, self))
        return state if type(state) is tuple else (state,)

    def _bind_states(self, built: Built) -> None:
        errors = []
        for one in built.subscribers:
            for parameter, kind in one.compiled.states.items():
                value, mistake = find_state(self.state, kind)
                if mistake is None:
                    one.compiled.bind(parameter, value)
                else:
                    errors.append(BuildError(one.declaration.where, f"parameter {parameter!r}: {mistake}"))
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
        facts = {"app": self.settings.name, "brokers": {n: b.describe() for n, b in built.brokers.items()}}
        logger.info("%s runs with %d subscribers", self.settings.name, len(self._pumps), extra=facts)

    def _pump_failed(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logger.error("a subscriber ended: %s", error, extra={"app": self.settings.name})
            if not self._draining:
                self._on_failure(error)

    def _interrupt(self, error: BaseException) -> None:
        """Cancel the body of `running`, which raises the error then."""
        if self._host is not None and not self._interrupted:
            self._interrupted = True
            self._host.cancel()

    async def _drain(self) -> None:
        """Drain all pumps under one deadline. A cancellation that arrives meanwhile (ours may be late) is not lost, and
        does not leave sources open: it is raised when the drain is over, which is bounded (but for handlers that run
        in threads)."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        drained = asyncio.ensure_future(self._drain_all(deadline))
        cancelled = False
        while not drained.done():
            try:
                await asyncio.wait([drained])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _drain_all(self, deadline: float) -> None:
        ends = (pump.drain(deadline, self._ends_process) for pump in self._pumps)
        failed = await asyncio.gather(*ends, return_exceptions=True)
        if any(pump.stuck for pump in self._pumps):
            self._leave_threads_behind()
        # Last: handlers that finish may still wait for replies.
        failed += await asyncio.gather(*(inbox.close() for inbox in self._inboxes.values()), return_exceptions=True)
        for error in failed:
            if isinstance(error, BaseException):
                logger.error("while draining: %r", error, exc_info=error)
        if self._started:
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        total = Counters.sum(pump.counters for pump in self._pumps)
        facts: dict[str, object] = {"app": self.settings.name, **msgspec.structs.asdict(total)}
        text = "%s has stopped: %d acknowledged, %d failed and tried again, %d dead letters, %d dropped, %d given back"
        counts = (total.acked, total.retried, total.dead, total.dropped, total.released)
        logger.info(text, self.settings.name, *counts, extra=facts)

    def _leave_threads_behind(self) -> None:
        """End the process, with threads that still handle messages. Nothing that they use is closed, and their
        deliveries are not given back: nobody else may have them while the threads live, and those end with the
        process. To the broker it is a crash with these deliveries at hand."""
        logger.error("the drain is over, but handlers run in threads: ending the process; their messages come again")
        if self._built is not None:
            self._built.offload.end_at_once()
        blocking.end_the_process()

    def health(self) -> AppHealth:
        """Whether the app runs and every subscriber has a live source; no I/O."""
        return health_of(self._started, self._failure, list(self._pumps))

    def metrics(self) -> list[Metric]:
        """Counters and gauges of what runs, as they are now: copies of a few integers. From any thread."""
        return collect(self)

    @property
    def built(self) -> Built | None:
        """What `build` has built, for what watches it."""
        return self._built

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The open reply inboxes, for what watches them."""
        return list(self._inboxes.values())

    @property
    def pumps(self) -> Sequence[Pump]:
        """The running pumps, for what watches them."""
        return self._pumps

    def configure_logging(self, *, process: bool = False) -> None:
        """Log as the settings say, unless logging is configured already. Wrong settings are for `build` to tell."""
        settings, _ = self._read()
        configure_logging(settings.log == "json", settings.log_level.upper(), process=process)

    def run(self, *, wait: float | None = None) -> None:
        """Run until SIGINT or SIGTERM, then drain. Returns after a drain; raises `SystemExit`: 1 after a failure, 130
        after a second signal, which ends at once.

        `wait`: seconds to wait for a server that is away at start (default: the configuration's, or for ever).
        """
        from .runtime.main import run

        self._not_in_a_child()
        code = run(self, wait)
        if code:
            sys.exit(code)
