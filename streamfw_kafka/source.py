"""A subscription to a topic: records in, settlements in any order, one committed position a partition.

    getmany (one at a time, from fetch) -> gate -> hold in the watermark -> deliveries -> ... -> settle -> watermark
                                                                                     timer -> commit (see `group`)

Theory of operation
    Everything that decides what is committed is synchronous: that ``getmany`` returned, the look at the gate, and
    holding the offsets happen with nothing in between. So a record is either held in a live watermark, or it will be
    read again after a seek.

    - A partition is not read further while too many of its messages are open, or too far apart (what a crash would
      repeat). It is left out of ``getmany``, which keeps its buffer; ``pause`` would throw that away.
    - ``getmany`` empties buffers in the order they arrived, each to its end: a backlog of one partition would be read
      for thousands of messages before the next is looked at. So those not served in this round go first.
    - ``getmany`` bounds records, not bytes. What it brings beyond the byte budget waits here, held, for the next fetch.
    - The client's own buffer is read ahead by itself, while handlers run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from streamfw.broker import Delivery, Health, Position, Settlement, Source
from streamfw.ending import ended
from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    BrokerUnavailable,
    PartitionRevoked,
    PublishError,
    SettleError,
    StaleDelivery,
    Unsupported,
)
from streamfw.outcome import ACK, Ack, Drop, Retry

from .assignment import KafkaDelivery, Part, maker_of
from .client import NOTHING
from .damaged import Damaged
from .errors import translated
from .foreign import tolerate
from .group import Membership, holds_back
from .opening import Opening
from .publish import size_of
from .retry import ADDED, Waiting, again_later
from .status import PartitionStatus
from .transactions import Unit
from .watch import Watch

__all__ = ["KafkaSource"]

log = logging.getLogger("streamfw.kafka")

POLL = 0.2  # seconds: how long a stop, or a partition that is below its limits again, waits at most
MOST = 500  # records of one getmany
ALONE = 0.05  # seconds that one waits for a partition that may be damaged: the others wait as well
CLOSE = 4.0  # seconds to leave the group: less than a drain waits for it


class KafkaSource(Source):
    """See `streamfw.broker.Source`."""

    group: Membership

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._subscription = subscription = opening.subscription
        self._settings = opening.settings
        bundled = subscription.batch is not None and not opening.topic.mixed_batches
        self._make = maker_of("partition" if subscription.transactional else subscription.ordered_by, bundled)
        self._tasks: list[asyncio.Task[None]] = []
        self._damaged = Damaged(subscription, MOST, (self._settings.open_limit, self._settings.window_limit))
        self.watch = Watch(opening, lambda: self._fetching, self._damaged.stands)
        self._waiting = Waiting(opening.topic.name)
        self._sent: set[tuple[Part, int]] = set()  # published again by a settlement that is being repeated
        self._served: set[TopicPartition] = set()
        self._over: deque[KafkaDelivery] = deque()
        self._average = 0.0  # bytes of a record's value
        self._moved = 0  # rebalances that what waits has gone through
        self._fetching = self._stopped = self._closed = False
        self.late = self.discarded = self.jumps = 0

    async def reopen(self) -> None:
        """See `Source.reopen`: a new member of the group. What is out survives nothing of that."""
        self._require_open()
        if hasattr(self, "group") and self.group.ours and self.group.gate:
            await self.group.commit()  # what was settled since the last one: it need not come again
        await self._leave()
        self.group = await self._opening.join()
        self.group.consumer.make = self._deliveries
        try:
            self._require_open()  # still
        except BrokerClosed:
            await self._leave()
            raise
        loop = asyncio.get_running_loop()
        self.watch.begin(self.group, loop.time())
        self._tasks = [loop.create_task(self._keep_committing(self.group)), loop.create_task(self.watch.run())]

    async def _keep_committing(self, group: Membership) -> None:
        try:
            await group.keep_committing()
        except Exception as error:  # a bug of ours: without commits nothing may go on
            group.fail(error, "committing")

    # -- fetch

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """See `Source.fetch`."""
        self._fetching = True
        try:
            while not self._stopped:
                self.group.check()
                if not self.group.gate:
                    await self.group.wait_opened()
                elif found := self._from_before(limit, max_bytes) or await self._read(limit, max_bytes):
                    return found
        finally:
            self._fetching = False
        self._require_open()
        return ()

    def _from_before(self, limit: int, max_bytes: int) -> list[KafkaDelivery]:
        """What the last getmany brought beyond the budget, and what has waited long enough."""
        if self._waiting:
            self._over.extend(self._waiting.due(time.time()))
        found: list[KafkaDelivery] = []
        while self._over and len(found) < limit:
            max_bytes -= len(self._over[0].body)
            if max_bytes < 0 and found:
                break
            delivery = self._over.popleft()
            if delivery.part.live:
                found.append(delivery)
        return found

    async def _read(self, limit: int, max_bytes: int) -> list[KafkaDelivery]:
        group = self.group
        try:
            records = await self._getmany(min(limit, MOST))
        except (NoOffsetForPartitionError, OffsetOutOfRangeError) as error:
            await self._out_of_range(error)
            return []
        except UnicodeDecodeError:  # of a header's name
            tolerate()
            group.rewind()
            return []
        except Exception as error:
            raised = [group.parts[tp] for tp in group.consumer.take_raised() if tp in group.parts]
            group.rewind()  # before anything suspends: the next commit would believe the client's position
            if self._stopped:
                return []
            group.check()  # what it was interrupted for says more
            for part in raised:
                self._damaged.met(part, error, time.monotonic())
            if raised:
                return []
            if not isinstance(error, KafkaError):
                raise
            raise translated(error, f"reading {self._subscription.name!r}") from error
        # From here on nothing suspends, and nothing did since the client moved its position.
        if not group.gate:
            # Every partition is seeked before the gate opens. (Not "another epoch than before the call": see `group`.)
            self.discarded += sum(map(len, records.values()))
            return []
        found: list[KafkaDelivery] = []
        for tp, some in records.items():
            part = group.parts[tp]
            part.hold(some)
            if self._damaged:
                self._damaged.read(tp)
            found += self._waiting.take(some, time.time()) if tp.topic == self._opening.retry_name else some
        return self._within(found, max_bytes)

    def _deliveries(self, tp: TopicPartition, records: Iterable[Any]) -> list[Any]:
        """What ``getmany`` hands out in the place of records. With the gate shut they may have no part."""
        part = self.group.parts.get(tp)
        return [*records] if part is None else self._make(part, records)

    async def _getmany(self, most: int) -> dict[TopicPartition, list[Any]]:
        consumer, settings, parts, served = self.group.consumer, self._settings, self.group.parts, self._served
        opened, window = settings.open_limit, settings.window_limit
        if self._opening.retry_name is not None:
            self._bound_what_waits()
        ready = [tp for tp, part in parts.items() if not part.full(opened, window)]
        records: dict[TopicPartition, list[Any]] = {}
        if self._damaged:
            if alone := self._damaged.next(parts, time.monotonic()):
                tp, few = alone
                records = await consumer.getmany(tp, timeout_ms=int(ALONE * 1000), max_records=min(few, most))
            ready = self._damaged.without(ready)
        if records:
            return records
        if 0 < len(turn := [tp for tp in ready if tp not in served]) < len(ready):
            records = await consumer.getmany(*turn, timeout_ms=0, max_records=most)
        if not records:
            served.clear()
            records = await consumer.getmany(*ready or (NOTHING,), timeout_ms=int(POLL * 1000), max_records=most)
        served.update(records)
        return records

    def _bound_what_waits(self) -> None:
        """The retry topic is not read further while too many bytes of it wait here: they are in memory."""
        group, waiting = self.group, self._waiting
        if self._moved != group.rebalances:
            self._moved = group.rebalances
            waiting.forget_lost()
        full = waiting.bytes >= self._subscription.max_bytes
        for tp, part in group.parts.items():
            part.shut = full and tp.topic == self._opening.retry_name

    def _within(self, found: list[KafkaDelivery], max_bytes: int) -> list[KafkaDelivery]:
        """Those that fit; the others wait here. All bodies are measured only while their sum may come to matter: a few
        of each fetch tell when it may."""
        if not found:
            return found
        roomy = max_bytes > 4 * self._average * MOST > 0
        sizes = [len(delivery.body) for delivery in ((*found[::8], found[-1]) if roomy else found)]
        self._average = max(self._average * 0.9, sum(sizes) / len(sizes), 1.0)
        if roomy:
            if max_bytes > 4 * self._average * MOST:
                return found
            sizes = [len(delivery.body) for delivery in found]
        if sum(sizes) <= max_bytes:
            return found
        fitting = 0
        while fitting < len(sizes) and (max_bytes := max_bytes - sizes[fitting]) >= 0:
            fitting += 1
        fitting = max(fitting, 1)
        self._over.extend(found[fitting:])
        return found[:fitting]

    async def _out_of_range(self, error: KafkaError) -> None:
        """What was to be read is not there. Where to go on is ours to decide, and to say."""
        if not self.group.gate or not error.args or not isinstance(error.args[0], dict | Collection):
            await asyncio.sleep(0.05)  # before the first seek, or of a partition that is going: moot
            return
        for tp in [tp for tp in self.group.parts if tp in error.args[0]]:
            await self._jump(tp)

    async def _jump(self, tp: TopicPartition) -> None:
        first = (await self._opening.topics.earliest([tp]))[tp]
        last = (await self._opening.topics.latest([tp]))[tp]
        part = self.group.parts.get(tp)
        if part is None or not self.group.gate:
            return
        if part.mark.end < first:  # retention, or somebody, deleted what we had not read
            log.error("%r: offsets %d to %d of %s-%d are gone", self._subscription, part.mark.end, first - 1, *tp)
            part.mark.skip(first)
            self.group.consumer.seek(tp, first)
        elif part.mark.end > last:  # it was made anew, or its leader lost its end: nothing of it may be left out
            log.error("%r: %s-%d ends at %d, before %d; reading it again", self._subscription, *tp, last, part.mark.end)
            self.group.restart(tp, first)
        self.jumps += 1

    # -- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. Positional: durable with the next commit."""
        self._require_open()
        odd, last = False, None
        offsets: dict[Part, list[int]] = {}
        for settlement in settlements:
            if settlement.outcome is not ACK:
                odd = True
            delivery: KafkaDelivery = settlement.delivery  # type: ignore[assignment]
            if delivery.part is not last:
                last = delivery.part
                note = offsets.setdefault(last, []).append
            note(delivery.offset)
        if odd:
            await self._settle_odd(settlements)
        errors: list[SettleError] = []
        for part, some in offsets.items():
            if wrong := part.mark.resolve_all(some) if part.live else some:
                found = {d.offset: d for s in settlements if (d := s.delivery).part is part}  # type: ignore[attr-defined]
                errors += [self._not_ours(found[offset]) for offset in wrong]
        group = self.group
        group.resolved += len(settlements)
        if group.resolved >= self._settings.commit_after:
            group.tick.set()
        return errors

    async def _settle_odd(self, settlements: Sequence[Settlement]) -> None:
        """Some of it is no plain acknowledgement: refuse what a log cannot do before anything is done, and publish what
        is to come later before anything is settled. When that fails, the whole group is settled again."""
        retry = self._opening.retry_name
        again: list[tuple[KafkaDelivery, float]] = []
        for settlement in settlements:
            delivery, outcome = settlement.delivery, settlement.outcome
            if isinstance(outcome, Retry) and retry is not None:
                assert isinstance(delivery, KafkaDelivery)
                if delivery.part.live and (delivery.part, delivery.offset) not in self._sent:
                    again.append((delivery, outcome.after or 0.0))
            elif not isinstance(outcome, Ack | Drop):
                raise Unsupported(f"Kafka cannot settle with {outcome!r}: a log only moves on")
        if again and retry is not None:
            await self._send_again(again, retry)
        self._sent.clear()

    async def _send_again(self, again: Sequence[tuple[KafkaDelivery, float]], topic: str) -> None:
        answers = await self._opening.publish([again_later(delivery, topic, after) for delivery, after in again])
        failed: PublishError | None = None
        for (delivery, _), error in zip(again, answers or [None] * len(again), strict=True):
            if error is None:
                self._sent.add((delivery.part, delivery.offset))
            else:
                failed = error
        if failed is not None:
            raise BrokerUnavailable(f"{self._subscription!r}: publishing to its retry topic: {failed}") from failed

    def can_retry(self, delivery: Delivery) -> bool:
        """See `Source.can_retry`: its copy has headers of ours besides its own, and the retry topic has a limit.
        Where what we publish is compressed, nobody can tell."""
        limit = self._opening.retry_limit
        if limit is None or self._settings.compression != "none":
            return True
        return size_of(delivery) + ADDED <= limit

    def _not_ours(self, delivery: Delivery) -> SettleError:
        assert isinstance(delivery, KafkaDelivery)
        self.late += 1
        if delivery.part.live:
            return StaleDelivery(delivery, "settled already")
        where = f"{delivery.part.tp.topic}-{delivery.part.tp.partition}"
        return PartitionRevoked(delivery, f"partition {where} was taken away before it was settled")

    def transaction(self, deliveries: Sequence[Delivery]) -> Unit:
        """See `Source.transaction`: Kafka to Kafka. Its `connection` is the partition's transactional producer."""
        self._require_open()
        transactions = self._opening.transactions
        if transactions is None:
            raise Unsupported(f"{self._subscription!r}: it was not opened with transactional=True")
        return Unit(self, transactions, [d for d in deliveries if isinstance(d, KafkaDelivery)])

    def holds_back(self, delivery: Delivery) -> bool:
        """See `Source.holds_back`."""
        return holds_back(delivery)

    # -- seek

    async def seek(self, to: Position) -> None:
        """See `Source.seek`. The partitions of its topic that are ours; what waits in a retry topic stays."""
        self._require_open()
        if (mistake := self._opening.topic.seek_mistake(to)) is not None:
            raise ValueError(f"{self._subscription!r}: seek({to!r}): {mistake}")
        group = self.group
        rebalances = group.rebalances
        group.check_still(rebalances)
        ours = [tp for tp in group.parts if tp.topic != self._opening.retry_name]
        if isinstance(to, Mapping) and (strange := sorted(set(to) - {tp.partition for tp in ours})):
            raise ValueError(f"{self._subscription!r}: partitions {strange} are not this process's")
        await group.move(await self._opening.offsets_of(to, ours), rebalances)

    # -- the end

    async def flush(self, deadline: float) -> None:
        """See `Source.flush`."""
        self._require_open()
        await self.group.flush(deadline)

    async def stop(self) -> None:
        """See `Source.stop`."""
        self._stopped = True
        if hasattr(self, "group"):  # else its first opening was interrupted, or failed
            self.group.opened.set()
            await self._end_fetch()

    async def _end_fetch(self) -> None:
        """A `getmany` that waits for the end of a rebalance is not to be waited for."""
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * POLL
        while self._fetching and loop.time() < end:
            self.group.consumer.interrupt()  # more than once: it may be about to wait
            await asyncio.sleep(0.01)

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this subscription to Kafka was closed")

    async def close(self) -> None:
        """See `Source.close`: the group is left, so what is unsettled is somebody else's at once."""
        if self._closed:
            return
        await self.stop()
        self._closed = True
        await self._leave()

    async def _leave(self) -> None:
        """Close the consumer; nothing is ours any more."""
        group: Membership | None = getattr(self, "group", None)
        if group is None or group.closed:
            return
        group.closed = True
        group.gate = False
        group.opened.set()
        await ended(self._tasks)
        group.drop_all()
        self._over.clear()
        self._waiting.clear()
        await group.consumer.end(CLOSE)
        if self._opening.transactions is not None:  # last: a rebalance that goes on meanwhile starts producers
            await self._opening.transactions.close()

    def health(self) -> Health:
        """See `Source.health`."""
        try:
            self._require_open()
            self.group.check()
        except BrokerError as error:
            return Health(False, str(error))
        if problem := self._damaged.problem(self.group.parts):
            return Health(False, problem)
        return self.watch.health()

    def partitions(self) -> list[PartitionStatus]:
        """How the partitions are that this source has now. No I/O; to be called in the source's event loop."""
        self._require_open()
        return [self._status(part) for part in self.group.parts.values()]

    def _status(self, part: Part) -> PartitionStatus:
        mark, end = part.mark.position, self.watch.end_of(part.tp)
        is_open = part.mark.open > 0
        return PartitionStatus(
            topic=part.tp.topic,
            partition=part.tp.partition,
            committed=None if part.committed < 0 else part.committed,
            mark=mark,
            read_to=max(part.mark.end, self.group.consumer.read_to(part.tp) or 0),
            open=part.mark.open,
            blocking=mark if is_open else None,
            since=part.since if is_open and part.blocking == mark else None,
            end=end,
            lag=None if end is None else max(0, end - mark),
        )

    def gauges(self) -> Mapping[str, float]:
        """See `Source.gauges`."""
        parts = list(self.group.parts.values())
        return {"lag": self.watch.lag(), "open": sum(part.mark.open for part in parts), "partitions": len(parts)}
