"""Membership in a consumer group: which partitions are ours, and what of them is committed.

Theory of operation
    aiokafka rebalances eagerly: every partition is revoked and then assigned again, most of them to the same member.
    Between the two, a **gate** is shut:

    - *revoked*: the gate is shut first. The pump holds what is queued, and what runs may end, for `rebalance_drain`
      seconds, because the whole group waits meanwhile. The commit in flight is awaited, the marks are committed under
      our own generation, and all state is kept.
    - *assigned*: the committed offsets are read in one request. A partition that came back with our own committed
      offset keeps its state, its queued messages and its running handlers, and is read on from where we were; any other
      begins a new epoch, and what is left of the old one is dropped. Every partition is seeked, then the pump goes on,
      and the gate opens last.

    A result of ``getmany`` counts when the gate is open *on its return*, and is held with no suspension in between (see
    `source`). To compare epochs before and after the call loses messages: a call that slept through a whole rebalance
    returns records that were read after our seek.

    A commit goes out under the generation in which the partitions were given to us, or not at all: the check and the
    request have no suspension between them, and a refused commit is dropped; the next one is computed anew. When we
    were fenced (our generation is over before we heard of it) nothing is committed and nothing kept, since others have
    our partitions already.

    aiokafka logs what its listeners raise, and goes on. So both catch everything, and the next fetch raises it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    IllegalGenerationError,
    IllegalStateError,
    KafkaError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)

from streamfw.broker import Subscription
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable
from streamfw.runtime.signal import Signal

from .assignment import UNKNOWN, Part
from .client import GroupConsumer
from .errors import translated
from .settings import Settings

__all__ = ["Membership", "holds_back"]

log = logging.getLogger("streamfw.kafka")

LOOK = 0.2  # seconds between two looks at what keeps the gate shut
TAKE_OVER = 20.0  # seconds: no heartbeat is sent meanwhile, so well below the session timeout
TELL = 5.0  # seconds between two commits of one offset, when only what is told with it has changed
TWINS = 3  # times in a row that a static member is thrown out before it is said to have a twin
_MOVING = (IllegalGenerationError, RebalanceInProgressError, UnknownMemberIdError)  # who is not a member, or will be
First = Callable[[Collection[TopicPartition]], Awaitable[dict[TopicPartition, int]]]


class Membership(ConsumerRebalanceListener):  # type: ignore[misc, unused-ignore]
    """The partitions of one consumer. `first` tells where partitions without a committed offset begin; `fence` is
    awaited with them all before their committed offsets are read. `thrown_out` is when the group threw its members out,
    this one and those before it."""

    def __init__(
        self,
        consumer: GroupConsumer,
        subscription: Subscription,
        settings: Settings,
        *,
        first: First,
        fence: Callable[[Collection[TopicPartition]], Awaitable[None]] | None = None,
        manual: bool = False,
        thrown_out: list[float] | None = None,
    ) -> None:
        self.consumer, self._subscription, self._settings = consumer, subscription, settings
        self._first, self._fence, self._manual = first, fence, manual
        self.parts: dict[TopicPartition, Part] = {}
        self.gate = False
        self.rebalancing = False
        self.opened = asyncio.Event()
        self.failure: BrokerError | None = None
        self.generation = UNKNOWN
        self.resolved = 0  # since the last commit
        self.tick = Signal()
        self._epochs = 0
        self._committing: asyncio.Task[bool] | None = None
        self._thrown_out = [] if thrown_out is None else thrown_out
        self.joined_at = self.committed_at = time.monotonic()
        self.closed = False
        self.trouble: BrokerError | None = None  # why the last commit was not accepted, if it should have been
        # What happened, for tests, status and metrics.
        self.commits = self.refused = self.kept = self.fresh = self.fenced = self.rebalances = self.gaps = 0
        self.paused: list[float] = []  # seconds that the last rebalances shut the gate
        self._shut_at = time.monotonic()

    @property
    def ours(self) -> bool:
        """Whether what we commit counts: we are still who these partitions were given to."""
        if self._manual:
            return True
        return self.generation > 0 and self.consumer.generation == self.generation

    def fail(self, error: BaseException, what: str) -> None:
        """Let the next fetch raise this."""
        if self.failure is None:
            self.failure = error if isinstance(error, BrokerError) else translated(error, what)
        self.opened.set()
        self.consumer.interrupt()

    # -- revoked and assigned

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Called by the client before it joins again, while heartbeats go on."""
        if self.gate:
            self._shut_at = time.monotonic()
        self.gate = False
        self.rebalancing = True
        self.opened.clear()
        if not self.parts:
            return
        try:
            await self._give_up()
        except Exception as error:
            self.fail(error, f"giving up partitions of group {self._subscription.group!r}")

    async def _give_up(self) -> None:
        ours, pump = self.ours, self._subscription.pump
        pump.hold()
        if ours:
            # With lanes, or batches, something may be queued that came before what is done: it holds the mark back, and
            # what is done after it would be repeated if it did not end first.
            await pump.quiesce(self._settings.rebalance_drain, holds_back)
        await self._end_commit_in_flight()
        if ours:
            await self.commit()
            return
        self.fenced += 1
        self.consumer.forget_assignment()
        log.warning(
            "%r: we were taken for dead and left the group; what was not committed comes again", self._subscription
        )
        self.drop_all()
        self._look_for_a_twin()

    async def _end_commit_in_flight(self) -> None:
        if self._committing is not None:
            _, late = await asyncio.wait([self._committing], timeout=self._settings.commit_timeout)
            for task in late:
                task.cancel()

    def _look_for_a_twin(self) -> None:
        """Two members with one ``group.instance.id`` throw each other out for ever, and each believes to own what the
        other has: aiokafka sends no instance id in heartbeats and commits, so nobody is told."""
        now = time.monotonic()
        self._thrown_out[:] = [at for at in self._thrown_out if now - at < self._settings.session_timeout] + [now]
        if self._settings.static_member and len(self._thrown_out) >= TWINS:
            twin = BrokerRefused(
                f"{self._subscription!r}: thrown out of the group {len(self._thrown_out)} times in "
                f"{self._settings.session_timeout:g} s: another process uses static_member="
                f"{self._settings.static_member!r} as well; give each process its own"
            )
            self.fail(twin, "")

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Called by the client after it joined; no heartbeat is sent until it returns."""
        try:
            async with asyncio.timeout(TAKE_OVER):
                await self.take_over(assigned)
        except Exception as error:
            self.fail(error, f"taking over partitions in group {self._subscription.group!r}")

    async def take_over(self, assigned: Collection[TopicPartition]) -> None:
        """Begin, or go on, with these partitions and no others."""
        consumer = self.consumer
        if self._fence is not None:
            await self._fence(assigned)
        stable = self._fence is not None
        left = {tp: part.committed for tp, part in self.parts.items()}
        committed = await consumer.committed_offsets(assigned, stable=stable) if assigned else {}
        unknown = [tp for tp in assigned if tp not in committed and not self._keeps(tp, UNKNOWN)]
        first = await self._first(unknown) if unknown else {}
        before, self.parts = self.parts, {}
        for tp in sorted(assigned):
            offset = committed.get(tp, UNKNOWN)
            part = before.get(tp)
            if part is not None and part.is_still_ours(offset, left[tp]):
                part.committed = max(part.committed, offset)
                self.kept += 1
                before.pop(tp)
            else:
                part = self._new_part(tp, first.get(tp, offset), offset)
            self.parts[tp] = part
            consumer.seek(tp, part.mark.end)
        for part in before.values():
            self._end(part)
        self.generation = consumer.generation
        consumer.tell_assignor(self.generation)
        self._go_on()

    def _go_on(self) -> None:
        self._drop_gone()  # and go on; there may have been no revoked for this assigned (fenced during a join)
        now = time.monotonic()
        if self.rebalances:
            self.paused = [*self.paused[-99:], now - self._shut_at]
        log.info("%r: %s", self._subscription, ", ".join(map(_named, self.parts)) or "no partitions")
        self.rebalances += 1
        self.trouble = None  # or the committed offsets could not have been read
        self.joined_at = now
        self.rebalancing = False
        self.gate = True
        self.opened.set()
        self.resolved += self._settings.commit_after  # commit at once
        self.tick.set()

    def _keeps(self, tp: TopicPartition, committed: int) -> bool:
        part = self.parts.get(tp)
        return part is not None and part.is_still_ours(committed, part.committed)

    def _new_part(self, tp: TopicPartition, start: int, committed: int) -> Part:
        self._epochs += 1
        self.fresh += 1
        return Part(tp, start, committed, self._epochs)

    def restart(self, tp: TopicPartition, position: int) -> None:
        """Read a partition from somewhere else, as a new epoch: what is at hand of it is ours no more."""
        self._renew(tp, position, UNKNOWN)
        self.consumer.seek(tp, position)
        self._drop_gone()

    def _renew(self, tp: TopicPartition, position: int, committed: int) -> None:
        old = self.parts.get(tp)
        if old is not None:
            self._end(old)
        self.parts[tp] = self._new_part(tp, position, committed)

    async def move(self, wanted: Mapping[TopicPartition, int], rebalances: int) -> None:
        """Read these partitions on from other positions, and commit those. Like a rebalance of our own: nothing new
        begins, what runs may end, and everything is seeked, because what is being read meanwhile is thrown away.
        `rebalances` is their count when the partitions were asked for.

        Raises a `BrokerError`; then nothing has moved.
        """
        self.check_still(rebalances)
        pump = self._subscription.pump
        self.gate = False
        self.opened.clear()
        pump.hold()
        try:
            await pump.quiesce(self._settings.rebalance_drain)
            await self._end_commit_in_flight()
            self.check_still(rebalances, moving=True)
            # As a commit: a rebalance that begins now awaits it before it commits anything itself.
            self._committing = moving = asyncio.ensure_future(self._commit_move(wanted))
            try:
                await asyncio.wait([moving])
            except asyncio.CancelledError:
                moving.cancel()
                await asyncio.wait([moving])
                raise
            if moving.cancelled():
                raise TimeoutError
            moving.result()
        except (KafkaError, TimeoutError) as error:
            raise translated(error, f"moving group {self._subscription.group!r}") from error
        finally:
            if not (self.rebalancing or self.gate or self.closed):  # else it opens when that is over, or never
                self.gate = True
                self.rewind()
                pump.release(drop=_is_gone)
                self.opened.set()

    def rewind(self) -> None:
        """Read on from where we are. What the client had taken of some partitions when it raised for another is lost:
        its positions are past that, and ours are not."""
        if not self.gate:
            return  # everything is seeked before it opens
        for tp, part in self.parts.items():
            try:
                self.consumer.seek(tp, part.mark.end)
            except IllegalStateError:  # other topics match its pattern since a moment ago: a rebalance follows
                return

    def check_still(self, rebalances: int, moving: bool = False) -> None:
        """Raises `BrokerUnavailable` unless the partitions are what they were after so many rebalances."""
        if self.gate is moving or self.rebalancing or self.rebalances != rebalances or not self.ours:
            raise BrokerUnavailable(f"{self._subscription!r}: its partitions are just moving; seek again")

    async def _commit_move(self, offsets: Mapping[TopicPartition, int]) -> bool:
        try:
            await self.consumer.commit_once(offsets, self._settings.commit_timeout)
        except BaseException:
            for tp in offsets.keys() & self.parts.keys():  # it may have arrived all the same: commit again what holds
                self.parts[tp].committed = UNKNOWN
            raise
        if not self.closed:
            for tp, offset in offsets.items():
                self._renew(tp, offset, offset)
        return True

    def _end(self, part: Part) -> None:
        part.live = False
        self.gaps += part.gaps

    def drop_all(self) -> None:
        """Nothing is ours any more; what is queued is dropped."""
        for part in self.parts.values():
            self._end(part)
        self.parts = {}
        self._drop_gone()
        self._subscription.pump.hold()

    def _drop_gone(self) -> None:
        """Let the pump go on without what is not ours any more; held first, or it would look at nothing."""
        self._subscription.pump.hold()
        self._subscription.pump.release(drop=_is_gone)

    # -- commits

    async def keep_committing(self) -> None:
        """Commit at once where partitions begin, or "latest" would be later after a crash; then each `commit_every`
        seconds, or after `commit_after` settled messages. Until it is cancelled."""
        every, wait = min(self._settings.commit_every, self._settings.max_poll_interval / 3), 0.0
        while True:
            await self.tick.wait_for(wait)
            wait = every * random.uniform(0.8, 1.2)  # members of a group not all at once
            self.consumer.stay_polled()  # also with the gate shut
            if not self.gate:
                continue
            if not self.ours:  # so a heartbeat was told
                self._begin_nothing()
                continue
            self._committing = asyncio.ensure_future(self.commit())
            try:
                # wait: the commit may be cancelled by a rebalance, and this task goes on.
                await asyncio.wait([self._committing])
            finally:
                self._committing = None
            if self.resolved >= self._settings.commit_after:  # while it was on its way, and nobody heard the tick
                wait = 0.0

    async def commit(self, seconds: float = math.inf) -> bool:
        """One attempt, for at most so long. True when everything that may be committed is; False when it was refused,
        or is not known."""
        self.resolved = 0
        if not self.ours:
            return False
        offsets = self._to_commit()
        if not offsets:
            self.trouble = None
            return True
        parts = {tp: self.parts[tp] for tp in offsets}  # those of now: one may be replaced while this is on its way
        facts = {tp: part.facts() for tp, part in parts.items()}
        for part in parts.values():
            part.asked += 1
        try:
            await self.consumer.commit_once(offsets, min(seconds, self._settings.commit_timeout), facts)
        except (KafkaError, TimeoutError) as error:
            self._refused(error)
            return False
        finally:
            for part in parts.values():
                part.asked -= 1
        self.commits += 1
        self.trouble = None
        self.committed_at = now = time.monotonic()
        for tp, offset in offsets.items():
            part = parts[tp]
            part.committed, part.told, part.told_at = offset, facts[tp], now
        return True

    def _refused(self, error: KafkaError | TimeoutError) -> None:
        self.refused += 1
        known = translated(error, f"committing for group {self._subscription.group!r}")
        if self._manual and isinstance(error, UnknownMemberIdError):
            known = BrokerRefused(
                f"{self._subscription!r}: Topic(partitions=..) cannot commit: the group has members whom it gives its "
                "partitions to, and takes commits from them only; give it a group= of its own"
            )
        if not known.transient:
            self.fail(known, "")
        if not isinstance(error, _MOVING):
            self.trouble = known
        log.info("%r: a commit was not accepted: %s", self._subscription, known)
        if self.gate and not self.ours:
            self._begin_nothing()

    def _begin_nothing(self) -> None:
        """We were taken for dead, and others may have our partitions already: what is begun now is done twice. The
        client has yet to find out what that means; when it has joined again, the pump goes on."""
        self._subscription.pump.hold()

    def _to_commit(self) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        now, told = time.time(), time.monotonic() - TELL
        for tp, part in self.parts.items():
            if part.bound:
                continue
            # While the gate is shut, what was read may have been thrown away: the client's position counts only after
            # our seek.
            position = part.position(self.consumer.read_to(tp) if self.gate else None)
            part.look(now)
            if position > part.committed:
                offsets[tp] = position
                part.sent = max(part.sent, position)
            elif part.told_at < told and position == part.committed and part.facts() != part.told:
                offsets[tp] = position  # others ask what is open of it, and what it waits for
        return offsets

    async def flush(self, deadline: float) -> None:
        """Commit all there is, until it is accepted or the time is over."""
        loop = asyncio.get_running_loop()
        while (left := deadline - loop.time()) > 0 and not self.closed and self.failure is None:
            if not self.gate and all(part.position(None) <= part.committed for part in self.parts.values()):
                return
            if self.gate:
                if self._committing is not None:
                    await asyncio.wait([self._committing], timeout=left)
                if await self.commit(deadline - loop.time()):
                    return
            await asyncio.sleep(min(0.05, left))  # not `opened`: `stop` has set it, whatever the gate is

    def unsettled(self) -> Iterable[Part]:
        """The parts with something open."""
        return [part for part in self.parts.values() if part.mark.open]

    async def wait_opened(self) -> None:
        """Wait for the gate, a moment at most. Raises a `BrokerError` that keeps it shut."""
        try:
            async with asyncio.timeout(LOOK):
                await self.opened.wait()
        except TimeoutError:
            pass
        try:
            self.consumer.raise_errors()
        except KafkaError as error:
            raise translated(error, f"joining group {self._subscription.group!r}") from error

    def check(self) -> None:
        """Raises what has gone wrong in the background."""
        if self.failure is not None:
            raise self.failure
        if not self.consumer.coordinated and not self.closed and not self._manual:
            raise BrokerUnavailable(f"{self._subscription!r}: the client's group task has ended in silence")


def holds_back(delivery: object) -> bool:
    """See `Source.holds_back`."""
    part: Part = delivery.part  # type: ignore[attr-defined]
    return part.live and part.mark.behind(delivery.offset)  # type: ignore[attr-defined]


def _named(tp: TopicPartition) -> str:
    return f"{tp.topic}-{tp.partition}"


def _is_gone(delivery: object) -> bool:
    part: Part = delivery.part  # type: ignore[attr-defined]
    return not part.live
