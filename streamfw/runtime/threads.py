"""Handlers in threads.

Theory of operation
    Threads come from anyio, at most so many at the same time in the whole app. A thread cannot be cancelled. So a
    worker that is cancelled while its thread runs waits for the thread all the same, and its delivery stays out, its
    lease renewed, until then. Afterwards the message has the outcome of what cancelled it: a timeout is a failure,
    whatever the handler returned too late. Only the drain lets a handler that ends well after all end well: it wants
    nothing but an end, and doing finished work again helps nobody.

    Who cancels may come before the thread has begun. Both then take the job's lock, and who gets it decides; it is
    never given back.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync

from .slot import DRAIN, SLOT, Slot

__all__ = ["Threads"]

logger = logging.getLogger("streamfw")
MOST_IDS = 5  # of a batch, in a line of the log


class Threads:
    """Runs functions in threads of anyio's, at most `limit` at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._limiter: CapacityLimiter

    def open(self) -> None:
        """In the event loop that is to use them."""
        self._limiter = CapacityLimiter(self._limit)

    async def call(
        self, where: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `function` returns or raises, in a thread with a copy of this context."""
        slot = SLOT.get(None)
        if slot is not None:
            slot.wait()
        job = _Job(function, args, kwargs, slot)
        # A task of its own, because anyio's waiting ends with the task's cancellation and a thread does not.
        driver = asyncio.get_running_loop().create_task(run_sync(job.run, limiter=self._limiter))
        try:
            await asyncio.wait((driver,))
        except asyncio.CancelledError as cancelled:
            if job.call_off():
                driver.cancel()
                raise
            if DRAIN not in cancelled.args:
                self._tell(where, slot)
            await _outlive(driver, job)
            if DRAIN not in cancelled.args:
                raise
        if driver.cancelled() and not job.call_off():  # with all tasks of a loop that is going down
            await _outlive(driver, job)
        if not job.ended:
            driver.result()  # raises: no thread could be started, or none was begun
        return job.result(where)

    @staticmethod
    def _tell(where: str, slot: Slot | None) -> None:
        logger.warning(
            "%s: message %s was cancelled (its timeout?), but a thread cannot be: its handler is waited for",
            where,
            slot.shown_ids(MOST_IDS) if slot is not None else "",
            extra={"subscriber": where, "message_ids": slot.message_ids if slot is not None else []},
        )


async def _outlive(driver: asyncio.Task[None], job: _Job) -> None:
    """Wait until the thread has ended, whoever cancels how often."""
    with CancelScope(shield=True):  # from anyio's scopes, which would cancel again and again at every turn of the loop
        while not job.ended:
            try:
                if driver.done():  # it was cancelled itself, with all tasks: nobody tells us any more
                    await asyncio.sleep(0.05)
                else:
                    await asyncio.wait((driver,))
            except asyncio.CancelledError:
                pass


class _Job:
    """One call in a thread."""

    __slots__ = ("_args", "_error", "_function", "_kwargs", "_result", "_slot", "_turn", "ended")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot | None
    ) -> None:
        self._function, self._args, self._kwargs, self._slot = function, args, kwargs, slot
        self._turn = threading.Lock()  # for the thread that begins, or for who calls it off
        self._result: Any = None
        self._error: BaseException | None = None
        self.ended = False

    def call_off(self) -> bool:
        """True: it has not begun, and never will."""
        return self._turn.acquire(blocking=False)

    def run(self) -> None:
        """In the thread."""
        if not self._turn.acquire(blocking=False):
            return
        slot = self._slot
        if slot is not None:
            slot.begin(in_thread=True)
        try:
            self._result = self._function(*self._args, **self._kwargs)
        except BaseException as error:  # raised again in the loop, whatever it is
            self._error = error
        finally:
            if slot is not None:
                slot.in_thread = False
            self.ended = True

    def result(self, where: str) -> Any:
        """What the function returned or raised; once."""
        error, result = self._error, self._result
        self._error = self._result = None
        try:
            if error is not None:
                raise error
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(f"{where} is a `def` function that returned a coroutine: make it `async def`")
            return result
        finally:
            error = None  # its traceback holds this frame
