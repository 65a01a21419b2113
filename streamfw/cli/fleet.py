"""Several processes of one app: started, started again when they crash, replaced one by one, drained together.

Theory of operation
    Each *slot* keeps one worker process. The first is started alone, and the others when it runs: what is wrong with
    the app, its configuration or its credentials is said once, not once a worker.

        starting --RUNNING--> running --ends--> pause (growing, jittered) --> starting
        starting, never ran --exit code above 0--> the whole ends, with 1
        starting, has run before --exit code above 0--> pause --> starting; the whole ends if no other worker runs
        starting --killed, or no room for a process--> pause --> starting

    A replacement goes from slot to slot:

        running --wish--> a successor is started beside it --RUNNING, and alive `_PROOF` s later--> the old one drains
                                                           --ends--> the replacement stops; the old one runs on

    so at least as many workers run as before, and what is wrong with the new code stops at the first slot. A wish that
    comes while a worker pauses is fulfilled by its next start. Asked again meanwhile, the replacement starts over; a
    successor that does not run yet (it may wait for a server for ever) is given up then.

    Workers are new processes (not forks: a fork copies threads, locks and connections in whatever state they are), in
    a process group of their own, so that a Ctrl-C in a terminal reaches the parent alone. How a worker learns that it
    is to drain, also by the parent's death: `streamfw.cli.lifeline`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from streamfw.outcome import Backoff

from .worker import Worker, first_of, how_it_ended

__all__ = ["Fleet"]

logger = logging.getLogger("streamfw")

_PAUSE = Backoff(first=0.5, factor=2.0, max=30.0)
_SETTLED_DOWN = 60.0  # seconds; a worker that ran for so long starts the count of crashes again
_PROOF = 1.0  # seconds that a successor runs before the old worker is drained: what fails on its first messages shows


class Fleet:
    """Keeps `count` worker processes of `command` running, from `run` until `drain`."""

    def __init__(self, command: Sequence[str], count: int, environ: Mapping[str, str] | None = None) -> None:
        self._command, self._environ = list(command), environ
        self._slots = [_Slot(self, number) for number in range(1, count + 1)]
        self._workers: set[Worker] = set()
        self._replacing: asyncio.Task[None] | None = None
        self._again = False
        self._code = 0
        self.draining = asyncio.Event()
        self.one_runs = asyncio.Event()

    async def run(self) -> int:
        """Until it is drained, or until a worker cannot start. The exit code: 1 when a worker could not start, or
        ended otherwise than by draining when it was to drain."""
        try:
            await asyncio.gather(*(slot.keep() for slot in self._slots))
        finally:
            for worker in self._workers:  # only after an error of our own
                worker.kill()
            if self._replacing is not None:
                self._replacing.cancel()
        return self._code

    def __len__(self) -> int:
        """How many processes there are now."""
        return len(self._workers)

    @property
    def any_runs(self) -> bool:
        """Whether the app runs in any process."""
        return any(worker.ran and not worker.ended.done() for worker in self._workers)

    @property
    def starts_over(self) -> bool:
        """Whether a replacement was asked for again while it went on."""
        return self._again

    def drain(self) -> None:
        """Ask all workers to drain, and start no more."""
        self.draining.set()
        for worker in self._workers:
            worker.drain()

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.kill()

    def replace(self) -> None:
        """Replace the workers one by one; asked while that goes on, start over."""
        if self._replacing is not None and not self._replacing.done():
            self._again = True
            for slot in self._slots:
                slot.give_up_successor()
        else:
            self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        while True:
            self._again = False
            logger.info("replacing %d workers, one by one", len(self._slots))
            complete = await self._replace_each()
            if not self._again:
                break
        if complete:
            logger.info("replaced %d workers", len(self._slots))
        else:
            logger.error("the replacement stops here: mend what is wrong, and send SIGHUP again")

    async def _replace_each(self) -> bool:
        for slot in self._slots:
            if not await slot.replaced() or self._again:
                return False
        return True

    # -- for its slots

    async def start(self, slot: int) -> Worker:
        """Start a worker. Raises `OSError`."""
        worker = await Worker.start(self._command, self._environ)
        self._workers.add(worker)
        worker.ended.add_done_callback(lambda _: self._workers.discard(worker))
        if self.draining.is_set():
            worker.drain()
        logger.info("worker %d is process %d", slot, worker.pid)
        return worker

    def fail(self) -> None:
        """A worker could not start, or did not drain."""
        self._code = 1


class _Slot:
    """One worker, and those that take its place."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet, self._number = fleet, number
        self._has_run = False
        self._successor: Worker | None = None
        self._wish: asyncio.Future[bool] | None = None
        self._wished = asyncio.Event()

    async def keep(self) -> None:
        """Keep a worker running until the fleet drains."""
        fleet, loop = self._fleet, asyncio.get_running_loop()
        if self._number > 1:
            await first_of(fleet.one_runs, fleet.draining)
        crashes = 0
        while not fleet.draining.is_set():
            began = loop.time()
            try:
                worker = await self._first_worker()
            except OSError as error:
                how, fatal = f"cannot be started: {error}", not fleet.one_runs.is_set()
            else:
                worker = await self._until_end(worker)
                if fleet.draining.is_set():
                    self._note_drained(worker)
                    return
                how = f"(process {worker.pid}) {how_it_ended(worker.ended.result())}"
                fatal = self._is_fatal(worker)
            if fatal:
                others = ": ending the others" if len(fleet) else ""
                logger.error("worker %d %s before it ran%s", self._number, how, others)
                fleet.fail()
                fleet.drain()
                return
            crashes = 1 if loop.time() - began > _SETTLED_DOWN else crashes + 1
            pause = _PAUSE.pause(crashes)
            logger.warning("worker %d %s; starting another in %.1f s", self._number, how, pause)
            await first_of(fleet.draining, self._wished, seconds=pause)

    def _is_fatal(self, worker: Worker) -> bool:
        if worker.ran or worker.ended.result() <= 0:
            return False
        return not self._has_run or not self._fleet.any_runs

    async def replaced(self) -> bool:
        """Have another worker take the place of this slot's; whether it does."""
        self._wish = asyncio.get_running_loop().create_future()
        self._wished.set()
        return await self._wish

    def give_up_successor(self) -> None:
        """Do not wait any more for a successor that does not run yet."""
        if self._successor is not None and not self._successor.ran:
            self._successor.drain()

    def _take_wish(self) -> asyncio.Future[bool] | None:
        wish, self._wish = self._wish, None
        self._wished.clear()
        return wish

    async def _first_worker(self) -> Worker:
        """A worker in an empty place; it fulfils a wish as well."""
        wish = self._take_wish()
        runs = False
        try:
            worker = await self._fleet.start(self._number)
            runs = await worker.running()
        finally:
            _fulfil(wish, runs)
        if runs:
            self._has_run = True
            self._fleet.one_runs.set()
        return worker

    async def _until_end(self, worker: Worker) -> Worker:
        """Until the slot's worker has ended; a replacement may have made it another one."""
        while not worker.ended.done():
            await first_of(worker.ended, self._wished)
            if self._wished.is_set() and not worker.ended.done():
                worker = await self._succeeded(worker)
        return worker

    async def _succeeded(self, old: Worker) -> Worker:
        """Start a successor beside `old`, and drain `old` when it runs. The slot's worker from now on."""
        wish = self._take_wish()
        complete = False
        try:
            new = self._successor = await self._fleet.start(self._number)
            if not await self._proved(new):
                self._say_kept(old, f"process {new.pid} {how_it_ended(await new.ended)}")
                return old
            logger.info("worker %d is process %d now; process %d drains", self._number, new.pid, old.pid)
            old.drain()
            await old.ended
            self._note_drained(old)
            complete = not new.ended.done()
            return new
        except OSError as error:
            self._say_kept(old, f"no process can be started: {error}")
            return old
        finally:
            self._successor = None
            _fulfil(wish, complete)

    async def _proved(self, new: Worker) -> bool:
        if await new.running():
            await first_of(new.ended, self._fleet.draining, seconds=_PROOF)
        return not new.ended.done()

    def _say_kept(self, old: Worker, how: str) -> None:
        if not self._fleet.draining.is_set() and not self._fleet.starts_over:
            kept = "" if old.ended.done() else f"; process {old.pid} runs on"
            logger.error("worker %d cannot be replaced: %s%s", self._number, how, kept)

    def _note_drained(self, worker: Worker) -> None:
        code = worker.ended.result()
        if code and worker.ran:
            logger.error("worker %d (process %d) %s instead of draining", self._number, worker.pid, how_it_ended(code))
            if self._fleet.draining.is_set():
                self._fleet.fail()


def _fulfil(wish: asyncio.Future[bool] | None, whether: bool) -> None:
    if wish is not None and not wish.done():
        wish.set_result(whether)
