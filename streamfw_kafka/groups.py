"""What is changed of a consumer group from outside, by people: its offsets moved, or forgotten. Only while no member
reads: the server refuses everything else, and a member would not notice."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Collection, Mapping, Sequence
from datetime import datetime
from typing import ClassVar, Final

import msgspec
from aiokafka.errors import BrokerResponseError, GroupIdNotFound, NonEmptyGroup, UnknownMemberIdError
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String
from aiokafka.structs import TopicPartition

from streamfw.broker import Position
from streamfw.errors import BrokerError, BrokerRefused

from .admin import MissingTopic, Topics, by_topic, response_error, topic_name_mistake

__all__ = ["Moved", "forget_group", "near_group", "offsets_of", "partitions_of", "seek_group", "withdraw"]

_SUBSCRIBED: Final = 86  # GROUP_SUBSCRIBED_TO_TOPIC
_NOBODY: Final = -1  # the generation of who is no member
_FOR_EVER: Final = -1


class Moved(msgspec.Struct, frozen=True):
    """A partition whose committed offset (None: there was none) was moved."""

    topic: str
    partition: int
    before: int | None
    after: int


async def near_group(topics: Topics, name: str) -> str:
    """``; near it: 'shop'``, for an error's text; empty when nothing is, or nobody answers."""
    try:
        close = difflib.get_close_matches(name, await topics.groups(), n=3)
    except BrokerError:
        return ""
    return f"; near it: {', '.join(map(repr, close))}" if close else ""


# -- moving


