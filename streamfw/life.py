"""One run of an app: what is open while it runs, from the first connection to the end of the drain."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from .broker import Broker, Connection, Position
from .build import Built, BuiltSubscriber
from .config import Settings, near
from .ending import to_its_end
from .errors import BrokerError, BrokerUnavailable, BuildError, ConfigError, NotRunning, Unsupported
from .lifespan import find_state
from .runtime import blocking
from .runtime.plan import Counters
from .runtime.pump import Pump
from .runtime.replies import Inbox
from .runtime.settler import backoff
from .runtime.watchdog import Watchdog

__all__ = ["Life"]

logger = logging.getLogger("streamfw")
T = TypeVar("T")


class Life:
    """What an app has while it runs. `failure` is the error that ended a subscriber, the first of them.

    `on_failure` is called with it (by default the body of `running` is cancelled, and raises it). `on_connect` is told
    each connection. `open_state` opens the lifespan.
    """

    def __init__(
        self,
        built: Built,
        settings: Settings,
        open_state: Callable[[], AbstractAsyncContextManager[Any]] | None,
        on_failure: Callable[[BaseException], None] | None,
        ends_process: bool,
        on_connect: Callable[[str, Connection], None] | None,
    ) -> None:
        self._built, self._settings, self._open_state = built, settings, open_state
        self._on_failure, self._ends_process = on_failure or self._interrupt, ends_process
        self._on_connect = on_connect
        self.connections: dict[str, Connection] = {}
        self.inboxes: dict[str, Inbox] = {}
        self.pumps: list[Pump] = []
        self.state: tuple[object, ...] = ()
        self.started = False
        self.failure: BaseException | None = None
        self._host: asyncio.Task[Any] | None = None
        self._interrupted = self._draining = False
        self._patience: float | None = None  # until when, of the loop's clock, a server is waited for at start

    def connection(self, name: str) -> Connection:
        """An open connection. Raises `NotRunning`, `ConfigError` for a name that there is not."""
        connection = self.connections.get(name)
        if connection is None:
            if self.started:
                raise ConfigError(f"brokers.{name}", f"there is no broker {name!r}{near(name, self.connections)}")
            raise NotRunning(f"broker {name!r} is not connected: publish inside app.running(), or in a handler")
        return connection

    def inbox(self, name: str) -> Inbox:
        """The inbox for replies on a broker; it opens when it is first asked for something."""
        inbox = self.inboxes.get(name)
        if inbox is None:
            capabilities, member = self._built.brokers[name].capabilities, os.urandom(8).hex()
            inbox = self.inboxes[name] = Inbox(name, self.connection(name), capabilities, member, self.failed)
        return inbox

    async def seek(self, subscriber: str | Callable[..., Any], to: Position) -> None:
        """See `App.seek`."""
        found = [
            one
            for one in self._built.subscribers
            if subscriber in (one.declaration.handler, one.declaration.handler_name)
        ]
        if not found:
            names = [one.declaration.handler_name for one in self._built.subscribers]
            raise ValueError(f"there is no subscriber {subscriber!r}{near(str(subscriber), names)}")
        for one in found:
            if not one.capabilities.seek:
                raise Unsupported(f"{one.declaration.where}: broker {one.broker!r} is no log: it cannot seek")
        for one in found:
            await one.source().seek(to)

    # -- the beginning

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect, start, and at the end drain. Raises the error that ended a subscriber."""
        self._host = asyncio.current_task()
        wait = self._settings.wait
        self._patience = None if wait is None else asyncio.get_running_loop().time() + wait
        try:
            async with AsyncExitStack() as stack:
                for name, broker in self._built.brokers.items():
                    what = f"broker {name!r} ({broker.describe()})"
                    self.connections[name] = await self._patiently(what, partial(self._connect, stack, name, broker))
                await self._enter_lifespan(stack)
                await stack.enter_async_context(self._built.offload.running())
                self._watch_the_loop(stack)
                stack.push_async_callback(self._drain)
                await self._start()
                self.started = True
                yield
        except asyncio.CancelledError:
            if self.failure is None:
                raise
        finally:
            host, self._host = self._host, None
            self.started = False
            if self._interrupted and host is not None:
                host.uncancel()
        if self.failure is not None:
            raise self.failure

    async def _connect(self, stack: AsyncExitStack, name: str, broker: Broker) -> Connection:
        connection = await stack.enter_async_context(broker.connect())
        if self._on_connect is not None:
            self._on_connect(name, connection)
        return connection

    async def _patiently(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do `attempt`, again and again while the server is away; the whole start may take `Settings.wait` seconds."""
        loop = asyncio.get_running_loop()
        tries, last = 0, ""
        while True:
            try:
                async with asyncio.timeout_at(self._patience) as bound:
                    return await attempt()
            except TimeoutError as error:
                if not bound.expired():
                    raise
                raise BrokerUnavailable(f"{what}: no answer within wait={self._settings.wait:g} s{last}") from error
            except BrokerError as error:
                left = math.inf if self._patience is None else self._patience - loop.time()
                if not error.transient or left <= 0:
                    raise
                logger.warning("%s: %s; trying again", what, error)
                last = f"; before that: {error}"
                await asyncio.sleep(min(backoff(tries), 5.0, left))
                tries += 1

    async def _enter_lifespan(self, stack: AsyncExitStack) -> None:
        if self._open_state is not None:
            state = await stack.enter_async_context(self._open_state())
            self.state = state if type(state) is tuple else (state,)
        errors = []
        for one in self._built.subscribers:
            for parameter, kind in one.compiled.states.items():
                value, mistake = find_state(self.state, kind)
                if mistake is None:
                    one.compiled.bind(parameter, value)
                else:
                    errors.append(BuildError(one.declaration.where, f"parameter {parameter!r}: {mistake}"))
        if errors:
            raise ExceptionGroup("the lifespan does not yield what handlers take", errors)

    def _watch_the_loop(self, stack: AsyncExitStack) -> None:
        if self._settings.watchdog:
            watchdog = Watchdog(self._settings.watchdog, lambda: self.pumps)
            watchdog.start()
            stack.callback(watchdog.stop)

    async def _start(self) -> None:
        for one in self._built.subscribers:
            one.pump = Pump(one.make_plan(one.source), self.failed)
        await self._open_all()
        self.pumps = [one.pump for one in self._built.subscribers]
        for pump in self.pumps:
            pump.start()
        brokers = {name: broker.describe() for name, broker in self._built.brokers.items()}
        facts = {"app": self._settings.name, "brokers": brokers}
        count = len(self.pumps)
        subscribers = f"{count} subscriber{'' if count == 1 else 's'}"
        logger.info("%s runs with %s", self._settings.name, subscribers, extra=facts)

    async def _open_all(self) -> None:
        """Open all sources at the same time: one may have to wait for others in its consumer group. Raises the first
        error, one that waiting cannot help if there is one; `pumps` are those that must be closed."""

        async def open_one(one: BuiltSubscriber) -> None:
            opening = partial(one.pump.open, self.connection(one.broker))
            await self._patiently(one.declaration.where, opening)
            self.pumps.append(one.pump)

        try:
            async with asyncio.TaskGroup() as tasks:
                for one in self._built.subscribers:
                    tasks.create_task(open_one(one))
        except BaseExceptionGroup as errors:
            every = errors.exceptions
            terminal = [error for error in every if not (isinstance(error, BrokerError) and error.transient)]
            raise (terminal or every)[0] from None

    # -- a failure

    def failed(self, error: BaseException) -> None:
        """A subscriber, or an inbox, cannot go on."""
        if self.failure is None:
            self.failure = error
            logger.error("a subscriber ended: %s", error, extra={"app": self._settings.name})
            if not self._draining:
                self._on_failure(error)

    def _interrupt(self, error: BaseException) -> None:
        """Cancel the body of `running`, which raises the error then."""
        if self._host is not None and not self._interrupted:
            self._interrupted = True
            self._host.cancel()

    # -- the end

    async def _drain(self) -> None:
        """Drain all pumps under one deadline. A cancellation that arrives meanwhile (ours may be late) is not lost, and
        does not leave sources open: it is raised when the drain is over, which is bounded (but for handlers that run
        in threads)."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout
        await to_its_end(self._drain_all(deadline))

    async def _drain_all(self, deadline: float) -> None:
        ends = (pump.drain(deadline, self._ends_process) for pump in self.pumps)
        failed = await asyncio.gather(*ends, return_exceptions=True)
        if any(pump.stuck for pump in self.pumps):
            self._leave_threads_behind()
        # Last: handlers that finish may still wait for replies.
        failed += await asyncio.gather(*(inbox.close() for inbox in self.inboxes.values()), return_exceptions=True)
        for error in failed:
            if isinstance(error, BaseException):
                logger.error("while draining: %r", error, exc_info=error)
        if self.started:
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        total = Counters.sum(pump.counters for pump in self.pumps)
        facts: dict[str, object] = {"app": self._settings.name, **msgspec.structs.asdict(total)}
        text = "%s has stopped: %d acknowledged, %d failed and tried again, %d dead letters, %d dropped, %d given back"
        counts = (total.acked, total.retried, total.dead, total.dropped, total.released)
        logger.info(text, self._settings.name, *counts, extra=facts)

    def _leave_threads_behind(self) -> None:
        """End the process, with threads that still handle messages. Nothing that they use is closed, and their
        deliveries are not given back: nobody else may have them while the threads live, and those end with the
        process. To the broker it is a crash with these deliveries at hand."""
        logger.error("the drain is over, but handlers run in threads: ending the process; their messages come again")
        self._built.offload.end_at_once()
        blocking.end_the_process()
