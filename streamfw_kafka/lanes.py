"""What is on its way: a publish and who waits for it, batches, the partitions they go to, and their topic."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any, Final, NamedTuple, TypeAlias

from streamfw.errors import BrokerError, PublishError
from streamfw.message import Outgoing

from .admin import Leaders

__all__ = ["BATCH_BYTES", "Batch", "Call", "Entry", "Identity", "Lane", "Route"]

BATCH_BYTES: Final = 128 * 1024
"""How large a batch of several records becomes. Measured: 16 KiB costs a call of 1,000 a fifth more, 256 KiB and more
bring nothing."""
_OPEN: Final = 1.0  # seconds: who joins a batch later than that would have less than its own time


class Call:
    """One publish, and who waits for it. `done` is set when each of its messages has an answer."""

    __slots__ = ("done", "errors", "left")

    def __init__(self, count: int) -> None:
        self.left = count
        self.errors: dict[int, PublishError] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, place: int, error: PublishError) -> None:
        """One of its messages failed."""
        if self.errors is None:
            self.errors = {}
        self.errors[place] = error
        self.count()

    def count(self) -> None:
        """One of its messages has its answer."""
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


Entry: TypeAlias = "tuple[Call, int, Outgoing]"


class Identity(NamedTuple):
    """A producer id, as the server gave it."""

    number: int
    epoch: int


class Batch:
    """Records for one partition. `data` is what is sent, made once, when its numbers are known."""

    __slots__ = ("builder", "data", "deadline", "doubtful", "entries", "identity", "sequence", "until")

    def __init__(self, builder: Any, now: float, deadline: float) -> None:
        self.builder = builder
        self.entries: list[Entry] = []
        self.until = now + _OPEN
        self.deadline = deadline
        self.data: bytearray | None = None
        self.identity: Identity | None = None
        self.sequence = 0
        self.doubtful = False


class Lane:
    """A partition that is written to. It is `held` from when it waits for its turn until nothing of it is left;
    `pause` is how long it rests after a failure (0: there was none), `trouble` what that was."""

    __slots__ = ("batches", "held", "identity", "partition", "pause", "route", "sequence", "trouble")

    def __init__(self, route: Route, partition: int) -> None:
        self.route, self.partition = route, partition
        self.batches: deque[Batch] = deque()
        self.held = False
        self.identity: Identity | None = None
        self.sequence = 0
        self.pause = 0.0
        self.trouble: BrokerError | None = None


class Route:
    """A topic that is written to, as last heard. `sticky` is the partition that records without a key go to now,
    `limit` how large a batch may become; `gone`: there is no such topic any more."""

    __slots__ = ("gone", "lanes", "leaders", "limit", "name", "since", "sticky")

    def __init__(self, name: str, leaders: Leaders, now: float) -> None:
        self.name, self.leaders, self.since = name, leaders, now
        self.lanes = [Lane(self, partition) for partition in range(len(leaders))]
        self.sticky = random.randrange(len(leaders))
        self.limit = BATCH_BYTES
        self.gone = False

    def heard(self, leaders: Leaders) -> None:
        """Its partitions may have other leaders, and be more."""
        self.leaders = leaders
        self.lanes += [Lane(self, partition) for partition in range(len(self.lanes), len(leaders))]
        if self.sticky >= len(leaders):  # a topic that was made again with fewer
            self.turn()

    def leader(self, partition: int) -> int:
        """The number of the node that leads a partition; -1 if none does."""
        return self.leaders[partition] if partition < len(self.leaders) else -1

    def turn(self) -> None:
        """Let records without a key go to the next partition that takes some."""
        count = len(self.leaders)
        order = [(self.sticky + step) % count for step in range(1, count + 1)]
        led = [partition for partition in order if self.leaders[partition] >= 0]
        well = [partition for partition in led if not self.lanes[partition].pause]
        self.sticky = (well or led or order)[0]
