"""What an app has in work, and waiting until it has not.

Theory of operation
    A pump is at rest when all that it has fetched waits for its time (a retry in place, and what is parked behind it).
    An app is *settled* when its pumps are, no publish is under way, and no broker has anything that one of its
    subscribers could take now. On memory that is looked up; on other brokers `Expected` knows it from what this app
    published and what became of it.

    `until_settled` waits for that, in real time. `until_quiet` is for a clock that stands still: it waits until
    nothing more happens unless time goes on, which is when the app is settled, or every handler that runs sleeps. Of a
    handler that waits for something else nobody can say what: it is given `GRACE` naps of real time, once (naps, not
    seconds: a process that was not run meanwhile has not waited).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamfw.broker import Delivery
from streamfw.errors import StreamError
from streamfw.message import Message, Outgoing
from streamfw.outcome import DeadLetter, Outcome, Retry
from streamfw.runtime.batches import BatchCrew
from streamfw.runtime.crew import Crew, Slot
from streamfw.runtime.pump import Pump

from ._clock import VirtualClock
from ._records import Outbox, Watched, deliveries_of
from ._routes import Routes

__all__ = ["Expected", "NotSettled", "Work"]

CALM = 10  # turns of the loop without anything to do: a task that a handler started comes to its publish
EAGER = 200  # turns before we wait a little between two
NAP = 0.0005  # seconds
GRACE = 200  # naps: a tenth of a second, or more
OURS = str(Path(__file__).parents[1])
ASYNCIO = str(Path(asyncio.__file__).parent)


class NotSettled(StreamError):
    """The app was still at work when the time was over; the message says with what."""


class Expected:
    """What subscribers of a broker that cannot be looked into will get: each message published to their names, from
    when it is due, until it has ended."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._numbers = {id(one.built.subscription): number for number, one in enumerate(watched)}
        self._due: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._routes: dict[str, Routes] = defaultdict(Routes)
        for one in watched:
            self._routes[one.built.broker].add(one.built.subscription)

    def sending(self, broker: str, message: Outgoing) -> None:
        self._expect(broker, message.name, message, message.delay)

    def refused(self, broker: str, message: Outgoing) -> None:
        for number in self._subscribers(broker, message.name, message):
            if dues := self._due[number, message.message_id]:
                dues.pop()

    def _subscribers(self, broker: str, name: str, message: Message | Outgoing) -> list[int]:
        reached = self._routes[broker].reached(name, message.key, message.headers)
        return [self._numbers[id(subscription)] for subscription in reached]

    def _expect(self, broker: str, name: str, message: Message | Outgoing, delay: float) -> None:
        for number in self._subscribers(broker, name, message):
            self._due[number, message.message_id].append(time.monotonic() + delay)

    def ended(self, one: Watched, message: Message, outcome: Outcome) -> None:
        dues = self._due[self._watched.index(one), message.message_id]
        if dues:
            dues.remove(min(dues))
        if isinstance(outcome, Retry):
            dues.append(time.monotonic() + (outcome.after or 0.0))
        elif isinstance(outcome, DeadLetter) and one.built.capabilities.dead_letter:
            self._expect(one.built.broker, one.built.subscription.dead_letter or "", message, 0.0)

    def missing(self) -> list[str]:
        """What should have come by now and is not in anybody's hands, in words."""
        now = time.monotonic()
        return [
            f"{self._watched[number].where} has not had message {message_id}, which is due"
            for (number, message_id), dues in self._due.items()
            if any(due <= now for due in dues) and message_id not in self._in_hand(number)
        ]

    def _in_hand(self, number: int) -> set[str]:
        slots: Iterable[Slot] = self._watched[number].pump.crew.slots
        return {delivery.message_id for slot in slots for delivery in deliveries_of(slot.message) or slot.holds}


