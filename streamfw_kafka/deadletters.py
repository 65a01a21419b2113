"""What a person does with the dead letters in a topic.

A log can only lose its beginning. So to take some of it away, those that stay are published again behind (the same id,
key, headers and body, and since when they are dead letters in a header of ours), and when that is confirmed, everything
up to there is deleted; piece by piece, each piece as it was read. Whatever ends in between leaves a letter twice, and
loses none. What arrives meanwhile is behind all of it.

To put a letter back is to publish it, and every group that reads its topic would get it. So it goes to the retry topic
of the group that failed, which only that group reads; to the topic that it came from only if no other group reads that.
Letters for which there is no such way stay.
"""

from __future__ import annotations

import builtins
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from .reading import Spans, reading
from .wire import key_of, message_id_of, visible_headers

if TYPE_CHECKING:
    from .connection import KafkaConnection

__all__ = ["DEAD_SINCE", "KafkaDeadLetters", "NotPutBack"]

DEAD_SINCE: Final = "streamfw-dead-since"
"""When a letter that was written again had first been written, in ms since 1970."""
_PLACE: Final = (ORIGIN_PARTITION, ORIGIN_OFFSET)
Origin: TypeAlias = "tuple[str, str]"
"""The topic that a letter came from, and the group that failed."""
Chosen: TypeAlias = Callable[[Any], bool]
_PLACES: TypeAlias = "dict[TopicPartition, int]"


class NotPutBack(BrokerRefused):
    """Some dead letters have no way back to their group alone. `done` are put back all the same."""

    def __init__(self, message: str, done: int) -> None:
        super().__init__(message)
        self.done = done


