"""What a person does with the dead letters in a topic.

A log can only lose its beginning. So to take some of it away, those that stay are published again behind (the same id,
key, headers and body), and when that is confirmed, everything up to there is deleted; piece by piece, each piece as it
was read. Whatever ends in between leaves a letter twice, and loses none. What arrives meanwhile is behind all of it.

To put a letter back is to publish it, and every group that reads its topic would get it. So it goes to the retry topic
of the group that failed, which only that group reads; to the topic that it came from only if no other group reads that.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiokafka import TopicPartition

from streamfw.broker import DeadLetters
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable, OutcomeUnknown, Unavailable
from streamfw.message import (
    ORIGIN,
    ORIGIN_GROUP,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    TOMBSTONE,
    Headers,
    Message,
    Outgoing,
    original_headers,
)

from .admin import topic_name_mistake
from .groups import partitions_of
from .publish import Stored
from .reading import Spans, reading
from .wire import key_of, message_id_of, visible_headers

if TYPE_CHECKING:
    from .connection import KafkaConnection

__all__ = ["KafkaDeadLetters"]

_PLACE: Final = (ORIGIN_PARTITION, ORIGIN_OFFSET)
Origin: TypeAlias = "tuple[str, str]"
"""The topic that a letter came from, and the group that failed."""
Chosen: TypeAlias = Callable[[Any], bool]
_PLACES: TypeAlias = "dict[TopicPartition, int]"


class KafkaDeadLetters(DeadLetters):
    """The dead letters in one topic. After the connection was closed every method raises `BrokerClosed`. A subscriber
    of that topic sees those that stay again when others are taken away."""

    def __init__(self, connection: KafkaConnection, name: str) -> None:
        self._connection, self._topics, self._settings = connection, connection.topics, connection.settings
        self._name = name

    # -- looking

    async def list(self, limit: int = 100) -> Sequence[Message]:
        """See `DeadLetters.list`. By the time at which they were published here."""
        self._connection.check_open()
        found: dict[int, list[Any]] = {}
        async with reading(self._settings, await self._spans()) as reader:
            while records := await reader.some():
                for record in records:
                    some = found.setdefault(record.partition, [])
                    if len(some) < limit:
                        some.append(record)
                    else:
                        reader.leave(TopicPartition(record.topic, record.partition))
        records = [record for some in found.values() for record in some]
        records.sort(key=lambda record: (record.timestamp, record.partition, record.offset))
        return [_message(record) for record in records[:limit]]

    async def _spans(self) -> Spans:
        partitions = await partitions_of(self._topics, self._name)
        first, last = await self._topics.earliest(partitions), await self._topics.latest(partitions)
        return {tp: (first[tp], last[tp]) for tp in partitions}

    # -- discarding

    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.purge`. Raises `BrokerRefused` for a topic that is only compacted: the server deletes
        nothing from it."""
        self._connection.check_open()
        chosen = _among(message_ids)
        survey = await self._survey(chosen)
        if survey.stay:
            await self._take(survey.ends, chosen, lambda records: [])
        elif survey.ends:
            await self._topics.delete_records(survey.ends)
        return survey.count

    async def _survey(self, chosen: Chosen) -> _Survey:
        """Read all of it, to know what there is to do before anything is done."""
        spans = await self._spans()
        await self._require_deletion()
        survey = _Survey()
        async with reading(self._settings, spans) as reader:
            while records := await reader.some():
                for record in records:
                    survey.see(record, chosen(record))
        return survey

    async def _require_deletion(self) -> None:
        try:
            policy = await self._topics.config(self._name, "cleanup.policy")
        except BrokerError:  # we may lack the right to ask; the server refuses by itself
            return
        if policy is not None and "delete" not in policy:
            raise BrokerRefused(
                f"Kafka: topic {self._name!r} has cleanup.policy={policy}, and the server deletes no records from such "
                "a topic; publish tombstones with the keys of the letters instead, or add 'delete' to its policy"
            )

    async def _take(
        self, ends: _PLACES, chosen: Chosen, put_back: Callable[[Sequence[Any]], builtins.list[Outgoing]]
    ) -> None:
        """Take the chosen ones before `ends` away, having published `put_back` of them."""
        first = (await self._spans()).items()
        spans = {tp: (begin, ends[tp]) for tp, (begin, _) in first if tp in ends}
        async with reading(self._settings, spans) as reader:
            while records := await reader.some():
                gone = [record for record in records if chosen(record)]
                stay = [_as_it_is(record) for record in records if not chosen(record)]
                await self._publish([*put_back(gone), *stay])
                await self._topics.delete_records(_up_to(records))

    async def _publish(self, messages: Sequence[Outgoing]) -> None:
        errors = [error for error in await self._connection.publish(messages) if error is not None]
        if errors:
            first = errors[0]
            kind = BrokerUnavailable if isinstance(first, Unavailable | OutcomeUnknown) else BrokerRefused
            raise kind(
                f"Kafka: {len(errors)} of {len(messages)} letters of {self._name!r} could not be published, so none of "
                f"these was taken away; the first: {first}"
            ) from first

    # -- putting back

    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.requeue`. What was published here directly has no origin to go back to, and stays. Raises
        `BrokerRefused`, having done nothing, where other groups would get a letter as well."""
        self._connection.check_open()
        among = _among(message_ids)

        def chosen(record: Any) -> bool:
            return among(record) and _origin(record) is not None

        survey = await self._survey(chosen)
        ways = {origin: await self._way(*origin) for origin in sorted(survey.origins)}
        done: set[tuple[str, ...]] = set()

        def put_back(records: Sequence[Any]) -> builtins.list[Outgoing]:
            found = []
            for record in records:
                origin = _origin(record)
                assert origin is not None
                letter = _put_back(record, ways[origin], placed=ways[origin] != origin[0])
                which = (letter.message_id, *origin, *map(str, _place(record)))
                if which not in done:  # else a copy of one, left by a crash
                    done.add(which)
                    found.append(letter)
            return found

        await self._take(survey.ends, chosen, put_back)
        return len(done)

    async def _way(self, origin: str, group: str) -> str:
        """The topic by which a letter comes to this group, and to no other."""
        topics, retry = self._topics, f"{origin}.{group}.retry"
        if not topic_name_mistake(retry) and await self._reads(group, retry):
            return retry
        await partitions_of(topics, origin)
        others = [name for name in await topics.groups() if name != group and await self._reads(name, origin)]
        if others:
            raise BrokerRefused(
                f"Kafka: group {group!r} failed, but what is put back into {origin!r} goes to {_listed(others)} as "
                f"well. Run group {group!r} with a retry topic, which only it reads: Topic({origin!r}, "
                "retry_topic=True); or forget groups that read no more (KafkaConnection.withdraw)"
            )
        return origin

    async def _reads(self, group: str, topic: str) -> bool:
        """Whether a group reads this topic, or has."""
        partitions = [TopicPartition(topic, number) for number in await self._topics.partitions(topic)]
        if not partitions:
            return False
        if await self._topics.committed(group, partitions):
            return True
        members = (await self._topics.group(group)).members
        return any(tp.topic == topic for member in members for tp in member.partitions)


class _Survey:
    """What there is of the chosen ones: how many, where they end, where they come from, and whether others are among
    them that stay."""

    def __init__(self) -> None:
        self.count = 0
        self.stay = False
        self.ends: _PLACES = {}
        self.origins: set[Origin] = set()
        self._others: set[TopicPartition] = set()  # where we have met one that stays

    def see(self, record: Any, chosen: bool) -> None:
        tp = TopicPartition(record.topic, record.partition)
        if not chosen:
            self._others.add(tp)
            return
        self.count += 1
        self.ends[tp] = record.offset + 1
        self.stay = self.stay or tp in self._others
        if (origin := _origin(record)) is not None:
            self.origins.add(origin)


def _among(message_ids: Collection[str] | None) -> Chosen:
    if message_ids is None:
        return lambda record: True
    ids = frozenset(message_ids)
    return lambda record: message_id_of(record) in ids


def _up_to(records: Iterable[Any]) -> _PLACES:
    ends: _PLACES = {}
    for record in records:
        ends[TopicPartition(record.topic, record.partition)] = record.offset + 1
    return ends


def _message(record: Any) -> Message:
    return Message(
        name=record.topic,
        body=TOMBSTONE if record.value is None else record.value,
        message_id=message_id_of(record),
        key=key_of(record.key),
        timestamp=record.timestamp / 1000,
        raw_headers=visible_headers(record.headers),
    )


def _as_it_is(record: Any) -> Outgoing:
    letter = _message(record)
    return Stored(
        name=letter.name, body=letter.body, message_id=letter.message_id, key=letter.key, headers=letter.headers
    )


def _put_back(record: Any, topic: str, placed: bool) -> Outgoing:
    """As it was before it became a dead letter; `placed`: with where it was at first, which a retry topic keeps."""
    letter = _as_it_is(record)
    headers = original_headers(letter.headers)
    letter.name = topic
    letter.headers = Headers.of((*headers.pairs, *_places(letter.headers))) if placed else headers
    return letter


def _places(headers: Headers) -> builtins.list[tuple[str, bytes | None]]:
    return [(name, value) for name in _PLACE if (value := headers.raw(name)) is not None]


def _place(record: Any) -> builtins.list[bytes | None]:
    return [value for _, value in _places(visible_headers(record.headers))]


def _origin(record: Any) -> Origin | None:
    headers = visible_headers(record.headers)
    origin, group = headers.raw(ORIGIN), headers.raw(ORIGIN_GROUP)
    if not origin or not group:
        return None
    return origin.decode("utf-8", "replace"), group.decode("utf-8", "replace")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
