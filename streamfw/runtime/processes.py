"""The child processes of an app: the parent's end.

Theory of operation
    A fixed number of children is started with the app (new interpreters, not forks: a fork copies threads, locks and
    connections in whatever state they are), each with one end of a socket pair; there is one thing at a time for each.

        starting --ready--> free --call--> busy --reply--> free
           any state --ends--> gone, and another is started in its place

    A child that ends while it is busy fails that one call, with `WorkerDied`; the calls of the others go on. Who
    cancels a call kills its child, with what that has started itself (a child leads a process group of its own, which
    also keeps a terminal's Ctrl-C away from it), and waits until it is dead: nothing of a message still works when the
    message goes to somebody else.

    No child outlives its parent: on Linux the kernel kills it (``PR_SET_PDEATHSIG``), elsewhere, and for the parent's
    closing, a thread in the child sees the socket hang up.

    What travels is pickled, with a length before it. The body of a single message travels as its bytes and is decoded
    in the child. Measured (CPU us of the event loop, a Struct of 1,000 parts from 63 kB of JSON): decode and pickle it
    here 1,160, pickle the bytes 2; for 58 bytes 1.9 and 0.3.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

from streamfw.errors import BuildError, WorkerDied

from .child import HEADER, Setup, framed
from .settler import backoff
from .slot import SLOT
from .target import Target

__all__ = ["Processes"]

logger = logging.getLogger("streamfw")
CLOSING = 2.0  # seconds that a child may take to end by itself
_LOOK = 1.0  # seconds between two looks at whether children live, beside what their sockets tell
# Runs in the child before anything of ours can be imported: its sys.path is the parent's, and comes first.
_BOOT = """\
import json, os, sys
fd = int(sys.argv[1])
size, path = int(os.read(fd, 12)), b""
while len(path) < size:
    part = os.read(fd, size - len(path))
    if not part:
        sys.exit(1)
    path += part
