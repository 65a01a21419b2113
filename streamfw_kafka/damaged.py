"""Records that cannot be read: damaged on the server's disk, or on the way.

aiokafka checks a batch when it comes to it, and raises out of ``getmany``. What it had taken by then, of this partition
and of others, is lost, so the source reads it again; and would so for ever, as nothing before or beside the damage ever
arrived. So such a partition is read by itself from then on, a few records at a time, up to where it raises. There it
stands, and is tried again after growing pauses: the damage may have been on the way, or another leader may have a good
copy. The other partitions are read on. Nothing is stepped over: that is for a person to decide, who seeks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from aiokafka import TopicPartition

from streamfw.broker import Subscription

from .assignment import Part

__all__ = ["Damaged"]

log = logging.getLogger("streamfw.kafka")

_PAUSE = (0.5, 60.0)  # seconds between two tries: the first, and the longest
_FEWER = 8  # by how much fewer records are asked for at a time when some of them raised


class _Found:
    """A partition that raised, in one epoch. `limit` is how many records are asked of it at a time; once that is one,
    it stands `at` this offset, until the next try `due`."""

    __slots__ = ("at", "due", "limit", "part", "pause", "why")

    def __init__(self, part: Part, limit: int, why: str) -> None:
        self.part, self.limit, self.why = part, limit, why
        self.at: int | None = None
        self.due = self.pause = 0.0


class Damaged:
    """The partitions of one source that have raised. `most` is how many records are asked for at a time otherwise,
    `limits` when a partition is full. Times are of one clock, in seconds."""

    def __init__(self, subscription: Subscription, most: int, limits: tuple[int, int]) -> None:
        self._subscription, self._most, self._limits = subscription, most, limits
        self._found: dict[TopicPartition, _Found] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def met(self, part: Part, error: BaseException, now: float) -> None:
        """Reading this partition raised, from where it is now or behind it."""
        found = self._found.get(part.tp)
        why = " ".join(map(str, error.args)) or type(error).__name__
        if found is None or found.part is not part:
            found = self._found[part.tp] = _Found(part, self._most, why)
        found.why = why
        if found.limit > 1:
            found.limit = max(1, found.limit // _FEWER)
            return
        at = part.mark.end
        if found.at != at:
            found.at, found.pause = at, 0.0
            log.error(
                "%r: %s-%d cannot be read from offset %d on (%s): its copy on the server is damaged, or what comes of "
                "it. It is tried again; other partitions are read on. To step over what is damaged: seek",
                self._subscription, *part.tp, at, why,
            )  # fmt: skip
        found.pause = min(max(_PAUSE[0], found.pause * 2), _PAUSE[1])
        found.due = now + found.pause

    def next(self, parts: Mapping[TopicPartition, Part], now: float) -> tuple[TopicPartition, int] | None:
        """One of them that is to be read by itself now, and how many records; those that are ours no more, or were
        seeked, are forgotten."""
        for tp, found in list(self._found.items()):
            if parts.get(tp) is not found.part:
                del self._found[tp]
            elif found.due <= now and not found.part.full(*self._limits):
                self._found[tp] = self._found.pop(tp)  # the others first, the next time
                return tp, found.limit
        return None

    def read(self, tp: TopicPartition) -> None:
        """Something of this partition could be read."""
        found = self._found.get(tp)
        if found is None:
            return
        found.limit = min(found.limit * 2, self._most)
        passed = found.at is not None and found.part.mark.end > found.at
        if passed or found.limit == self._most:
            del self._found[tp]
            log.info("%r: %s-%d is read on", self._subscription, *tp)

    def without(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """Those that are not read by themselves."""
        return [tp for tp in partitions if tp not in self._found]

    def stands(self, part: Part) -> bool:
        """Whether it cannot be read on."""
        found = self._found.get(part.tp)
        return found is not None and found.part is part and found.at is not None

    def problem(self, parts: Mapping[TopicPartition, Part]) -> str:
        """Which cannot be read on, and why, in one line; empty where there is none."""
        return "; ".join(
            f"{tp.topic}-{tp.partition} cannot be read from offset {found.at} on: {found.why}"
            for tp, found in self._found.items()
            if found.at is not None and parts.get(tp) is found.part
        )
