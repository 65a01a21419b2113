"""How consumer groups are, for an operator and for programs: how far each has read, and what holds it back.

What is open in a process only that process knows. So each commit carries it along, as the text that Kafka keeps beside
a committed offset ("metadata"):

    open=3 read=5100 due=1764500400 since=1764496800

*open* messages before *read* are not settled, the oldest of them (which is at the committed offset) has been so *since*
(seconds since 1970). In a retry topic most of them wait, the first of these until it is *due*. Groups that others run
have other texts there, or none: then it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from aiokafka import TopicPartition

from streamfw.errors import BrokerUnavailable

from .admin import Group, Leaders, Topics

__all__ = ["Facts", "GroupMember", "GroupPartition", "GroupStatus", "PartitionStatus", "read_facts", "read_status"]


class PartitionStatus(msgspec.Struct, frozen=True):
    """A partition that this process reads; see `KafkaSource.partitions`.

    - `committed`: the offset that the group has committed (None: none yet); `mark`: below it everything is settled;
      `read_to`: the offset that is read next.
    - `open`: how many messages are not settled; `blocking`: the oldest of them (None: nothing is open), which holds the
      mark, and `since` when (seconds since 1970).
    - `end`: where the partition ended when we last heard of it (None: not yet); `lag`: from the mark to there.
    """

    topic: str
    partition: int
    committed: int | None
    mark: int
    read_to: int
    open: int
    blocking: int | None
    since: float | None
    end: int | None
    lag: int | None


class GroupMember(msgspec.Struct, frozen=True):
    """A member of a group, and how many partitions it has."""

    member_id: str
    client_id: str
    host: str
    partitions: int


class GroupPartition(msgspec.Struct, frozen=True):
    """A partition that a group reads, or has read.

    - `member`: who has it now (its `member_id`; None: nobody).
    - `end`: where it ends (None: its topic or its leader is not there); `committed` (None: nothing yet), and `lag`.
    - `open`, `read_to`, `blocking`, `since`: as in `PartitionStatus`, as of the last commit; None where not known.
    - `retry`: it is of the group's retry topic, where messages wait for their time; `due` is when the first of those
      may run (seconds since 1970), as of the last commit; None where nothing waits, or it is not known.
    """

    topic: str
    partition: int
    member: str | None
    end: int | None
    committed: int | None
    lag: int | None
    open: int | None = None
    read_to: int | None = None
    blocking: int | None = None
    since: float | None = None
    retry: bool = False
    due: float | None = None


class GroupStatus(msgspec.Struct, frozen=True):
    """A consumer group; `state` in Kafka's words: Stable, Empty (no members), PreparingRebalance, CompletingRebalance,
    Dead (there is none of that name), Unknown (its members speak a protocol that we cannot ask about: KIP-848)."""

    group: str
    state: str
    members: tuple[GroupMember, ...]
    partitions: tuple[GroupPartition, ...]


class Facts(msgspec.Struct, frozen=True):
    """What a commit told besides its offset."""

    open: int
    read_to: int | None = None
    since: float | None = None
    due: float | None = None


def read_facts(text: str) -> Facts | None:
    """What the text beside a committed offset tells; None where it is not one of ours."""
    pairs = dict(word.split("=", 1) for word in text.split() if "=" in word)
    numbers = {name: int(value) for name, value in pairs.items() if value.isdecimal() and len(value) < 19}
    if "open" not in numbers:
        return None
    return Facts(numbers["open"], numbers.get("read"), numbers.get("since"), numbers.get("due"))


async def read_status(topics: Topics, names: Sequence[str] | None) -> list[GroupStatus]:
    """Ask about these groups (None: about all that there are). Raises a `BrokerError`."""
    described: list[Group] = []
    committed: list[Mapping[TopicPartition, tuple[int, str]]] = []
    for name in await topics.groups() if names is None else dict.fromkeys(names):
        described.append(await topics.group(name))
        committed.append(await topics.committed_with_text(name))
    held = [{tp: member.member_id for member in group.members for tp in member.partitions} for group in described]
    ends = await _ends(topics, {tp for places in (*committed, *held) for tp in places})
    return [_status(group, offsets, has, ends) for group, offsets, has in zip(described, committed, held, strict=True)]


async def _ends(topics: Topics, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Where they end, of those that are there."""
    names = {tp.topic for tp in partitions}
    leaders = await topics.look(names, strict=False) if names else {}
    there = [tp for tp in partitions if _has_leader(leaders.get(tp.topic), tp.partition)]
    try:
        return await topics.latest(there)
    except BrokerUnavailable:  # a leader went meanwhile: all else is worth telling
        return {}


def _has_leader(leaders: Leaders | None, number: int) -> bool:
    return leaders is not None and number < len(leaders) and leaders[number] != -1


def _status(
    group: Group,
    committed: Mapping[TopicPartition, tuple[int, str]],
    held: Mapping[TopicPartition, str],
    ends: Mapping[TopicPartition, int],
) -> GroupStatus:
    members = tuple(GroupMember(m.member_id, m.client_id, m.host, len(m.partitions)) for m in group.members)
    partitions = (
        _partition(group.name, tp, held.get(tp), ends.get(tp), *committed.get(tp, (None, "")))
        for tp in {*committed, *held}
    )
    return GroupStatus(
        group.name, group.state, members, tuple(sorted(partitions, key=lambda one: (one.topic, one.partition)))
    )


def _partition(
    group: str, tp: TopicPartition, member: str | None, end: int | None, offset: int | None, text: str
) -> GroupPartition:
    lag = None if end is None or offset is None else max(0, end - offset)
    retry = tp.topic.endswith(f".{group}.retry")
    known = GroupPartition(tp.topic, tp.partition, member, end, offset, lag, retry=retry)
    facts = read_facts(text)
    if facts is None:
        return known
    retry = retry or facts.due is not None  # which may have any name
    return msgspec.structs.replace(
        known,
        open=facts.open,
        read_to=facts.read_to,
        blocking=offset if facts.open else None,
        since=facts.since if facts.open else None,
        retry=retry,
        due=facts.due if facts.open else None,
    )
