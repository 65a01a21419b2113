"""Notices when a source does not do what it should although nothing has failed: a consumer that stopped in silence, a
group that was left, one message that holds a whole partition, a server that does not answer.

Theory of operation
    One look a second, without I/O, compares what moved since the last one. Only where that leaves a doubt the server is
    asked, apart from the consumer, and at most once in `ASK` seconds: where partitions end whose fetches have not been
    answered lately, or which are known to go on and are not read; whose partitions are, while we have none.

    - *Stalled*: the server says that a partition goes on, a fetch of ours waits, the partition is not full, and its
      position has not moved for `STALL` seconds. After twice as long the source is opened again; should it stand at the
      same offset after that, the next time takes twice as long.
    - *Blocked*: a partition is full (`open_limit`, `window_limit`) behind one message that is not settled. That is no
      fault of the client, and a reopened source would read the same message again: it is told, no more.
    - *Fenced*, *no heartbeats*, *joining*, *no partitions*: see each.

    The watch has a clock of its own, which runs at most two seconds a look: a process that was stopped, or blocked, for
    an hour has not waited for anything meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

from aiokafka import TopicPartition

from streamfw.broker import Health
from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError, BrokerUnavailable

from .assignment import Part
from .group import Membership
from .opening import Opening
from .reading import record_at
from .wire import message_id_of

__all__ = ["Watch"]

log = logging.getLogger("streamfw.kafka")

# Seconds, of the watch's own clock.
EVERY = 1.0  # between two looks
ASK = 5.0  # between two questions; and after which something that stands is doubtful
ANSWER = 5.0  # for an answer
QUIET = 5.0  # without an answered heartbeat
STALL = 30.0  # that a partition may stand
REMIND = 300.0  # between two warnings of one blocking
PATIENCE = 32  # times that a source which is opened again in vain is waited for longer, at most


class _Seen:
    """What was seen of one partition in one epoch. Times are of the watch's clock."""

    __slots__ = ("answer", "behind", "end", "full", "learned", "low", "moved", "part", "position", "warned")

    def __init__(self, part: Part, now: float) -> None:
        self.part = part
        self.position = part.mark.end
        self.moved = now  # when the position last moved, or had no reason to
        self.answer: int | None = None  # the last answer to a fetch
        self.end: int | None = None
        self.learned = now  # when we last heard where it ends
        self.behind: float | None = None  # since when the server says that it goes on from this position
        self.low = -1  # the offset that it is full behind,
        self.full: float | None = None  # and since when
        self.warned: tuple[int, float] | None = None  # of which offset, and when

    def rest(self, now: float) -> None:
        """It need not move now."""
        self.moved, self.behind = now, None


