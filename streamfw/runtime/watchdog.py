"""Says which handler blocks the event loop, and where.

Theory of operation
    A thread asks the loop again and again to answer. What is not answered within the threshold is a block: from when it
    was asked, the loop has done one thing only. The thread then looks at what the loop's thread is doing, says so
    once, and says how long it was when the answer comes. Asked twice in a threshold, a block is noticed at the latest
    one and a half thresholds after it began. No message pays for it; the loop wakes twice in each threshold.

    Who keeps the interpreter to himself (C code that never lets another thread run) keeps it from this thread, too: it
    sees such a block when it is over, and can name only who ran at that time.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pump import Pump

__all__ = ["Watchdog"]

logger = logging.getLogger("streamfw")
MOST_FRAMES = 12  # of a stack, the innermost
MOST_IDS = 5
_OURS = ("streamfw.runtime.", "asyncio.", "uvloop.")


class Watchdog:
    """Watches the running event loop from `start` to `stop`. `threshold` is in seconds; `pumps` is asked only when
    there is something to say. `blocks` counts them."""

    def __init__(self, threshold: float, pumps: Callable[[], Sequence[Pump]]) -> None:
        self._threshold, self._pumps = threshold, pumps
        self._answered, self._stopped = threading.Event(), threading.Event()
        self._answered_at = 0.0
        self.blocks = 0

    def start(self) -> None:
        """In the loop's own thread."""
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="streamfw-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """In the loop's own thread, which this does not block for longer than a word to the log takes."""
        self._stopped.set()
        self._answer()
        self._thread.join(1.0)

    def _answer(self) -> None:
        """In the loop: it turns."""
        self._answered_at = time.monotonic()
        self._answered.set()

    def _watch(self) -> None:
        pause = self._threshold / 2
        rested = time.monotonic()
        while not self._stopped.wait(pause):
            asked = time.monotonic()
            if (late := asked - rested - pause) > self._threshold:
                self._tell_afterwards(late)
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it is closed
                return
            if self._stopped.is_set():
                return
            told = None
            if not self._answered.wait(self._threshold):
                told = self._tell()
                while not self._answered.wait(1.0):
                    if self._loop.is_closed():
                        return
            took = self._answered_at - asked
            if told is not None:
                logger.warning("%s: the event loop goes on, after at least %.1f s", told, took)
            elif took > self._threshold:
                self._tell_afterwards(took)
            rested = time.monotonic()

    def _tell(self) -> str:
        """The loop is blocked now; return who is said to do it."""
        self.blocks += 1
        frames: dict[int, FrameType] = getattr(sys, "_current_frames")()  # noqa: B009 - for debuggers, and this is one
        who = self._who()
        frame = frames.get(self._ident)
        where = "" if frame is None else "".join(_stack(frame).format()).rstrip()
        logger.warning(
            "%s: blocks the event loop, for more than %g s now; nothing else runs meanwhile (a `def` handler would run "
            "in a thread). It is at:\n%s",
            who,
            self._threshold,
            where,
        )
        return who

    def _tell_afterwards(self, took: float) -> None:
        self.blocks += 1
        logger.warning(
            "the event loop was blocked for %.1f s, and the watchdog as well: by code that keeps the interpreter to "
            "itself, or because the process was stopped. Now there run: %s",
            took,
            ", ".join(who for _, who in self._running()) or "no handlers",
        )

    def _who(self) -> str:
        """The handler that the loop runs now, and on which messages."""
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        running = list(self._running())
        for one, who in running:
            if one is task and task is not None:
                return who
        name = "a callback" if task is None else f"the task {task.get_name()!r}"
        return f"{name} (handlers that run: {', '.join(who for _, who in running) or 'none'})"

    def _running(self) -> Iterator[tuple[asyncio.Task[None], str]]:
        for pump in list(self._pumps()):
            for slot in list(pump.crew.slots):
                if slot.message is not None:
                    yield slot.task, f"{pump.plan.where}, message {slot.shown_ids(MOST_IDS)}"


def _stack(frame: FrameType) -> traceback.StackSummary:
    """From the handler (or what else the loop called) to where it is, innermost last."""
    frames: list[tuple[FrameType, int]] = []
    inner: FrameType | None = frame
    while inner is not None and len(frames) < MOST_FRAMES:
        module = inner.f_globals.get("__name__", "")
        if frames and f"{module}.".startswith(_OURS):
            break
        frames.append((inner, inner.f_lineno))
        inner = inner.f_back
    return traceback.StackSummary.extract(iter(reversed(frames)), capture_locals=False)
