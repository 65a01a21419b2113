"""Workers whose handler takes a list.

A worker takes up to `Batch.size` messages, lingers `Batch.wait` seconds for more when it has fewer, decodes each and
calls the handler once. What cannot be decoded is settled by itself and leaves the batch. A batch is of one bundle (a
partition of a log): what is ready of others stays where it is. With lanes, a batch takes the
lanes of all its messages; several of one lane may be in it, in order, and when one of them is to be tried again, those
behind it in its lane are tried again with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextvars import copy_context
from typing import Any

from streamfw.broker import Delivery, Settlement
from streamfw.errors import PartialFailure
from streamfw.handler import MessageBatch, undecoded
from streamfw.outcome import ACK, RELEASE, Outcome
from streamfw.subscriber import Batch

from .context import apart, clean_context, one_turn
from .crew import Crew, Slot
from .signal import Signal

__all__ = ["BatchCrew"]


class BatchCrew(Crew):
    """A crew whose workers handle batches. `batch` and `decode` are set before it starts."""

    batch: Batch
    decode: Callable[[Any], Any] | None = None
    hurries = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Of those who wait for more of what they have. An arrival wakes them all, before any that have nothing: each
        # takes what fits, and what fits nobody is left for a worker that has nothing.
        self.lingering: set[Signal] = set()

    def hurry(self) -> None:
        """Let those who linger begin with what they have."""
        self.hurries += 1
        while self.idle:
            self.idle.pop().set()
        self._wake_lingering()

    def _wake_lingering(self) -> None:
        for woken in self.lingering:
            woken.set()

    def arrive(self, batch: Sequence[Delivery]) -> None:
        """See `Crew.arrive`."""
        self._wake_lingering()
        super().arrive(batch)

    def front(self, deliveries: list[Delivery]) -> None:
        """See `Crew.front`."""
        self._wake_lingering()
        super().front(deliveries)

    def abandon(self) -> None:
        """See `Crew.abandon`."""
        super().abandon()
        self._wake_lingering()

    @property
    def hungry(self) -> bool:
        """See `Crew.hungry`: who lingers could do with more."""
        return bool(self.idle or self.lingering)

    def work(self, slot: Slot) -> Coroutine[Any, Any, None]:
        return self._work_batches(slot)

    async def _work_batches(self, slot: Slot) -> None:
        clean = clean_context()
        while True:
            while not self.ready:
                if self.stopping:
                    return
                await self.rest()
            # Until the handler begins, this is what the worker holds: whoever holds the crew empties it.
            messages: list[Delivery] = []
            slot.holds = messages
            self._collect(messages)
            if not messages:
                continue
            if len(messages) < self.batch.size and self.batch.wait:
                await self._linger(messages)
            slot.holds = []
            if self.ready and self.idle:
                self.wake()
            if messages:
                await self._handle(slot, messages)
            try:
                fit = copy_context() == clean and not slot.spoiled
            except Exception:  # a value whose == fails
                fit = False
            if not fit:
                return self.retire(slot, [])
            slot.message = None
            if self.clock() > self._slice_end:
                if self._marked:  # the loop has not turned since this slice began
                    await one_turn()
                self._new_slice()

    def _collect(self, messages: list[Delivery]) -> None:
        """Fill `messages` from what is ready, taking lanes; what another worker's lane holds up is parked there, and
        what belongs to another bundle stays ready."""
        ready, table, size = self.ready, self.lanes.table, self.batch.size
        if not table and self._collect_plain(messages):
            return
        others: list[Delivery] = []
        ours = {message.lane for message in messages}
        for lane in ours:  # first what others have parked here while this worker lingered: it came before
            parked = table.get(lane)
            while parked and len(messages) < size:
                messages.append(parked.popleft())
        while ready and len(messages) < size:
            message = ready.popleft()
            lane = message.lane
            if message.lost:
                self._forget(message)
                continue
            if messages and message.bundle != messages[0].bundle:
                others.append(message)
                continue
            if lane is not None and lane not in ours:
                if lane in table:
                    self.lanes.park(lane, message)
                    continue
                table[lane] = None
                ours.add(lane)
            messages.append(message)
        ready.extendleft(reversed(others))

    def _collect_plain(self, messages: list[Delivery]) -> bool:
        """The same where none has a lane and all are of one bundle, which costs a third. False: it is not so."""
        ready = self.ready
        some = [ready.popleft() for _ in range(min(self.batch.size - len(messages), len(ready)))]
        if some:
            bundle = (messages or some)[0].bundle
            if [message for message in some if message.lane is not None or message.bundle is not bundle]:
                ready.extendleft(reversed(some))
                return False
        messages += some  # those that are lost leave it before the handler begins
        return True

    async def _linger(self, messages: list[Delivery]) -> None:
        loop = asyncio.get_running_loop()
        deadline, hurries = loop.time() + self.batch.wait, self.hurries
        if self.ready and self.idle:  # of another bundle
            self.wake()
        woken = Signal()
        self.lingering.add(woken)
        try:
            await self._gather(messages, woken, deadline, hurries)
        finally:
            self.lingering.discard(woken)

    async def _gather(self, messages: list[Delivery], woken: Signal, deadline: float, hurries: int) -> None:
        loop = asyncio.get_running_loop()
        while len(messages) < self.batch.size and self.hurries == hurries and self.shelf is None and not self.stopping:
            left = deadline - loop.time()
            if left <= 0:
                break
            self._dry()  # let more be fetched
            await woken.wait_for(left)
            self._collect(messages)

    async def _handle(self, slot: Slot, messages: list[Delivery]) -> None:
        lanes: dict[Hashable, None] = {}
        if self.lanes.table:
            lanes = dict.fromkeys(message.lane for message in messages if message.lane is not None)
        if self.clock() > self.vouched:
            self.look()
        kept = [message for message in messages if not message.lost]
        if len(kept) < len(messages):  # while it lingered
            for message in messages:
                if message.lost:
                    self._forget(message)
        bad: list[tuple[Delivery, Outcome]] = []
        good, values = self._decoded(kept, bad)
        outcomes: Sequence[Outcome] = ()
        if good:
            batch = MessageBatch(list(good), values)
            slot.message, slot.started = batch, self.clock()
            outcomes = await self._call(slot, good, batch)
        if not bad and outcomes.count(ACK) == len(kept):
            self._acknowledge(kept, lanes)
            return
        self._settle(kept, {id(m): o for m, o in [*zip(good, outcomes, strict=True), *bad]}, lanes)

    async def _call(self, slot: Slot, good: list[Delivery], batch: MessageBatch) -> list[Outcome]:
        try:
            result = await (apart(self.call, batch, copy_context()) if self.isolated else self.call(batch))
        except PartialFailure as partial:
            result = partial
        except BaseException as error:
            return self._all_failed(slot, good, error)
        try:
            return self._outcomes(good, result)
        except Exception as error:  # it named elements that are not there, or returned something else
            return self._all_failed(slot, good, error)

    def _decoded(
        self, messages: list[Delivery], bad: list[tuple[Delivery, Outcome]]
    ) -> tuple[list[Delivery], list[Any]]:
        decode = self.decode
        if decode is None:
            return messages, list(messages)  # the handler takes the messages themselves, in a list of its own
        try:
            return messages, [decode(message.body) for message in messages]
        except Exception:
            pass  # which of them, and what to do about each, is a matter of its own
        good: list[Delivery] = []
        values: list[Any] = []
        for message in messages:
            try:
                values.append(decode(message.body))
            except Exception as error:
                bad.append((message, self.policy.outcome(message, undecoded(error, message.body))))
            else:
                good.append(message)
        return good, values

    def _outcomes(self, good: list[Delivery], result: Any) -> list[Outcome]:
        """One outcome an element from what the handler returned or raised."""
        if result is None:
            return [ACK] * len(good)
        if isinstance(result, Outcome):
            return [self.policy.outcome(message, result) for message in good]
        if isinstance(result, PartialFailure):
            wrong = [index for index in result.errors if not 0 <= index < len(good)]
            if wrong:
                raise IndexError(f"PartialFailure names the elements {wrong} of a batch of {len(good)}")
            result = [result.errors.get(index) for index in range(len(good))]
        if not isinstance(result, list | tuple) or len(result) != len(good):
            raise TypeError(
                f"a batch handler returns None or one outcome an element ({len(good)}), not {result!r:.200}"
            )
        for one in result:
            if one is not None and not isinstance(one, BaseException):
                raise TypeError(f"the outcome of an element is None, an outcome or an exception, not {one!r:.200}")
        return [
            ACK if one is None else self.policy.outcome(message, one) for message, one in zip(good, result, strict=True)
        ]

    def _all_failed(self, slot: Slot, good: list[Delivery], error: BaseException) -> list[Outcome]:
        first = self.outcome_of(slot, good[0], error)
        if first is RELEASE:
            return [RELEASE] * len(good)
        if isinstance(error, asyncio.CancelledError) and slot.expired:
            error = self.timed_out()
        return [first, *(self.policy.outcome(message, error) for message in good[1:])]

    def _acknowledge(self, messages: list[Delivery], lanes: dict[Hashable, None]) -> None:
        """What `_settle` comes to when all is well."""
        self._done += [Settlement(message, ACK) for message in messages]
        self._to_settle.set()
        if not self.stopping:
            self._give_up(lanes)

    def _settle(self, messages: list[Delivery], outcomes: dict[int, Outcome], lanes: dict[Hashable, None]) -> None:
        """Settle each; the batch's `lanes` end, or stay with what is tried again."""
        again: dict[Hashable, list[Delivery]] = {}
        for message in messages:
            outcome, lane = outcomes[id(message)], message.lane
            if lane is not None and lane in again:
                again[lane].append(message)
            elif outcome is ACK:
                self._done.append(Settlement(message, ACK))
            elif self._odd(message, outcome) and lane is not None:
                again[lane] = []
        self._to_settle.set()
        if self.stopping:
            return  # all that is not settled is left to the source
        for lane, behind in again.items():
            # Its head waits and keeps the lane; those behind it in this batch go before what is parked.
            self.lanes.put_first(lane, behind)
        self._give_up(lane for lane in lanes if lane not in again)

    def _give_up(self, lanes: Iterable[Hashable]) -> None:
        for lane in lanes:
            self.front(list(self.lanes.table.pop(lane, None) or ()))
