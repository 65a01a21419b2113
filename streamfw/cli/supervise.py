"""Several processes of one app under a parent: started, started again when they crash, drained together.

Theory of operation
    Each *slot* keeps one worker process. The first is started alone, and the others when it runs: what is wrong with
    the app, its configuration or its credentials is said once, not once a worker.

        starting --RUNNING--> running --ends--> pause (growing, jittered) --> starting
        starting --exit code above 0--> the whole ends, with 1
        starting --killed, or no room for a process--> pause --> starting

    Workers are new processes (not forks: a fork copies threads, locks and connections in whatever state they are), in
    a process group of their own, so that a Ctrl-C in a terminal reaches the parent alone. How a worker learns that it
    is to drain, also by the parent's death: `streamfw.cli.lifeline`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence

from streamfw.outcome import Backoff

from .lifeline import RUNNING

__all__ = ["supervise"]

logger = logging.getLogger("streamfw")

_PAUSE = Backoff(first=0.5, factor=2.0, max=30.0)
_SETTLED_DOWN = 60.0  # seconds; a worker that ran for so long starts the count of crashes again


def supervise(arguments: Sequence[str], workers: int) -> int:
    """Run ``streamfw`` with `arguments` in `workers` processes until a signal; return the exit code: 0 after a drain,
    1 when a worker could not start or did not drain. A second signal ends all at once, with 130."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [%(process)d] %(name)s %(message)s")
    command = [sys.executable, "-m", "streamfw.cli", *arguments]
    return asyncio.run(Supervisor(command, workers).run())


class _Worker:
    """One worker process, from its start to its end."""

    def __init__(self, process: Process, lifeline: socket.socket) -> None:
        self.process, self.lifeline = process, lifeline
        self.ran = False

    def listen(self) -> bool:
        """Take what the worker has said, without waiting; whether it runs, or has run."""
        try:
            self.ran = self.ran or self.lifeline.recv(1) == RUNNING
        except BlockingIOError:
            pass
        except OSError:
            pass  # it died with our end unread
        return self.ran

    def drain(self) -> None:
        """Ask it to drain; twice is once."""
        try:
            self.lifeline.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone

    def kill(self) -> None:
        try:
            self.process.kill()
        except ProcessLookupError:
            pass


class Supervisor:
    """Keeps `workers` processes of `command` (to which ``--lifeline FD`` is added) running."""

    def __init__(self, command: Sequence[str], workers: int) -> None:
        self._command, self._count = list(command), workers
        self._workers: set[_Worker] = set()
        self._draining = asyncio.Event()
        self._one_runs = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Until a signal, or until a worker cannot start; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await asyncio.gather(*(self._keep(slot) for slot in range(1, self._count + 1)))
        finally:
            for worker in self._workers:  # only after an error of our own
                worker.kill()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._code

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining.is_set():
            logger.warning("%s again: ending %d workers at once", name, len(self._workers))
            for worker in self._workers:
                worker.kill()
            logging.shutdown()
            os._exit(130)
        logger.info("%s: draining %d workers (a second signal ends at once)", name, len(self._workers))
        self._drain()

    def _drain(self) -> None:
        self._draining.set()
        self._one_runs.set()
        for worker in self._workers:
            worker.drain()

    async def _keep(self, slot: int) -> None:
        """Keep the worker of one slot running."""
        loop = asyncio.get_running_loop()
        if slot > 1:
            await self._one_runs.wait()
        crashes = 0
        while not self._draining.is_set():
            began = loop.time()
            try:
                worker = await self._start(slot)
            except OSError as error:
                how, fatal = f"cannot be started: {error}", not self._one_runs.is_set()
            else:
                code = await self._until_end(worker)
                if self._draining.is_set():
                    self._note_drained(slot, worker, code)
                    return
                how, fatal = f"(process {worker.process.pid}) {_how(code)}", code > 0 and not worker.ran
            if fatal:
                logger.error("worker %d %s before it ran: ending the others", slot, how)
                self._code = 1
                self._drain()
                return
            crashes = 1 if loop.time() - began > _SETTLED_DOWN else crashes + 1
            pause = _PAUSE.pause(crashes)
            logger.warning("worker %d %s; starting another in %.1f s", slot, how, pause)
            await self._unless_draining(pause)

    async def _start(self, slot: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            fd = theirs.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, "--lifeline", str(fd), pass_fds=(fd,), stdin=DEVNULL, process_group=0
                )
            except BaseException:
                ours.close()
                raise
        worker = _Worker(process, ours)
        self._workers.add(worker)
        asyncio.get_running_loop().add_reader(ours, self._heard, worker)
        if self._draining.is_set():
            worker.drain()
        logger.info("worker %d is process %d", slot, process.pid)
        return worker

    def _heard(self, worker: _Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.lifeline)
        if worker.listen():
            self._one_runs.set()

    async def _until_end(self, worker: _Worker) -> int:
        try:
            code = await worker.process.wait()
            asyncio.get_running_loop().remove_reader(worker.lifeline)
            worker.listen()  # it may have said so and died before we looked
            return code
        finally:
            self._workers.discard(worker)
            worker.lifeline.close()

    def _note_drained(self, slot: int, worker: _Worker, code: int) -> None:
        if code and worker.ran:
            logger.error("worker %d %s instead of draining", slot, _how(code))
            self._code = 1

    async def _unless_draining(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            pass


def _how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
