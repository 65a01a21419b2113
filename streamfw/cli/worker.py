"""One worker process as its parent sees it, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from typing import Any

from .lifeline import GRACE, RUNNING

__all__ = ["Worker", "first_of", "how_it_ended"]

logger = logging.getLogger("streamfw")

# Seconds beyond what a worker's own watch allows its drain: one that is stopped (SIGSTOP), or whose interpreter is
# held by foreign code, cannot end itself.
_BEYOND = 5.0


class Worker:
    """A worker process. `ended` is a task that gives its exit code; `ran` tells whether its app runs, or has run."""

    def __init__(self, process: Process, lifeline: socket.socket) -> None:
        self._process, self._lifeline = process, lifeline
        self._loop = asyncio.get_running_loop()
        self._runs = asyncio.Event()
        self._patience = GRACE  # seconds, for one that does not run yet; then it says by itself how long it may take
        self._asked: float | None = None
        self._late: asyncio.TimerHandle | None = None
        self._loop.add_reader(lifeline, self._listen)
        self.ended = asyncio.create_task(self._until_end())

    @staticmethod
    async def start(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Worker:
        """Start `command`, to which ``--lifeline FD`` is added. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            fd = theirs.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, "--lifeline", str(fd), pass_fds=(fd,), stdin=DEVNULL, process_group=0, env=environ
                )
            except BaseException:
                ours.close()
                raise
        return Worker(process, ours)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def ran(self) -> bool:
        """Whether its app runs, or has run."""
        return self._runs.is_set()

    async def running(self) -> bool:
        """Wait until its app runs, or until it ended before that; which of them."""
        await first_of(self._runs, self.ended)
        return self.ran

    def drain(self) -> None:
        """Ask it to drain; twice is once. It is killed when it takes longer than it said."""
        if self._asked is None and not self.ended.done():
            self._asked = self._loop.time()
            with contextlib.suppress(OSError):  # it is gone
                self._lifeline.shutdown(socket.SHUT_WR)
            self._kill_late()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _kill_late(self) -> None:
        assert self._asked is not None
        end = self._asked + self._patience + _BEYOND  # the patience may have become known since
        if self._loop.time() < end:
            self._late = self._loop.call_at(end, self._kill_late)
        else:
            logger.error("process %d has not drained in %.0f s: killing it", self.pid, end - self._asked)
            self.kill()

    def _listen(self) -> None:
        """Take what the worker has said, which is one thing, or its end."""
        try:
            said = self._lifeline.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""  # it died with our end unread
        self._loop.remove_reader(self._lifeline)
        if said.startswith(RUNNING):
            self._patience = float(said.removeprefix(RUNNING))
            self._runs.set()

    async def _until_end(self) -> int:
        try:
            code = await self._process.wait()
            if not self.ran:
                self._listen()  # it may have said so and died before we looked
            return code
        finally:
            if self._late is not None:
                self._late.cancel()
            self._loop.remove_reader(self._lifeline)
            self._lifeline.close()


async def first_of(*things: asyncio.Event | asyncio.Future[Any], seconds: float | None = None) -> None:
    """Wait until one of these events is set or futures is done, or for so many `seconds`. Cancels none of them."""
    waits = [asyncio.ensure_future(thing.wait()) for thing in things if isinstance(thing, asyncio.Event)]
    try:
        given = [thing for thing in things if not isinstance(thing, asyncio.Event)]
        await asyncio.wait([*waits, *given], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def how_it_ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
