"""How a source comes to its partitions: topics checked, a consumer made, the group joined."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from hashlib import sha256

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from streamfw.broker import Position, Subscription
from streamfw.ending import to_its_end
from streamfw.errors import BrokerError, BrokerRefused, PublishError
from streamfw.message import Outgoing

from .admin import Topics
from .client import GroupConsumer, fresh_assignor
from .errors import DRIVER_ERRORS, translated
from .group import Membership
from .groups import offsets_of
from .nodes import diagnosed
from .publish import MAX_BYTES
from .settings import Settings, client_arguments
from .topic import Topic, name_mistake, topic_of, whole
from .transactions import Transactions

__all__ = ["Opening"]

log = logging.getLogger("streamfw.kafka")
Publish = Callable[[Sequence[Outgoing]], Awaitable[Sequence[PublishError | None]]]
DEFAULT_CLIENT_ID = Settings.__struct_defaults__[0]
EARLIEST, LATEST = "earliest", "latest"


class Opening:
    """Joins the group of one subscription, as often as it must be joined."""

    def __init__(
        self,
        subscription: Subscription,
        settings: Settings,
        topics: Topics,
        publish: Publish,
        transactions: Transactions | None = None,
    ) -> None:
        self.subscription, self.settings, self.topics = subscription, settings, topics
        self.transactions = transactions
        self.publish = publish
        self.topic: Topic = topic_of(subscription)
        self.retry_name = self.topic.retry_name(subscription.group)
        self.retry_limit: int | None = None  # the largest batch that its retry topic takes, in bytes; None: not known
        # Partitions as they were when this was opened first, each with its end where it is to begin there.
        self._there: dict[TopicPartition, int | None] | None = None
        self._known: set[str] = set()  # topics that the group had read of by then
        self._thrown_out: list[float] = []

    async def join(self) -> Membership:
        """Connect and join. Returns when the partitions are ours, or when `connect_timeout` is over and the group is
        still busy with moving its own (then they come later). Raises a `BrokerError`."""
        await self._check_topics()
        await self._look_around()
        await self._ask_for_limit()
        what = f"subscribing to {self.topic.name!r} in group {self.subscription.group!r}"
        consumer = self._made()
        membership = Membership(
            consumer,
            self.subscription,
            self.settings,
            first=self._first,
            fence=None if self.transactions is None else self.transactions.fence,
            manual=self.topic.partitions is not None,
            thrown_out=self._thrown_out,
        )
        try:
            await self._start(consumer)
            await self._subscribe(consumer, membership)
            membership.check()
        except (KafkaError, OSError, TimeoutError) as error:
            await to_its_end(self._give_up(consumer))
            raise translated(error, what) from error
        except BaseException:
            await to_its_end(self._give_up(consumer))
            raise
        return membership

    async def _give_up(self, consumer: GroupConsumer) -> None:
        """Leave nothing behind of a group that was not joined, nor of partitions that were ours already."""
        await consumer.end(1.0)
        if self.transactions is not None:
            await self.transactions.close()

    async def _start(self, consumer: GroupConsumer) -> None:
        try:
            async with asyncio.timeout(self.settings.connect_timeout):
                await consumer.start()
        except DRIVER_ERRORS as error:
            raise await diagnosed(error, f"connecting to read {self.topic.name!r}", self.settings) from error

    def _made(self) -> GroupConsumer:
        settings = self.settings
        arguments = client_arguments(settings) | {
            # A join is a request, too, and takes as long as the slowest member of the group.
            "request_timeout_ms": round((settings.rebalance_timeout + 5) * 1000),
        }
        return GroupConsumer(
            fresh_assignor(),
            client_id=self._client_id(),
            group_id=self.subscription.group,
            group_instance_id=self._instance(),
            session_timeout_ms=round(settings.session_timeout * 1000),
            heartbeat_interval_ms=round(settings.heartbeat * 1000),
            rebalance_timeout_ms=round(settings.rebalance_timeout * 1000),
            max_poll_interval_ms=round(settings.max_poll_interval * 1000),
            fetch_max_wait_ms=round(settings.fetch_wait * 1000),
            isolation_level=settings.isolation,
            **{name: value for name, value in arguments.items() if name != "client_id"},
        )

    def _client_id(self) -> str:
        """The group's tools show it for each member: it should say which process that is. One that was given is kept,
        because quotas go by it."""
        given, member = self.settings.client_id, self.subscription.member
        return f"{given}-{member}" if member and given == DEFAULT_CLIENT_ID else given

    def _instance(self) -> str | None:
        """The name of this member where it is static: each subscriber of a process is one, also several in a group."""
        who, topic = self.settings.static_member, self.topic
        if who is None or topic.partitions is not None:
            return None
        if name_mistake(name := f"{who}.{topic.name}") is None:  # the server's rule for these names is the same
            return name
        return f"{who[:200]}.{sha256(name.encode()).hexdigest()[:32]}"

    async def _subscribe(self, consumer: GroupConsumer, membership: Membership) -> None:
        topic = self.topic
        if topic.partitions is not None:
            assigned = {TopicPartition(topic.name, number) for number in topic.partitions}
            consumer.assign(assigned)
            async with asyncio.timeout(self.settings.connect_timeout):
                await consumer._coordinator.ensure_coordinator_known()
                await membership.take_over(assigned)
            return
        if topic.pattern is not None:
            consumer.subscribe(pattern=self._whole_pattern(), listener=membership)
        else:
            consumer.subscribe(topics=self._names(), listener=membership)
        deadline = asyncio.get_running_loop().time() + self.settings.connect_timeout
        while not membership.opened.is_set():
            if asyncio.get_running_loop().time() > deadline:
                log.warning("%r: the group is still busy with its members; joining goes on", self.subscription)
                return
            await membership.wait_opened()

    def _names(self) -> list[str]:
        return [self.topic.name, *([self.retry_name] if self.retry_name else [])]

    def _whole_pattern(self) -> str:
        """Never our own dead letters."""
        return whole(str(self.topic.pattern), self.subscription.dead_letter)

    # -- topics

    async def _check_topics(self) -> None:
        wanted = [] if self.topic.pattern is not None else self._names()
        if self.subscription.dead_letter is not None:
            wanted.append(self.subscription.dead_letter)
        await self.topics.require(wanted, f"{self.subscription!r}")
        start = self.topic.start
        if named := {*(self.topic.partitions or ()), *(start if isinstance(start, Mapping) else ())}:
            there = await self.topics.partitions(self.topic.name)
            if missing := sorted(named - set(there)):
                raise BrokerRefused(
                    f"{self.subscription!r}: topic {self.topic.name!r} has {len(there)} partitions, and no {missing}"
                )

    async def _ask_for_limit(self) -> None:
        if self.retry_name is None or self.retry_limit is not None:
            return
        try:
            value = await self.topics.config(self.retry_name, MAX_BYTES)
        except BrokerError as error:  # we may lack the right to ask
            log.info("%r: how large a record of its retry topic may be: %s", self.subscription, error)
            return
        self.retry_limit = int(value) if value is not None and value.isdecimal() else None

    # -- where to begin

    async def _look_around(self) -> None:
        """What there is before the group is joined for the first time. "latest" means what is published after this, and
        not what the ends are when it has been joined. And partitions without a commit are new ones where the topic has
        others with one; who looks later sees commits of members that joined at the same time."""
        if self.topic.start == EARLIEST or self._there is not None:
            return
        names = self._names() if self.topic.pattern is None else await self._matching()
        there = [TopicPartition(name, n) for name in names for n in await self.topics.partitions(name, fresh=True)]
        self._known = {tp.topic for tp in await self.topics.committed(self.subscription.group, there)}
        self._there = {**(await self.topics.latest(there))} if self.topic.start == LATEST else dict.fromkeys(there)

    async def _matching(self) -> list[str]:
        pattern = re.compile(self._whole_pattern())
        return [name for name in await self.topics.names() if pattern.match(name)]

    async def _first(self, unknown: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where partitions begin of which the group has committed nothing."""
        start = self.topic.start
        earliest = await self.topics.earliest(unknown)
        if start == EARLIEST:
            return earliest
        # Those that were added later are read from their beginning: we may have noticed them late.
        there = self._there or {}
        # And so is a retry topic: what is in it was ours before.
        not_old = {*self._known, self.retry_name}
        old = {tp: end for tp, end in there.items() if tp in earliest and tp.topic not in not_old}
        found = await self.offsets_of(start, old) if start != LATEST else old
        begin = {tp: max(found.get(tp) or 0, offset) for tp, offset in earliest.items()}
        log.info("%r: begins at %s", self.subscription, {f"{tp.topic}-{tp.partition}": at for tp, at in begin.items()})
        return begin

    async def offsets_of(self, to: Position, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where a position is in these partitions; those that it does not name are left out."""
        if not isinstance(to, Mapping):
            return await offsets_of(self.topics, to, partitions)
        named = {tp: to[tp.partition] for tp in partitions if tp.partition in to and tp.topic == self.topic.name}
        return await self._nearest(named)

    async def _nearest(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """These offsets, within what is there: one behind the end would leave out what comes next."""
        first, ends = await self.topics.earliest(wanted), await self.topics.latest(wanted)
        for tp, offset in wanted.items():
            if offset > ends[tp]:
                text = "%r: offset %d of %s-%d is not there yet: it ends at %d, and is read from there"
                log.warning(text, self.subscription, offset, *tp, ends[tp])
        return {tp: min(max(offset, first[tp]), ends[tp]) for tp, offset in wanted.items()}
