"""The application: brokers, subscribers and a lifespan; built once, then run.

`App.running` is the life of an app in one context manager; `App.run` is that with signals and an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar, Unpack

import msgspec

from .broker import Broker, Connection, Position
from .build import Builder, Built
from .codec import Codec, JsonCodec
from .config import Settings, read
from .errors import ConfigError, NotRunning
from .injection import Injector
from .life import Life
from .lifespan import Lifespan, lifespan_mistakes, open_lifespan, state_type
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
from .runtime.pump import Pump
from .runtime.replies import Inbox
from .subscriber import Declaration, Options, declarations, subscriber

__all__ = ["App", "AppHealth"]

F = TypeVar("F", bound=Callable[..., Any])
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
        self._life: Life | None = None
        self._on_connect: Callable[[str, Connection], None] | None = None  # for tests, which watch what is published

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
        seen: list[object] = []
        for handler in self._handlers:
            if isinstance(handler, Router):
                found.extend(handler.declarations())
                continue
            name = getattr(handler, "__qualname__", repr(handler))
            if handler in seen:
                builder.wrong(name, "is given twice")
                continue
            seen.append(handler)
            marked = declarations(handler)
            if not marked:
                hint = ": App(*handlers)" if isinstance(handler, list | tuple) else ""
                builder.wrong(name, f"is not marked with @subscriber, so nobody knows what it handles{hint}")
            # What was given runs: a decorator above the mark, or an object's method, is not what was marked.
            found.extend(msgspec.structs.replace(one, handler=handler) for one in marked)
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
        self._connection(name)
        assert self._life is not None  # or there would be no connection
        return self._life.inbox(name)

    def _connection(self, name: str) -> Connection:
        if self._life is None:
            raise NotRunning(f"broker {name!r} is not connected: publish inside app.running(), or in a handler")
        return self._life.connection(name)

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
        if self._life is not None:
            raise NotRunning("the app runs already")
        built = self.build()
        open_state = None if self._lifespan is None else partial(open_lifespan, self._lifespan, self)
        self._life = life = Life(built, self.settings, open_state, on_failure, ends_process, self._on_connect)
        try:
            async with life.running():
                yield self
        finally:
            self._life = None

    @staticmethod
    def _not_in_a_child() -> None:
        if blocking.IN_CHILD:
            raise RuntimeError(
                "a process for handlers has imported this module, and that has run the app: what runs it belongs under "
                "`if __name__ == '__main__':`"
            )

    async def seek(self, subscriber: str | Callable[..., Any], to: Position) -> None:
        """Let a running subscriber (the handler, or its name) read on from elsewhere in its log.

        It concerns the partitions that this process has. What of them is at hand is dropped; handlers that run
        finish, and their settlement changes nothing. The group's committed position moves as well, also back.

        Raises `NotRunning`, `Unsupported` on a broker that is no log, `ValueError` for an unknown subscriber or
        partition, and `BrokerError`.
        """
        if self._life is None:
            raise NotRunning("the app does not run, so nobody reads")
        await self._life.seek(subscriber, to)

    def health(self) -> AppHealth:
        """Whether the app runs and every subscriber has a live source; no I/O."""
        if self._life is None:
            return health_of(False, None, [])
        return health_of(self._life.started, self._life.failure, list(self._life.pumps))

    @property
    def failure(self) -> BaseException | None:
        """The error that ended a subscriber, the first of them, while the app runs."""
        return None if self._life is None else self._life.failure

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
        return [] if self._life is None else list(self._life.inboxes.values())

    @property
    def pumps(self) -> Sequence[Pump]:
        """The running pumps, for what watches them."""
        return [] if self._life is None else self._life.pumps

    @property
    def state(self) -> tuple[object, ...]:
        """What the lifespan yielded, while the app runs."""
        return () if self._life is None else self._life.state

    def configure_logging(self, *, process: bool = False) -> None:
        """Log as the settings say, unless logging is configured already. Wrong settings are for `build` to tell."""
        settings, _ = self._read()
        configure_logging(settings.log == "json", settings.log_level.upper(), process=process)

    def run(self, *, wait: float | None = None) -> None:
        """Run until SIGINT, SIGTERM or SIGHUP, then drain. Returns after a drain; raises `SystemExit`: 1 after a
        failure, 130 after a second signal, which ends at once.

        `wait`: seconds to wait for a server that is away at start (default: the configuration's, or for ever).
        """
        from .runtime.main import run

        self._not_in_a_child()
        code = run(self, wait)
        if code:
            sys.exit(code)
