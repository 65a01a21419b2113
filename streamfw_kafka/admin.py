"""Questions to the cluster: which topics there are, their partitions and offsets, groups and what they committed; and
the few things that are changed there: topics made, records deleted."""

from __future__ import annotations

import asyncio
import difflib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from aiokafka.errors import KafkaError, LeaderNotAvailableError
from aiokafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
    ListGroupsRequest,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import MemberAssignment
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.structs import TopicPartition

from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable

from .errors import response_error, translated
from .nodes import Nodes
from .settings import Settings, is_legal_name

__all__ = ["Group", "Leaders", "Member", "MissingTopic", "Topics", "by_topic", "response_error", "topic_name_mistake"]

T = TypeVar("T")
Leaders: TypeAlias = "tuple[int, ...]"
"""The number of the node that leads each partition of a topic, from partition 0 on; -1 where none does."""

_KEPT: Final = 2.0  # seconds that an answer about topics is good for
_KEPT_MISSING: Final = 0.5  # and that a topic is missing: somebody may be about to make it
_MOST: Final = 10_000  # names that are remembered: who publishes to what does not exist may think of ever new ones
_EARLIEST, _LATEST = -2, -1
_TOPIC: Final = 2  # the type of a resource that has a configuration
_EXISTS: Final = 36


class MissingTopic(BrokerRefused):
    """A topic does not exist, and is not to be made."""


class Member(msgspec.Struct, frozen=True):
    """A member of a consumer group, and what it was given (by members that speak the classic protocol)."""

    member_id: str
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


class Group(msgspec.Struct, frozen=True):
    """A consumer group: its state in Kafka's words (Stable, Empty, PreparingRebalance, Dead, ...), the assignor."""

    name: str
    state: str
    assignor: str
    members: tuple[Member, ...]


def topic_name_mistake(name: str) -> str:
    """Why Kafka cannot have a topic of this name; empty when it can."""
    if is_legal_name(name):
        return ""
    return (
        f"topic {name[:300]!r} cannot exist: a name is 1 to 249 letters, digits, '.', '_' and '-', and not '.' or '..'"
    )