sys.path[:] = json.loads(path)
from streamfw.runtime.child import main
main(fd)
"""


class Processes:
    """`size` children that run `targets`, each by its number. An async context manager."""

    def __init__(self, size: int, targets: Sequence[Target]) -> None:
        self._size, self._targets = size, targets
        self._free: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()  # the last one used is the warmest
        self._children: set[_Child] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.deaths = 0

    @property
    def pids(self) -> list[int]:
        """Of the children that live."""
        return [child.process.pid for child in self._children]

    async def __aenter__(self) -> Processes:
        """Start all. Raises an `ExceptionGroup` of a `BuildError` when a child cannot import what it is to run."""
        self._loop = asyncio.get_running_loop()
        self._setup = framed(pickle.dumps(Setup.here(self._targets)))
        starts = [self._loop.create_task(self._start()) for _ in range(self._size)]
        try:
            await asyncio.gather(*starts)
        except BaseException as error:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._end()
            if isinstance(error, BuildError):
                raise ExceptionGroup("the processes of handlers cannot be started", [error]) from None
            raise
        self._ticker = self._loop.create_task(self._tick())
        self._keep(self._ticker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all: those that do nothing by themselves, the others at once."""
        await self._end()

    async def _end(self) -> None:
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        children = list(self._children)
        for child in children:
            child.say_goodbye()
        if children:
            ended = [self._loop.create_task(child.ended()) for child in children]
            await asyncio.wait(ended, timeout=CLOSING)
            for child in children:
                child.kill()
            await asyncio.wait(ended)

    def kill(self) -> None:
        """End all children at once; the process itself is about to end."""
        self._closing = True
        for child in self._children:
            child.kill()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- calls

    async def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What target `number` returns or raises. Raises `WorkerDied` when its process ends before it answers, and
        `TypeError` for what cannot be pickled. Cancelled, it kills the process."""
        try:
            job = framed(pickle.dumps((number, args, kwargs), pickle.HIGHEST_PROTOCOL))
        except Exception as error:  # whatever pickling somebody's object raises
            raise TypeError(f"the arguments of {self._targets[number].where} cannot be pickled: {error}") from error
        slot = SLOT.get(None)
        if slot is not None:
            slot.wait()
        child = await self._take()
        if slot is not None:
            slot.begin(in_thread=False)
        try:
            ok, value = pickle.loads(await child.ask(job))
        except asyncio.CancelledError:
            child.kill()
            await _whatever_happens(child.ended())
            raise
        except WorkerDied:
            await _whatever_happens(child.ended())
            how = _how(child.process.returncode)
            raise WorkerDied(f"the process {child.process.pid} of {self._targets[number].where} {how}") from None
        finally:
            if not child.gone:
                self._free.put_nowait(child)
        if ok:
            return value
        raise value

    async def _take(self) -> _Child:
        while (child := await self._free.get()).gone:
            pass  # it ended while it had nothing to do
        return child

    # -- children

    async def _start(self) -> None:
        """Start one child and wait until it is ready. Raises `BuildError`, `OSError` when there can be none."""
        child = _Child(self._died)
        self._children.add(child)
        try:
            await child.start(self._setup)
        except BaseException:
            child.kill()
            await _whatever_happens(child.ended())
            raise
        self._free.put_nowait(child)

    def _died(self, child: _Child) -> None:
        """A child has ended."""
        self._children.discard(child)
        if self._closing or not child.ready:
            return
        if not child.killed:
            self.deaths += 1
            logger.warning("the process %d %s; another is started", child.process.pid, _how(child.process.returncode))
        self._keep(self._loop.create_task(self._replace()))

    async def _replace(self) -> None:
        attempt = 0
        while True:
            try:
                return await self._start()
            except Exception as error:  # no memory for a process, its modules were changed: it may come right again
                logger.error("a process for handlers cannot be started, trying again: %s", error)
            await asyncio.sleep(backoff(attempt))
            attempt += 1

    async def _tick(self) -> None:
        """Notice the end of a child whose socket somebody else still holds (a process that it has started)."""
        while True:
            await asyncio.sleep(_LOOK)
            for child in list(self._children):
                child.look()


class _Child(asyncio.Protocol):
    """One child process, and the socket to it. `died` is called once, when it has ended."""

    process: subprocess.Popen[bytes]

    def __init__(self, died: Any) -> None:
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._reply: asyncio.Future[bytes] | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._started = self.ready = self.gone = self.killed = False

    async def start(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # As `multiprocessing` does it: -X, -W, -O and their like.
            flags = cast("list[str]", getattr(subprocess, "_args_from_interpreter_flags")())  # noqa: B009
            try:
                # In this thread: the kernel ends a child with the thread that started it (`child._die_with`).
                self.process = subprocess.Popen(  # noqa: ASYNC220
                    [sys.executable, *flags, "-c", _BOOT, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                ours.close()
                self.gone = True
                self._end.set_result(None)
                self._died(self)
                raise
        self._started = True
        ours.setblocking(False)
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        path = json.dumps(list(map(str, sys.path))).encode()
        try:
            failure = pickle.loads(await self.ask(b"%12d" % len(path) + path + setup))
        except WorkerDied:
            await self.ended()
            raise BuildError("processes", f"a process {_how(self.process.returncode)} before it was ready") from None
        if failure is not None:
            raise BuildError(*failure)
        self.ready = True

    async def ask(self, job: bytes) -> bytes:
        """Send, and wait for the reply. Raises `WorkerDied` when none will come."""
        if self.gone or self._transport is None:
            raise WorkerDied("it has ended")
        self._reply = self._loop.create_future()
        self._transport.write(job)
        try:
            return await self._reply
        finally:
            self._reply = None

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if len(buffer) < HEADER or len(buffer) < HEADER + (size := int.from_bytes(buffer[:HEADER], "big")):
            return
        reply = bytes(buffer[HEADER : HEADER + size])
        del buffer[: HEADER + size]
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, or is about to."""
        if not self.gone:
            self.gone = True
            self._kill_group()
            self._reap()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(WorkerDied("it has ended"))

    def _reap(self) -> None:
        if self.process.poll() is None:
            self._loop.call_later(0.005, self._reap)
        elif not self._end.done():
            self._end.set_result(None)
            self._died(self)

    def look(self) -> None:
        """Has it ended unnoticed?"""
        if self._transport is not None and not self.gone and self._is_dead():
            self._transport.abort()

    def _is_dead(self) -> bool:
        # Without reaping it: its number must stay its own until its group has been killed.
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: the socket's end has to do
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def say_goodbye(self) -> None:
        """Let it end by itself."""
        if self._transport is not None and not self.gone and self._reply is None:
            self._transport.write_eof()
        else:
            self.kill()

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        if self._started and not self.gone:
            self.killed = True
            self._kill_group()
            if self._transport is None:
                self.connection_lost(None)

    def _kill_group(self) -> None:
        if self.process.returncode is None:  # not reaped, so the number is still its own
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    async def ended(self) -> None:
        """Until it has ended, and is no zombie."""
        await asyncio.shield(self._end)


async def _whatever_happens(wait: Any) -> None:
    """Await to the end, although cancelled meanwhile: the caller is cancelled already."""
    waiting = asyncio.ensure_future(wait)
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError:
            pass


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
