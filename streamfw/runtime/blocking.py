"""Handlers that block: in threads, and in processes.

The worker of a message awaits its handler like any other; here that means to await a thread
(`streamfw.runtime.threads`) or a child process (`streamfw.runtime.processes`). The time that a message waits for one
is not its handler's: the timeout counts from the begin. Both are imported only where they are needed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from streamfw.placement import place_of
from streamfw.publisher import Publisher
from streamfw.sync_publisher import SyncPublisher

from .target import Target

if TYPE_CHECKING:
    from streamfw.codec import Codec
    from streamfw.handler import Compiled
    from streamfw.subscriber import Declaration

    from .processes import Processes
    from .threads import Threads

__all__ = ["Offload", "end_the_process"]

logger = logging.getLogger("streamfw")

Runner: TypeAlias = Callable[..., Awaitable[Any]]

IN_CHILD = False
"""Whether this is a child process, which imports the app's modules but must not run the app."""


class Offload:
    """What one app runs outside of its event loop. Made at build; it runs while the app does.

    `threads`: how many threads at most. `processes`: how many child processes at most (None: as many as the workers of
    the subscribers that need one).
    """

    def __init__(self, threads: int, processes: int | None) -> None:
        self._most_threads, self._most = threads, processes
        self._threads: Threads | None = None
        self._targets: list[Target] = []
        self._workers = 0
        self._publishers: list[SyncPublisher[Any]] = []
        self.processes: Processes | None = None

    def take(self, d: Declaration, codec: Codec, compiled: Compiled) -> None:
        """Let `compiled` run the handler of `d` where it belongs."""
        place = place_of(d.handler, d.run_in)
        if place == "thread":
            compiled.call_instead(self._in_thread(d.handler, d.where))
        elif place == "process":
            compiled.call_instead(self._in_process(d, codec, compiled))

    def _in_thread(self, handler: Callable[..., Any], where: str) -> Runner:
        """`handler` as a coroutine function that runs it in a thread."""
        from .threads import Threads

        self._threads = self._threads or Threads(self._most_threads)
        call = self._threads.call

        def run(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return call(where, handler, args, kwargs)

        return run

    def _in_process(self, d: Declaration, codec: Codec, compiled: Compiled) -> Runner:
        """The handler of `d` as a coroutine function that runs it in a child process."""
        number = len(self._targets)
        raw, positions = compiled.raw_body, list(compiled.arguments)
        parameters = inspect.signature(d.handler).parameters
        self._targets.append(
            Target(
                where=d.where,
                module=d.handler.__module__,
                name=d.handler.__qualname__,
                codec=codec if raw is not None else None,
                body=raw,
                position=None if raw is None or parameters[raw].kind is inspect.Parameter.KEYWORD_ONLY
                else positions.index(raw),
            )
        )  # fmt: skip
        self._workers += d.workers

        def run(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            assert self.processes is not None, "processes run while the app does"
            return self.processes.call(number, args, kwargs)

        return run

    def blocking(self, publisher: Publisher[Any]) -> SyncPublisher[Any]:
        """`publisher` for handlers that are not async: it publishes by the app's loop, while the app runs."""
        sync: SyncPublisher[Any] = SyncPublisher(publisher)
        self._publishers.append(sync)
        return sync

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For the life of the app. Raises `BuildError` when a process cannot import what it is to run."""
        if self._threads is not None:
            self._threads.open()
        self._bind(asyncio.get_running_loop())
        try:
            if not self._targets:
                yield
                return
            from .processes import Processes

            size = self._workers if self._most is None else min(self._most, self._workers)
            async with Processes(size, self._targets) as self.processes:
                yield
        finally:
            self.processes = None
            self._bind(None)

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        for publisher in self._publishers:
            publisher.bind_loop(loop)

    def end_at_once(self) -> None:
        """The process ends without waiting for its threads: its child processes must not be left behind."""
        if self.processes is not None:
            self.processes.kill()


def end_the_process() -> None:
    """End this process now, although threads run: standard output and the log are written, nothing else happens."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or a pipe that nobody reads
            pass
    os._exit(1)