class KafkaDeadLetters(DeadLetters):
    """The dead letters in one topic, or those of one `group` that failed. After the connection was closed every method
    raises `BrokerClosed`. A subscriber of that topic sees those that stay again when others are taken away."""

    def __init__(self, connection: KafkaConnection, name: str, group: str | None = None) -> None:
        self._connection, self._topics, self._settings = connection, connection.topics, connection.settings
        self._name, self._group = name, group

    def of_group(self, group: str) -> KafkaDeadLetters:
        """Only those that this group could not handle. (A message may be here once for each group.)"""
        return KafkaDeadLetters(self._connection, self._name, group)

    # -- looking

    async def list(self, limit: int = 100) -> Sequence[Message]:
        """See `DeadLetters.list`. By the time at which they were published here at first."""
        self._connection.check_open()
        chosen = self._among(None)
        found: dict[int, list[Any]] = {}
        async with reading(self._settings, await self._spans()) as reader:
            while records := await reader.some():
                for record in records:
                    some = found.setdefault(record.partition, [])
                    if not chosen(record):
                        continue
                    if len(some) < limit:
                        some.append(record)
                    else:
                        reader.leave(TopicPartition(record.topic, record.partition))
        records = [record for some in found.values() for record in some]
        records.sort(key=lambda record: (_dead_since(record), record.partition, record.offset))
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
        chosen = self._among(message_ids)
        survey = await self._survey(chosen)
        ends = survey.ends(survey.counts)
        if survey.stay:
            await self._take(ends, chosen, lambda records: [])
        elif ends:
            await self._topics.delete_records(ends)
        return survey.counts.total()

    def _among(self, message_ids: Collection[str] | None) -> Chosen:
        ids, group = None if message_ids is None else frozenset(message_ids), self._group

        def chosen(record: Any) -> bool:
            if ids is not None and message_id_of(record) not in ids:
                return False
            return group is None or ((origin := _origin(record)) is not None and origin[1] == group)

        return chosen

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
        `NotPutBack`, having put back the others, where other groups would get a letter as well, or where its topic is
        gone."""
        self._connection.check_open()
        among = self._among(message_ids)
        survey = await self._survey(lambda record: among(record) and _origin(record) is not None)
        ways, refused = await self._ways([origin for origin in survey.counts if origin is not None])
        done = await self._put_back_by(ways, among, survey.ends(ways)) if ways else 0
        if refused:
            raise self._not_put_back(done, {origin: (survey.counts[origin], why) for origin, why in refused.items()})
        return done

    async def _put_back_by(self, ways: Mapping[Origin, str], among: Chosen, ends: _PLACES) -> int:
        """Those of these origins."""
        done: set[tuple[str, ...]] = set()

        def chosen(record: Any) -> bool:
            return _origin(record) in ways and among(record)

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

        await self._take(ends, chosen, put_back)
        return len(done)

    def _not_put_back(self, done: int, stay: Mapping[Origin, tuple[int, str]]) -> NotPutBack:
        reasons = [f" {count} of group {group!r}: {why}" for (_, group), (count, why) in stay.items()]
        if len(reasons) > 1:
            reasons = [f"\n  {number}.{reason}" for number, reason in enumerate(reasons, 1)]
        return NotPutBack(
            f"Kafka: {done} of {done + sum(count for count, _ in stay.values())} letters of {self._name!r} were put "
            f"back. What stays:{''.join(reasons)}",
            done,
        )

    async def _ways(self, origins: Collection[Origin]) -> tuple[dict[Origin, str], dict[Origin, str]]:
        """The topic by which letters of each origin come to their group, and to no other; and where there is none,
        why."""
        ways: dict[Origin, str] = {}
        refused: dict[Origin, str] = {}
        readers: dict[str, dict[str, bool]] = {}
        for origin in sorted(origins):
            topic, group = origin
            retry = f"{topic}.{group}.retry"
            try:
                if not topic_name_mistake(retry) and await self._reads(group, retry) is not None:
                    ways[origin] = retry
                    continue
                if topic not in readers:
                    await partitions_of(self._topics, topic)
                    readers[topic] = await self._readers(topic)
            except BrokerRefused as error:
                refused[origin] = str(error).removeprefix("Kafka: ")
                continue
            if others := {name: runs for name, runs in readers[topic].items() if name != group}:
                refused[origin] = _others_get_it(topic, group, others)
            else:
                ways[origin] = topic
        return ways, refused

    async def _readers(self, topic: str) -> dict[str, bool]:
        """The groups that read a topic, or have; and whether they have members."""
        found = {name: await self._reads(name, topic) for name in await self._topics.groups()}
        return {name: runs for name, runs in found.items() if runs is not None}

    async def _reads(self, group: str, topic: str) -> bool | None:
        """Whether a group that reads this topic, or has, has members; None: it does not read it."""
        partitions = [TopicPartition(topic, number) for number in await self._topics.partitions(topic)]
        if not partitions:
            return None
        has_read = bool(await self._topics.committed(group, partitions))
        members = (await self._topics.group(group)).members
        if has_read or any(tp.topic == topic for member in members for tp in member.partitions):
            return bool(members)
        return None


class _Survey:
    """What there is of the chosen ones: how many of each origin, where they end, and whether others are among them that
    stay."""

    def __init__(self) -> None:
        self.counts: Counter[Origin | None] = Counter()
        self.stay = False
        self._ends: dict[Origin | None, _PLACES] = {}
        self._others: set[TopicPartition] = set()  # where we have met one that stays

    def see(self, record: Any, chosen: bool) -> None:
        tp = TopicPartition(record.topic, record.partition)
        if not chosen:
            self._others.add(tp)
            return
        origin = _origin(record)
        self.counts[origin] += 1
        self._ends.setdefault(origin, {})[tp] = record.offset + 1
        self.stay = self.stay or tp in self._others

    def ends(self, origins: Iterable[Origin | None]) -> _PLACES:
        """Where those of these origins end."""
        found: _PLACES = {}
        for origin in origins:
            for tp, end in self._ends.get(origin, {}).items():
                found[tp] = max(end, found.get(tp, 0))
        return found


def _others_get_it(topic: str, group: str, others: Mapping[str, bool]) -> str:
    """Why a letter cannot go back into its topic, and what to do."""
    said = (
        f"what is put back into {topic!r} goes to {_listed([*others])} as well. Give the subscriber of group {group!r} "
        f"a retry topic, which only it reads: Topic({topic!r}, retry_topic=True), with overtaking=True where it has "
        "ordered_by="
    )
    if idle := [name for name, runs in others.items() if not runs]:
        said += (
            f". No members {'has' if len(idle) == 1 else 'have'} {_listed(idle)}; one that nobody runs any more "
            f"counts no longer after: streamfw kafka forget --group {shlex.quote(idle[0])} --topic {topic}"
        )
    return said


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
        timestamp=_dead_since(record) / 1000,
        raw_headers=Headers.of(tuple(p for p in visible_headers(record.headers).pairs if p[0] != DEAD_SINCE)),
    )


def _dead_since(record: Any) -> int:
    """When it was published here at first, in ms since 1970."""
    value = visible_headers(record.headers).raw(DEAD_SINCE)
    timestamp: int = record.timestamp
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else timestamp


def _as_it_is(record: Any) -> Outgoing:
    letter = _message(record)
    since = (DEAD_SINCE, str(_dead_since(record)).encode())
    return Outgoing(
        stored=True,
        name=letter.name,
        body=letter.body,
        message_id=letter.message_id,
        key=letter.key,
        headers=Headers.of((*letter.headers.pairs, since)),
    )


def _put_back(record: Any, topic: str, placed: bool) -> Outgoing:
    """As it was before it became a dead letter; `placed`: with where it was at first, which a retry topic keeps."""
    letter = _message(record)
    headers = original_headers(letter.headers)
    if placed:
        headers = Headers.of((*headers.pairs, *_places(letter.headers)))
    return Outgoing(
        stored=True,
        name=topic,
        body=letter.body,
        message_id=letter.message_id,
        key=letter.key,
        headers=headers,
    )


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
