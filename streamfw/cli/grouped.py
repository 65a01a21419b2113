"""Dead letters of one group, on every broker whose letters tell which group failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from streamfw.broker import DeadLetters
from streamfw.message import ORIGIN_GROUP, Message

from .output import CommandError

__all__ = ["all_of", "group_of", "of_group"]


@runtime_checkable
class _Grouped(Protocol):
    """Dead letters of a broker that keeps those of several groups apart by itself, also where they have one id."""

    def of_group(self, group: str) -> DeadLetters: ...


def of_group(found: DeadLetters, group: str | None) -> DeadLetters:
    """Only those of this group (None: all). Where the broker cannot tell apart what has one id, requeueing or purging
    such a letter raises `CommandError`."""
    if group is None:
        return found
    return found.of_group(group) if isinstance(found, _Grouped) else _OfGroup(found, group)


def group_of(letter: Message) -> str:
    """The group that failed; empty where the letter does not tell."""
    value = letter.headers.raw(ORIGIN_GROUP)
    return "" if value is None else value.decode("utf-8", "replace")


async def all_of(
    found: DeadLetters, enough: Callable[[Sequence[Message]], bool], most: int | None = None
) -> Sequence[Message]:
    """All letters, or the oldest once there are `enough`, or `most`. A broker lists from the oldest, so this asks for
    more until that is so."""
    limit = 1000
    while True:
        limit = limit if most is None else min(limit, most)
        letters = await found.list(limit)
        if len(letters) < limit or limit == most or enough(letters):
            return letters
        limit *= 10


class _OfGroup(DeadLetters):
    """By what the letters say themselves."""

    def __init__(self, found: DeadLetters, group: str) -> None:
        self._found, self._group = found, group

    async def list(self, limit: int = 100) -> Sequence[Message]:
        letters = await all_of(self._found, lambda some: len(self._mine(some)) >= limit)
        return self._mine(letters)[:limit]

    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        ids = await self._ids(message_ids)
        return await self._found.requeue(ids) if ids else 0

    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        ids = await self._ids(message_ids)
        return await self._found.purge(ids) if ids else 0

    def _mine(self, letters: Sequence[Message]) -> Sequence[Message]:
        return [letter for letter in letters if group_of(letter) == self._group]

    async def _ids(self, chosen: Sequence[str] | None) -> Sequence[str]:
        groups: defaultdict[str, set[str]] = defaultdict(set)
        for letter in await all_of(self._found, lambda some: False):
            if chosen is None or letter.message_id in chosen:
                groups[letter.message_id].add(group_of(letter))
        ids = [key for key, who in groups.items() if self._group in who]
        if shared := [key for key in ids if len(groups[key]) > 1]:
            who = ", ".join(sorted(groups[shared[0]]))
            raise CommandError(
                f"{len(shared)} of these {len(ids)} ids are here for other groups as well, and this broker takes "
                f"letters by their id alone; nothing was done. The first: {shared[0]}, of {who}"
            )
        return ids