class Topics:
    """Questions to the cluster of `settings`. Every method raises `BrokerError`: `BrokerUnavailable` where it may work
    later, `BrokerRefused` where not, `BrokerClosed` after `close`; and each ends within `connect_timeout` and twice
    `request_timeout`."""

    def __init__(self, settings: Settings) -> None:
        self.nodes = Nodes(settings)
        self._settings = settings
        self._found: dict[str, tuple[float, Leaders | None]] = {}
        self._all: tuple[float, list[str]] = (0.0, [])

    async def close(self) -> None:
        """Close the connections. Twice is once."""
        await self.nodes.close()

    # -- which there are

    async def names(self, fresh: bool = False) -> list[str]:
        """Every topic that we may see, without the server's own."""
        now = asyncio.get_running_loop().time()
        until, names = self._all
        if fresh or until < now:
            response = await self._metadata(None)
            names = sorted(name for code, name, internal, _ in response.topics if not code and not internal)
            self._all = (now + _KEPT, names)
        return names

    async def leaders(self, name: str, fresh: bool = False) -> Leaders | None:
        """Who leads its partitions; None if there is no such topic."""
        now = asyncio.get_running_loop().time()
        until, leaders = self._found.get(name, (0.0, None))
        return (await self.look([name]))[name] if fresh or until < now else leaders

    async def look(self, names: Collection[str], strict: bool = True) -> dict[str, Leaders | None]:
        """The leaders of several, asked for anew. Raises `BrokerRefused` for a topic that we may not see (`strict`), or
        leaves it out."""
        found: dict[str, Leaders | None] = {}
        now = asyncio.get_running_loop().time()
        if len(self._found) > _MOST:
            self._found.clear()
        for code, name, _, partitions in (await self._metadata(list(names))).topics:
            error = response_error(code, name) if code else None
            if error is not None and not error.retriable:
                if strict:
                    raise translated(error, f"asking for topic {name!r}") from error
                continue
            # A topic without partitions is one that is being made or deleted.
            found[name] = leaders = _leaders(partitions) or None
            self._found[name] = (now + (_KEPT if leaders else _KEPT_MISSING), leaders)
        return found

    async def _metadata(self, names: list[str] | None) -> Any:
        """Nobody's topics are made by asking for them, whatever the server's auto.create.topics.enable."""
        for name in names or ():
            if mistake := topic_name_mistake(name):
                raise BrokerRefused(f"Kafka: {mistake}")
        request = MetadataRequest(names, allow_auto_topic_creation=False)
        response = await self.nodes.ask(request, "asking for topics")
        self.nodes.heard(response)
        return response

    async def partitions(self, name: str, fresh: bool = False) -> range:
        """The numbers of its partitions; none if there is no such topic."""
        return range(len(await self.leaders(name, fresh) or ()))

    async def near(self, name: str) -> str:
        """``; near it: 'orders'``, for an error's text; empty when nothing is, or nobody answers."""
        try:
            close = difflib.get_close_matches(name, await self.names(), n=3)
        except BrokerError:
            return ""
        return f"; near it: {', '.join(map(repr, close))}" if close else ""

    # -- making them

    async def ensure(self, name: str) -> Leaders:
        """Who leads its partitions. Where there is no such topic, it is made (`create_topics`), or `MissingTopic` says
        which are near."""
        leaders = await self.leaders(name)
        if leaders is not None:
            return leaders
        if self._settings.create_topics:
            return await self.create(name)
        raise MissingTopic(
            f"Kafka: topic {name!r} does not exist{await self.near(name)}; create it, or set create_topics=true"
        )

    async def require(self, names: Collection[str], who: str) -> None:
        """`ensure` for several. One error names all that are missing."""
        if names:
            await self.look(names)
        missing: list[str] = []
        for name in names:
            try:
                await self.ensure(name)
            except MissingTopic as error:
                missing.append(str(error).removeprefix("Kafka: "))
        if missing:
            raise MissingTopic(f"{who}: {'; '.join(missing)}")

    async def create(
        self,
        name: str,
        partitions: int | None = None,
        replication: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Leaders:
        """Make a topic (by default as the settings say), and wait until every partition has a leader. One that exists
        already is as good: two processes may make it at the same time."""
        what = f"creating topic {name!r}"
        if mistake := topic_name_mistake(name):
            raise BrokerRefused(f"Kafka: {what}: {mistake}")
        settings = self._settings
        new: tuple[Any, ...] = (
            name,
            settings.partitions if partitions is None else partitions,
            settings.replication if replication is None else replication,
            [],
            list((config or {}).items()),
        )
        request = CreateTopicsRequest([new], round(settings.request_timeout * 1000), False)

        async def once() -> Leaders:
            response = await self.nodes.ask(request, what, node=self._controller())
            for _, code, said in response.topic_errors:
                if code not in (0, _EXISTS):
                    raise response_error(code, said)
            return await self.patiently(what, led)

        async def led() -> Leaders:
            leaders = (await self.look([name]))[name]
            if leaders is None or -1 in leaders:
                raise LeaderNotAvailableError("its partitions have no leaders yet")
            return leaders

        await self.nodes.learn() if not self.nodes.numbers else None
        return await self.patiently(what, once)

    def _controller(self) -> int | None:
        return self.nodes.controller if self.nodes.controller in self.nodes.numbers else None

    # -- offsets

    async def earliest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset that is kept of each."""
        return await self._offsets(dict.fromkeys(partitions, _EARLIEST))

    async def latest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that can be read of each (with `isolation`: before open transactions)."""
        return await self._offsets(dict.fromkeys(partitions, _LATEST))

    async def ends(self, name: str) -> dict[TopicPartition, int]:
        """`latest` of all partitions of a topic."""
        return await self.latest([TopicPartition(name, number) for number in await self.partitions(name, fresh=True)])

    async def at(self, partitions: Iterable[TopicPartition], timestamp: float) -> dict[TopicPartition, int | None]:
        """The first offset of each that was published at `timestamp` (seconds since 1970) or later; None: none was."""
        found = await self._offsets(dict.fromkeys(partitions, round(timestamp * 1000)))
        return {tp: offset if offset >= 0 else None for tp, offset in found.items()}

    async def _offsets(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        what = "asking for offsets"
        found: dict[TopicPartition, int] = {}

        async def some(leader: int, partitions: Collection[TopicPartition]) -> None:
            topics = by_topic((tp, (tp.partition, wanted[tp])) for tp in partitions)
            committed = int(self._settings.isolation == "read_committed")
            response = await self.nodes.ask(OffsetRequest(-1, committed, topics), what, node=leader)
            for topic, answers in response.topics:
                for partition, code, _, offset in answers:
                    if code:
                        raise response_error(code, f"{topic}-{partition}")
                    found[TopicPartition(topic, partition)] = offset

        await self._of_leaders(what, lambda: wanted.keys() - found.keys(), some)
        return found

    async def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete what stands before these offsets (-1: all); return where each partition begins now."""
        what = "deleting records"
        done: dict[TopicPartition, int] = {}

        async def some(leader: int, partitions: Collection[TopicPartition]) -> None:
            topics = by_topic((tp, (tp.partition, before[tp])) for tp in partitions)
            request = DeleteRecordsRequest(topics, round(self._settings.request_timeout * 1000))
            response = await self.nodes.ask(request, what, node=leader)
            for topic, answers, *_ in response.topics:
                for partition, low, code, *_ in answers:
                    if code:
                        raise response_error(code, f"{topic}-{partition}")
                    done[TopicPartition(topic, partition)] = low

        await self._of_leaders(what, lambda: before.keys() - done.keys(), some)
        return done

    async def _of_leaders(
        self,
        what: str,
        left: Callable[[], Collection[TopicPartition]],
        some: Callable[[int, Collection[TopicPartition]], Awaitable[None]],
    ) -> None:
        """Ask the leaders of the partitions that are left, all at once; again where one has moved meanwhile."""

        async def once() -> None:
            partitions = left()
            found = await self.look({tp.topic for tp in partitions})
            led: defaultdict[int, list[TopicPartition]] = defaultdict(list)
            for tp in partitions:
                leaders = found.get(tp.topic) or ()
                if tp.partition >= len(leaders):
                    raise BrokerRefused(f"Kafka: {what}: there is no partition {tp.topic}-{tp.partition}")
                led[leaders[tp.partition]].append(tp)
            if -1 in led:
                raise LeaderNotAvailableError(f"{led[-1][0].topic}-{led[-1][0].partition} has no leader")
            await asyncio.gather(*(some(leader, tps) for leader, tps in led.items()))

        if left():
            await self.patiently(what, once)

    # -- groups

    async def committed(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """The committed offsets of a group: of these partitions (None: of all), where there is one."""
        return {tp: offset for tp, (offset, _) in (await self.committed_with_text(group, partitions)).items()}

    async def committed_with_text(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, tuple[int, str]]:
        """The same, each with the text that its committer put beside it ("metadata" to Kafka)."""
        what = f"asking for the offsets of group {group!r}"
        topics = None if partitions is None else by_topic((tp, tp.partition) for tp in partitions)
        found: dict[TopicPartition, tuple[int, str]] = {}

        async def once() -> None:
            coordinator = await self.coordinator(group, what)
            response = await self.nodes.ask(OffsetFetchRequest(group, topics), what, node=coordinator)
            if code := getattr(response, "error_code", 0):
                raise response_error(code)
            for topic, answers in response.topics:
                for partition, offset, text, code in answers:
                    if code:
                        raise response_error(code, f"{topic}-{partition}")
                    if offset >= 0:
                        found[TopicPartition(topic, partition)] = offset, text or ""

        await self.patiently(what, once)
        return found

    async def groups(self) -> list[str]:
        """The names of all consumer groups."""
        what = "listing consumer groups"
        await self._metadata([])

        async def one(node: int) -> set[str]:
            response = await self.nodes.ask(ListGroupsRequest(), what, node=node)
            if response.error_code:
                raise response_error(response.error_code)
            return {name for name, kind in response.groups if kind in ("consumer", "")}

        async def once() -> list[str]:
            return sorted(set().union(*await asyncio.gather(*map(one, self.nodes.numbers))))

        return await self.patiently(what, once)

    async def group(self, name: str) -> Group:
        """One group; "Dead" if there is none of that name, and "Unknown", without members, if it speaks a protocol that
        we cannot ask about (KIP-848): the server tells such a one apart by its list only."""
        what = f"asking for group {name!r}"

        async def once() -> Group:
            coordinator = await self.coordinator(name, what)
            response = await self.nodes.ask(DescribeGroupsRequest([name]), what, node=coordinator)
            code, _, state, _, assignor, members, *_ = response.groups[0]
            if code:
                raise response_error(code, name)
            return Group(name, state, assignor, tuple(_member(member) for member in members))

        found = await self.patiently(what, once)
        if found.state == "Dead" and name in await self.groups():
            return msgspec.structs.replace(found, state="Unknown")
        return found

    async def coordinator(self, group: str, what: str) -> int:
        """The number of the node that a group's requests go to. Raises a `KafkaError` or a `BrokerError`; `patiently`
        asks again while there is none."""
        response = await self.nodes.ask(FindCoordinatorRequest(group, 0), what)
        if response.error_code:
            raise response_error(response.error_code, group)
        if response.coordinator_id not in self.nodes.numbers:
            await self._metadata([])
        number: int = response.coordinator_id
        return number

    # -- the rest

    async def config(self, topic: str, key: str) -> str | None:
        """One value of a topic's configuration, for example ``max.message.bytes``, also where it is the server's."""
        what = f"asking for {key} of topic {topic!r}"
        response = await self.nodes.ask(DescribeConfigsRequest([(_TOPIC, topic, [key])]), what)
        code, said, _, _, entries = response.resources[0]
        if code:
            error = response_error(code, said)
            raise translated(error, what) from error
        for entry in entries:
            if entry[0] == key:
                value: str | None = entry[1]
                return value
        return None

    async def patiently(self, what: str, once: Callable[[], Awaitable[T]]) -> T:
        """`once`, and again while the cluster is busy with itself (a leader or coordinator moves), for at most
        `request_timeout`."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + self._settings.request_timeout, 0.02
        while True:
            try:
                return await once()
            except KafkaError as error:
                if not error.retriable or loop.time() + pause > end:
                    raise translated(error, what) from error
            except BrokerUnavailable:
                if loop.time() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)


def _leaders(partitions: Sequence[Any]) -> Leaders:
    led = {number: leader for _, number, leader, *_ in partitions}
    return tuple(led.get(number, -1) for number in range(max(led, default=-1) + 1))


def by_topic(items: Iterable[tuple[TopicPartition, T]]) -> list[tuple[str, list[T]]]:
    """As requests have it: what belongs to each partition, by topic."""
    topics: defaultdict[str, list[T]] = defaultdict(list)
    for tp, item in items:
        topics[tp.topic].append(item)
    return list(topics.items())


def _member(raw: Any) -> Member:
    member_id, client_id, host, _, assigned, *_ = raw
    given = MemberAssignment.decode(assigned).assignment if assigned else []
    partitions = tuple(TopicPartition(topic, number) for topic, numbers in given for number in numbers)
    return Member(member_id, client_id, host, partitions)
