"""What others know of a worker, and how code that runs for it finds that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from streamfw.broker import Delivery
from streamfw.texts import one_line

__all__ = ["DRAIN", "SLOT", "Slot", "Worker"]

DRAIN = "the app stops"
"""The message of a cancellation by the drain: who cannot be cancelled may go on and end well."""


class Slot:
    """What others know of a worker. `message` is what its handler runs on, since `started` (the timer reads both).

    `holds` is what it will begin next, while it lets the loop turn or lingers: whoever holds or ends the crew takes it
    away by emptying the list, so a worker looks there when it goes on. `in_thread`: its handler runs in a thread now.
    """

    __slots__ = (
        "clock",
        "drained",
        "expired",
        "for_good",
        "holds",
        "in_thread",
        "message",
        "spoiled",
        "started",
        "task",
    )
    task: Worker

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started = 0.0
        self.in_thread = False
        self.message: object = None
        self.spoiled = False  # somebody cancelled the task: not fit for another message
        self.for_good = False  # though whoever it was takes it back
        self.expired = False  # it was the timeout
        self.drained = False  # it was the drain
        self.holds: list[Delivery] = []

    @property
    def busy(self) -> bool:
        return self.message is not None or bool(self.holds)

    @property
    def messages(self) -> Sequence[Delivery]:
        """What its handler runs on: one, or a batch."""
        one: Any = self.message
        messages: Sequence[Delivery] = getattr(one, "messages", () if one is None else (one,))
        return messages

    @property
    def message_ids(self) -> list[str]:
        """Of what its handler runs on."""
        return [str(message.message_id) for message in self.messages]

    def shown_ids(self, most: int) -> str:
        """The same for a line of text, `most` of them."""
        ids = self.message_ids
        more = f" and {len(ids) - most} more" if len(ids) > most else ""
        return ", ".join(map(one_line, ids[:most])) + more

    def wait(self) -> None:
        """Its handler waits for a thread or a process; that time is not the handler's."""
        self.started = math.inf

    def begin(self, in_thread: bool) -> None:
        """Its handler begins. Called from the thread as well: nobody else touches the slot meanwhile."""
        self.started = self.clock()
        self.in_thread = in_thread


class Worker(asyncio.Task[None]):
    """The task of a slot. It notes when it is cancelled, so no message pays for a check of that.

    Otherwise a handler that cancels its own task and returns would leave that to the next message, which would seem to
    have failed. What is taken back (by a timeout or a task group inside the handler) has come and gone; but not where
    the task cancelled itself: until it suspends that is still to come, and Python 3.11 and 3.12 forget nothing.
    """

    slot: Slot

    def cancel(self, msg: Any | None = None) -> bool:
        slot = self.slot
        slot.spoiled = True
        slot.for_good = slot.for_good or asyncio.current_task(self.get_loop()) is self
        return super().cancel(msg)

    def uncancel(self) -> int:
        left = super().uncancel()
        if not left and not self.slot.for_good:
            self.slot.spoiled = False
        return left


SLOT: ContextVar[Slot] = ContextVar("streamfw_slot")
"""The slot that this code runs for. Set once a worker, in the context its task starts from."""