async def offsets_of(topics: Topics, to: Position, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Where a position is in these partitions; those that a mapping does not name are left out. A time after the last
    record is the end. Raises a `BrokerError`."""
    if to == "earliest":
        return await topics.earliest(partitions)
    if isinstance(to, Mapping):
        return {tp: to[tp.partition] for tp in partitions if tp.partition in to}
    ends = await topics.latest(partitions)
    if not isinstance(to, datetime):
        return ends
    found = await topics.at(partitions, to.timestamp())
    return {tp: end if (offset := found.get(tp)) is None else offset for tp, end in ends.items()}


async def seek_group(topics: Topics, group: str, topic: str, to: Position, new: bool = True) -> list[Moved]:
    """Let a group that does not run read on from elsewhere in one topic. `new`: it need not be there yet.

    Raises `BrokerRefused` while it has members (who would go on from where they are), for a partition that is not there
    and an offset that is not kept, and for a group that is not there (unless `new`), every other `BrokerError`, and
    `ValueError` for a time without a time zone. Nothing is moved then.
    """
    if isinstance(to, datetime) and to.tzinfo is None:
        raise ValueError(f"{to!r} has no time zone, so it means another moment on each machine")
    partitions = await partitions_of(topics, topic)
    if isinstance(to, Mapping):
        await _check_offsets(topics, topic, to, partitions)
    await _check_idle(topics, group, new)
    wanted = await offsets_of(topics, to, partitions)
    before = await topics.committed(group, partitions)
    await _commit(topics, group, wanted)
    return [Moved(tp.topic, tp.partition, before.get(tp), offset) for tp, offset in sorted(wanted.items())]


async def partitions_of(topics: Topics, topic: str) -> list[TopicPartition]:
    """Its partitions. Raises `MissingTopic`."""
    found = [TopicPartition(topic, number) for number in await topics.partitions(topic, fresh=True)]
    if not found:
        raise MissingTopic(f"Kafka: topic {topic!r} does not exist{await topics.near(topic)}")
    return found


async def _check_offsets(
    topics: Topics, topic: str, to: Mapping[int, int], partitions: Sequence[TopicPartition]
) -> None:
    if strange := sorted(set(to) - {tp.partition for tp in partitions}):
        raise BrokerRefused(f"Kafka: topic {topic!r} has {len(partitions)} partitions, from 0 on, and no {strange}")
    named = [tp for tp in partitions if tp.partition in to]
    first, last = await topics.earliest(named), await topics.latest(named)
    for tp in named:
        if not first[tp] <= to[tp.partition] <= last[tp]:
            raise BrokerRefused(
                f"Kafka: {topic}-{tp.partition} keeps offsets {first[tp]} to {last[tp]} (the end), "
                f"and not {to[tp.partition]}"
            )


async def _check_idle(topics: Topics, group: str, new: bool) -> None:
    found = await topics.group(group)
    if found.state == "Dead" and not new:
        raise BrokerRefused(
            f"Kafka: there is no group {group!r}{await near_group(topics, group)}; to make it, say so (--new)"
        )
    if members := found.members:
        who = ", ".join(sorted({f"{member.client_id}{member.host}" for member in members})[:5])
        raise _busy(group, f"it has {len(members)} running member{'' if len(members) == 1 else 's'} ({who})")


def _busy(group: str, why: str) -> BrokerRefused:
    return BrokerRefused(
        f"Kafka: the offsets of group {group!r} cannot be moved from outside: {why}; stop them first, or let them move "
        "by themselves (App.seek)"
    )


async def _commit(topics: Topics, group: str, offsets: Mapping[TopicPartition, int]) -> None:
    what = f"moving group {group!r}"
    rows = by_topic((tp, (tp.partition, offset, "")) for tp, offset in offsets.items())

    async def once() -> None:
        request = OffsetCommitRequest(group, _NOBODY, "", _FOR_EVER, rows)
        response = await topics.nodes.ask(request, what, node=await topics.coordinator(group, what))
        _check_each(response.topics)

    try:
        await topics.patiently(what, once)
    except BrokerError as error:
        if isinstance(error.__cause__, UnknownMemberIdError):  # somebody came meanwhile
            raise _busy(group, "members have joined it") from error
        raise


# -- forgetting


class _OffsetDeleteResponse(Response):  # type: ignore[misc, unused-ignore]
    """Protocol guide, OffsetDelete, version 0."""

    API_KEY = 47
    API_VERSION = 0
    SCHEMA = Schema(
        ("error_code", Int16),
        ("throttle_time_ms", Int32),
        (
            "topics",
            Array(("name", String("utf-8")), ("partitions", Array(("partition", Int32), ("error_code", Int16)))),
        ),
    )


class _OffsetDelete(RequestStruct):  # type: ignore[misc, unused-ignore]
    API_KEY = 47
    API_VERSION = 0
    RESPONSE_TYPE = _OffsetDeleteResponse
    SCHEMA = Schema(
        ("group_id", String("utf-8")),
        ("topics", Array(("name", String("utf-8")), ("partitions", Array(Int32)))),
    )


class _OffsetDeleteRequest(Request[_OffsetDelete]):  # type: ignore[misc, unused-ignore]
    """aiokafka has none."""

    API_KEY: ClassVar[int] = 47

    def __init__(self, group: str, topics: Sequence[tuple[str, Sequence[int]]]) -> None:
        self._group, self._topics = group, topics

    def build(self, request_struct_class: type[_OffsetDelete]) -> _OffsetDelete:
        return request_struct_class(self._group, [(topic, list(numbers)) for topic, numbers in self._topics])


async def withdraw(topics: Topics, name: str, group: str) -> int:
    """Forget what a group has committed of a topic and of its retry topic, and the group when it has nothing else; what
    waits in the retry topic is deleted. Return how many messages it had not read or not settled.

    Raises `BrokerRefused` while members of it subscribe to the topic.
    """
    retry = f"{name}.{group}.retry"
    there = await topics.look([name] if topic_name_mistake(retry) else [name, retry])
    partitions = [TopicPartition(n, number) for n, led in there.items() if led for number in range(len(led))]
    committed = await topics.committed(group, partitions) if partitions else {}
    if not committed:
        return 0
    ends = await topics.latest(committed)
    await _delete_offsets(topics, group, committed)
    if not await topics.committed(group):
        await _delete_group(topics, group)
    if behind := {tp: end for tp, end in ends.items() if tp.topic == retry}:
        await topics.delete_records(behind)
    return sum(max(0, ends[tp] - offset) for tp, offset in committed.items())


async def forget_group(topics: Topics, group: str) -> int:
    """`withdraw` from all topics that a group has read, and delete the group. Return how many messages it had not read
    or not settled.

    Raises `BrokerRefused` while it has members.
    """
    committed = await topics.committed(group)
    there = await topics.look({tp.topic for tp in committed}, strict=False) if committed else {}
    kept = {tp: offset for tp, offset in committed.items() if tp.partition < len(there.get(tp.topic) or ())}
    ends = await topics.latest(kept)
    await _delete_group(topics, group, refuse=True)
    if behind := {tp: end for tp, end in ends.items() if tp.topic.endswith(f".{group}.retry")}:
        await topics.delete_records(behind)
    return sum(max(0, ends[tp] - offset) for tp, offset in kept.items())


async def _delete_offsets(topics: Topics, group: str, partitions: Collection[TopicPartition]) -> None:
    what = f"withdrawing group {group!r}"
    rows = by_topic((tp, tp.partition) for tp in partitions)

    async def once() -> None:
        request = _OffsetDeleteRequest(group, rows)
        response = await topics.nodes.ask(request, what, node=await topics.coordinator(group, what))
        if response.error_code == NonEmptyGroup.errno:
            raise BrokerRefused(f"Kafka: {what}: it has running members; stop them first")
        if response.error_code:
            raise response_error(response.error_code, group)
        _check_each(response.topics, subscribed=what)

    await _though_gone(topics.patiently(what, once))


async def _delete_group(topics: Topics, group: str, refuse: bool = False) -> None:
    """Delete it unless somebody reads in it; `refuse`: raises `BrokerRefused` then."""
    what = f"deleting group {group!r}"

    async def once() -> None:
        node = await topics.coordinator(group, what)
        response = await topics.nodes.ask(DeleteGroupsRequest([group]), what, node=node)
        for _, code in response.results:
            if code == NonEmptyGroup.errno and refuse:
                raise BrokerRefused(f"Kafka: {what}: it has running members; stop them first")
            if code:
                raise response_error(code, group)

    await _though_gone(topics.patiently(what, once), NonEmptyGroup)  # somebody reads other topics in it


async def _though_gone(doing: Awaitable[None], *more: type[BrokerResponseError]) -> None:
    """Do it; that there is no such group (any more) is as good."""
    try:
        await doing
    except BrokerError as error:
        if not isinstance(error.__cause__, (GroupIdNotFound, *more)):
            raise


def _check_each(answers: Sequence[tuple[str, Sequence[tuple[int, int]]]], subscribed: str = "") -> None:
    for topic, partitions in answers:
        for partition, code in partitions:
            if code == _SUBSCRIBED:
                raise BrokerRefused(f"Kafka: {subscribed}: members of it read {topic!r}; stop them first")
            if code:
                raise response_error(code, f"{topic}-{partition}")