class Watch:
    """Watches one source, over all its reopenings. `fetching` tells whether a fetch waits at this moment, `stands`
    whether a partition cannot be read on, which is known and told."""

    def __init__(self, opening: Opening, fetching: Callable[[], bool], stands: Callable[[Part], bool]) -> None:
        self._opening, self._settings, self._topics = opening, opening.settings, opening.topics
        self._subscription = opening.subscription
        self._fetching, self._stands = fetching, stands
        self._manual = opening.topic.partitions is not None
        self._stood: dict[TopicPartition, tuple[int, int]] = {}  # where it was opened again for, and how often
        self.clock = self._looked = 0.0

    def begin(self, group: Membership, now: float) -> None:
        """Watch this membership from now on (of the loop's clock)."""
        self._group, self._consumer = group, group.consumer
        self._looked = now
        self._seen: dict[TopicPartition, _Seen] = {}
        self._shut: float | None = None  # since when the gate is shut
        self._fenced: float | None = None  # since when we are no member, without joining
        self._beats, self._beat_at = -1, self.clock  # how many heartbeats were accepted, and when the last one
        self._free, self._elsewhere = 0, ""  # while we have no partitions: how many nobody has, and who has them
        self._free_since: float | None = None
        self._asked = self.clock - ASK
        self._unanswered = ""
        self._unwarned: dict[TopicPartition, str] = {}
        self._problems: list[str] = []
        self._details: list[str] = []

    async def run(self) -> None:
        """Look once a second, and ask where that leaves a doubt, until it is cancelled."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(EVERY)
                try:
                    self.look(loop.time())
                    if (asking is None or asking.done()) and self._in_doubt():
                        asking = loop.create_task(self._ask())
                except Exception:  # a bug of ours: the next look may do better, and without looks nobody would tell
                    log.exception("%r: looking after its source", self._subscription)
        finally:
            if asking is not None:
                await ended((asking,), timeout=1.0)

    # -- what it says

    def health(self) -> Health:
        """What is to be said now, in one line."""
        group = self._group
        if group.closed:
            return Health(False, "it is being opened again")
        if not group.gate and not group.rebalances:
            return Health(False, "joining the consumer group")
        problems = list(self._problems)
        if group.trouble is not None:
            problems.insert(0, f"commits are not accepted: {group.trouble}")
        if self._unanswered:
            problems.append(self._unanswered)
        if problems:
            return Health(False, "; ".join(problems))
        known = self._known(lambda name: name != self._opening.retry_name)
        if self._opening.retry_name is not None:
            known += f"; retry topic: {self._known(lambda name: name == self._opening.retry_name)}"
        return Health(True, "; ".join((known, *self._details)))

    def _known(self, among: Callable[[str], bool]) -> str:
        parts = {tp: part for tp, part in list(self._group.parts.items()) if among(tp.topic)}
        return f"{len(parts)} partition{'' if len(parts) == 1 else 's'}, lag {self._lag(parts)}"

    def end_of(self, tp: TopicPartition) -> int | None:
        """Where a partition of ours ends, as last heard: by a fetch, or because we have asked since."""
        seen, part = self._seen.get(tp), self._group.parts.get(tp)
        answer, end = self._consumer.heard(tp)
        if seen is not None and seen.answer == answer:
            end = seen.end
        return None if end is None or part is None else max(end, part.mark.end)

    def lag(self) -> int:
        """From what is settled of our partitions to their ends, as last looked at. Any thread may ask."""
        return self._lag(dict(self._group.parts))

    def _lag(self, parts: Mapping[TopicPartition, Part]) -> int:
        return sum(max(0, (self.end_of(tp) or 0) - part.low) for tp, part in parts.items())

    # -- looking

    def look(self, now: float) -> None:
        """Compare with the last look. `now` is the loop's clock."""
        self.clock += min(now - self._looked, 2 * EVERY)
        self._looked = now
        self._problems, self._details = [], []
        group = self._group
        if group.failure is not None:
            self._consumer.interrupt()  # again: a `getmany` may have been about to wait
        if group.failure is not None or group.closed:
            return
        if not self._consumer.coordinated and not self._manual:
            self._fail("the client's group task has ended in silence")
        elif not self._consumer.reading:
            self._fail("the client's reading task has ended in silence")
        elif not group.gate:
            self._look_at_joining()
        else:
            self._shut = None
            self._look_at_membership()
            self._seen = {tp: self._look_at(tp, part) for tp, part in group.parts.items()}
            if group.parts:
                self._free, self._free_since, self._elsewhere = 0, None, ""
            elif not self._manual:
                self._look_at_nothing()

    def _fail(self, why: str) -> None:
        """Let the runtime open the source again."""
        self._group.fail(BrokerUnavailable(f"{self._subscription!r}: {why}"), "")

    def _look_at_joining(self) -> None:
        """A group moves its partitions for as long as its slowest member needs, at most `rebalance_timeout`."""
        if self._shut is None:
            self._shut = self.clock
        self._fenced, self._beat_at = None, self.clock
        for seen in self._seen.values():
            seen.rest(self.clock)
        took, limit = self.clock - self._shut, self._settings.rebalance_timeout
        if took <= limit:
            self._details.append("the group moves its partitions")
        elif took <= 2 * limit + self._settings.session_timeout:
            self._problems.append(f"joining the consumer group for {took:.0f} s")
        else:
            self._fail(f"it did not come into its group for {took:.0f} s")

    def _look_at_membership(self) -> None:
        """aiokafka joins again at once when it is told that we are no member, and sends heartbeats otherwise."""
        if self._manual:
            return
        consumer, now, patience = self._consumer, self.clock, self._settings.session_timeout
        if self._group.ours:
            self._fenced = None
        elif self._fenced is None:
            self._fenced = now
        elif now - self._fenced > patience:
            self._fail("it is no member of its group any more, and does not join again")
            return
        elif now - self._fenced > QUIET:
            self._problems.append("no member of the group any more: others may have its partitions")
        if consumer.heartbeats != self._beats or self._fenced is not None:
            self._beats, self._beat_at = consumer.heartbeats, now
        silent = now - self._beat_at
        if silent > max(QUIET, 3 * self._settings.heartbeat):
            what = "was answered" if consumer.beating else "was sent"
            self._problems.append(f"no heartbeat {what} for {silent:.0f} s")
        if silent > patience and not consumer.beating:
            self._fail(f"no heartbeat was sent for {silent:.0f} s")

    def _look_at_nothing(self) -> None:
        """A group with more members than partitions has some without. If there are partitions that nobody has, the
        client missed its turn (aiokafka #1187)."""
        if not self._free:
            self._free_since = None
            self._details.append(self._elsewhere or "no partitions")
        elif self._free_since is None:
            self._free_since = self.clock
        elif (took := self.clock - self._free_since) > 2 * STALL:
            self._fail(f"it was given no partition for {took:.0f} s, and nobody has {self._free} of them")
        elif took > STALL:
            self._problems.append(f"no partitions, and nobody has {self._free} of them")

    def _look_at(self, tp: TopicPartition, part: Part) -> _Seen:
        seen = self._seen.get(tp)
        if seen is None or seen.part is not part:
            seen = _Seen(part, self.clock)
        answer, end = self._consumer.heard(tp)
        if answer != seen.answer:
            seen.answer, seen.end, seen.learned = answer, end, self.clock
        position = self._consumer.read_to(tp)
        position = part.mark.end if position is None else position
        full = part.full(self._settings.open_limit, self._settings.window_limit)
        if position != seen.position or full or not self._fetching() or self._stands(part):
            seen.position = position
            seen.rest(self.clock)
        if full:
            self._look_at_full(tp, part, seen)
            return seen
        if seen.full is not None:
            self._flows_again(tp, seen)
        if seen.behind is not None:
            self._look_at_standing(tp, seen)
        elif part.blocking >= 0 and tp.topic != self._opening.retry_name and (age := time.time() - part.since) > STALL:
            self._details.append(f"offset {part.blocking} of {_named(tp)} is open for {age:.0f} s")
        return seen

    def _look_at_standing(self, tp: TopicPartition, seen: _Seen) -> None:
        assert seen.behind is not None
        took = self.clock - seen.behind
        if took < STALL:
            return
        where = (
            f"nothing is read of {_named(tp)} for {took:.0f} s, from {seen.position} on, though it ends at {seen.end}"
        )
        position, times = self._stood.get(tp, (-1, 1))
        times = times if position == seen.position else 1
        if took < 2 * STALL * times:
            self._problems.append(where)
            return
        self._stood[tp] = seen.position, min(2 * times, PATIENCE)
        self._fail(where)

    # -- blocked

    def _look_at_full(self, tp: TopicPartition, part: Part, seen: _Seen) -> None:
        low, now = part.mark.position, self.clock
        if seen.full is None or low != seen.low:
            seen.low, seen.full = low, now
        took = now - seen.full
        if tp.topic == self._opening.retry_name:
            self._details.append(f"{_named(tp)} is full of messages that wait")
            return
        said = f"{_named(tp)} is full behind offset {low} ({part.mark.open} open)"
        (self._problems if took > STALL else self._details).append(said)
        if took >= ASK and self._may_warn(seen):
            seen.warned = low, now
            self._unwarned[tp] = ""

    def _may_warn(self, seen: _Seen) -> bool:
        """Of one offset once, and again after a while; of others more often, but not of each that is slow."""
        if seen.warned is None:
            return True
        low, when = seen.warned
        return self.clock - when >= (REMIND if low == seen.low else REMIND / 5)

    def _flows_again(self, tp: TopicPartition, seen: _Seen) -> None:
        seen.full = None
        self._unwarned.pop(tp, None)
        if seen.warned is not None:
            log.info("%r: %s is read on", self._subscription, _named(tp))

    async def _warn(self, tp: TopicPartition) -> None:
        part, settings = self._group.parts.get(tp), self._settings
        if part is None or not part.mark.open:
            return
        offset, since = part.mark.position, part.since or time.time()
        record = await record_at(settings, tp, offset)
        which = "unknown" if record is None or record.offset != offset else message_id_of(record)
        log.warning(
            "%r: %s is not read on. Offset %d (message %s) has not been settled since %s (%.0f s); from it on %d "
            "messages are open (open_limit=%d) of %d that were read (window_limit=%d). What does its handler wait for? "
            "(timeout= ends one that hangs.)",
            self._subscription, _named(tp), offset, which, datetime.fromtimestamp(since, UTC).isoformat(" ", "seconds"),
            time.time() - since, part.mark.open, settings.open_limit, part.mark.end - offset, settings.window_limit,
        )  # fmt: skip

    # -- asking

    def _in_doubt(self) -> bool:
        if self.clock - self._asked < ASK or self._group.closed:
            return False
        if self._shut is not None:  # a rebalance that takes long: is there somebody who leads it?
            return self.clock - self._shut >= QUIET
        return bool(self._unanswered or self._unwarned or self._doubtful() or not self._group.parts)

    def _doubtful(self) -> list[TopicPartition]:
        """Partitions of which we have not heard lately, or which stand though they are known to go on."""
        now = self.clock
        return [
            tp
            for tp, seen in self._seen.items()
            if now - seen.learned >= ASK or (now - seen.moved >= ASK and (seen.end or 0) > seen.position)
        ]

    async def _ask(self) -> None:
        self._asked = self.clock
        try:
            async with asyncio.timeout(ANSWER):
                if self._group.parts and self._shut is None:
                    await self._ask_for_ends(self._doubtful() or list(self._group.parts))
                else:
                    await self._ask_for_the_others()
        except TimeoutError:
            self._unanswered = f"the server does not answer: nothing for {ANSWER:g} s"
        except BrokerClosed:
            return
        except BrokerError as error:
            self._unanswered = f"the server does not answer: {error}" if error.transient else str(error)
        else:
            self._unanswered = ""
        for tp in list(self._unwarned):
            del self._unwarned[tp]
            await self._warn(tp)

    async def _ask_for_ends(self, partitions: Collection[TopicPartition]) -> None:
        asked = {tp: seen.position for tp in partitions if (seen := self._seen.get(tp)) is not None}
        for tp, end in (await self._topics.latest(asked)).items():
            seen = self._seen.get(tp)
            if seen is None:
                continue
            seen.end, seen.learned = end, self.clock
            if seen.position != asked[tp] or end <= seen.position:
                seen.behind = None
            elif seen.behind is None:
                seen.behind = self.clock

    async def _ask_for_the_others(self) -> None:
        group = await self._topics.group(self._subscription.group)
        if group.state != "Stable":
            return
        every = {
            TopicPartition(name, number)
            for name in self._consumer.subscription()
            for number in await self._topics.partitions(name)
        }
        held = {tp for member in group.members for tp in member.partitions}
        self._free = len(every - held)
        self._elsewhere = (
            f"no partitions: the group has {len(group.members)} members, who have all {len(every)} of them"
        )


def _named(tp: TopicPartition) -> str:
    return f"{tp.topic}-{tp.partition}"
