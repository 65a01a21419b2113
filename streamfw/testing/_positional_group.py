"""The consumer groups of the positional broker: who owns which partition."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._positional import PositionalSource


class Group:
    """A consumer group of one topic: who owns which partition, and how far each is done."""

    def __init__(self, partitions: int, drain: float) -> None:
        self.members: list[PositionalSource] = []
        self.owner: dict[int, PositionalSource] = {}
        self.committed: dict[int, int] = {}
        self._partitions = partitions
        self._drain = drain
        self._lock = asyncio.Lock()

    async def rebalance(self, *, rotate: bool = False, abrupt: bool = False) -> None:
        """Spread the partitions evenly over the members; only those that move are touched.

        The losers give up first, all at once, and only then do the winners begin: no partition has two owners.
        """
        async with self._lock:
            wanted = self._spread(rotate)
            moving = [p for p, owner in self.owner.items() if rotate or wanted.get(p) is not owner]
            losers = {self.owner[p] for p in moving}
            await asyncio.gather(*(m.give_up(moving, 0.0 if abrupt else self._drain, abrupt) for m in losers))
            for partition in moving:
                self.owner.pop(partition, None)  # a member that closed meanwhile has taken its own out
            # A member may have gone while the others drained; it, or the next rebalance, sees to its share.
            for partition, member in wanted.items():
                if partition not in self.owner and member in self.members:
                    self.owner[partition] = member
                    member.take_on(partition, self.committed.get(partition, 0))

    def _spread(self, rotate: bool) -> dict[int, PositionalSource]:
        """Who should own what: nobody more than one partition above another, and as few moves as that allows."""
        if not self.members:
            return {}
        if rotate:
            count = len(self.members)
            place = {m: i for i, m in enumerate(self.members)}
            return {
                p: self.members[(place[self.owner[p]] + 1 if p in self.owner else p) % count]
                for p in range(self._partitions)
            }
        each, more = divmod(self._partitions, len(self.members))
        room = {m: each + (i < more) for i, m in enumerate(self.members)}
        wanted: dict[int, PositionalSource] = {}
        for partition, owner in self.owner.items():
            if room.get(owner, 0) > 0:
                room[owner] -= 1
                wanted[partition] = owner
        free = [m for m, places in room.items() for _ in range(places)]
        wanted.update(zip((p for p in range(self._partitions) if p not in wanted), free, strict=True))
        return wanted