class Work:
    """The work of one app. `ready` says what its brokers have for it, one line each; `check` raises when it failed."""

    def __init__(
        self,
        watched: Sequence[Watched],
        outbox: Outbox,
        ready: Callable[[], Iterable[str]],
        check: Callable[[], None],
        clock: VirtualClock | None,
    ) -> None:
        self._watched, self._outbox, self._ready, self._check, self._clock = watched, outbox, ready, check, clock
        self._graced: object = None

    # -- waiting

    async def until_settled(self, seconds: float) -> None:
        """Raises `NotSettled` after so many seconds of real time."""
        deadline = time.monotonic() + seconds
        calm = turns = 0
        while calm < CALM:
            self._check()
            if self.settled():
                calm += 1
                await asyncio.sleep(0)
                continue
            calm, turns = 0, turns + 1
            if time.monotonic() > deadline:
                raise self.not_settled(f"not settled within {seconds:g} s")
            self._hurry_batches()
            await asyncio.sleep(0 if turns < EAGER else NAP)

    async def until_quiet(self, deadline: float, what: str) -> None:
        """Raises `NotSettled` at `deadline` (of `time.monotonic`); needs a clock that stands still."""
        seen: object = None
        calm = still = 0
        while calm < CALM:
            self._check()
            if self.settled():
                calm += 1
            else:
                calm, still = 0, still + 1
                signature = self._signature()
                if signature != seen:
                    seen, still = signature, 0
                if still > CALM:
                    if signature == self._graced or self._all_sleep():
                        return
                    if still > CALM + GRACE:
                        self._graced = signature
                        return
                    _nap()  # timers stand still, so the loop cannot wait for one
                if time.monotonic() > deadline:
                    raise self.not_settled(what)
            await asyncio.sleep(0)

    def _hurry_batches(self) -> None:
        """When all that is left is workers who wait for a fuller batch: it will not come."""
        crews = [one.pump.crew for one in self._watched if isinstance(one.pump.crew, BatchCrew)]
        if any(_lingering(crew) for crew in crews) and self._only(_lingering):
            for crew in crews:
                if _lingering(crew):
                    crew.hurry()

    # -- looking

    def settled(self) -> bool:
        """Whether nothing is in work, ready, or on its way."""
        return not self._outbox.under_way and all(_at_hand(one.pump) == 0 for one in self._watched) and not self.ready()

    def ready(self) -> list[str]:
        return list(self._ready())

    def _only(self, at_hand: Callable[[Crew], int]) -> bool:
        """Whether all that is in work is what `at_hand` counts of each crew, and what is parked behind it."""
        if self._outbox.under_way or self.ready():
            return False
        return all(_at_hand(pump) == at_hand(pump.crew) + _behind(pump) for pump in self._pumps())

    def _all_sleep(self) -> bool:
        """Whether every handler that runs waits for a timer of the loop."""
        assert self._clock is not None
        sleepers = self._clock.sleepers()

        def asleep(crew: Crew) -> int:
            sleeping = [s for s in crew.slots if s.message is not None and id(_waits_for(s)) in sleepers]
            return _lingering(crew) + sum(len(deliveries_of(slot.message)) for slot in sleeping)

        return self._only(asleep)

    def _signature(self) -> object:
        """Changes when something happens."""
        busy = [(slot, _waits_for(slot)) for pump in self._pumps() for slot in pump.crew.slots if slot.busy]
        counts = [(pump.in_flight, pump.lanes.held, len(pump.crew.ready)) for pump in self._pumps()]
        entries = sum(len(one.entries) for one in self._watched)
        return busy, counts, entries, self._outbox.under_way, len(self._outbox.messages), self.ready()

    def _pumps(self) -> Iterator[Pump]:
        for one in self._watched:
            yield one.pump

    # -- telling

    def not_settled(self, what: str) -> NotSettled:
        lines = list(self._describe()) or ["nothing that is known; a task of the test's own keeps it busy?"]
        return NotSettled("".join([what, ":", *(f"\n  {line}" for line in lines)]))

    def _describe(self) -> Iterator[str]:
        if self._outbox.under_way:
            yield f"{self._outbox.under_way} publishes wait for their broker"
        sleepers = self._clock.sleepers() if self._clock is not None else set[int]()
        for one in self._watched:
            pump: Pump = one.pump
            at_work = 0
            for slot in pump.crew.slots:
                deliveries = deliveries_of(slot.message) or slot.holds
                at_work += len(deliveries)
                if deliveries:
                    yield self._describe_slot(one, slot, deliveries, sleepers)
            rest = _at_hand(pump) - at_work
            if rest > 0:
                yield f"{one.where} has {rest} more messages at hand, to begin or to settle"
        yield from self.ready()

    def _describe_slot(
        self, one: Watched, slot: Slot, deliveries: Sequence[Message | Delivery], sleepers: set[int]
    ) -> str:
        ids = ", ".join(f"{delivery.message_id} (attempt {delivery.attempt})" for delivery in deliveries[:3])
        more = f" and {len(deliveries) - 3} more" if len(deliveries) > 3 else ""
        if slot.message is None:
            return f"{one.where} waits for a fuller batch than message {ids}{more}"
        asleep = id(_waits_for(slot)) in sleepers
        hint = " (asleep: `await tb.advance(seconds)` lets time pass)" if asleep else ""
        return f"{one.where} runs with message {ids}{more}{_place(slot.task)}{hint}"


def _nap() -> None:
    time.sleep(NAP)


def _at_hand(pump: Pump) -> int:
    """How many messages are fetched and neither settled nor waiting for their time."""
    return pump.in_flight - pump.lanes.held


def _behind(pump: Pump) -> int:
    """How many are parked behind messages that are in work."""
    lanes = pump.lanes
    return sum(len(parked) for lane, parked in lanes.table.items() if parked and lane not in lanes.waiting)


def _lingering(crew: Crew) -> int:
    """How many messages workers hold that wait for more to come."""
    if not isinstance(crew, BatchCrew):
        return 0
    return sum(len(slot.holds) for slot in crew.slots if slot.message is None)


def _waits_for(slot: Slot) -> object:
    """The future that a worker waits for, also through tasks that it awaits."""
    future: object = slot.task
    while (inner := getattr(future, "_fut_waiter", None)) is not None:
        future = inner
    return future


def _place(task: asyncio.Task[Any]) -> str:
    """Where the handler is: the innermost line that is neither ours nor asyncio's."""
    place = ""
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith((OURS, ASYNCIO)):
            place = f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return place
