"""Where the groups that read streams keep how far they are.

An `OffsetStore` is configured once, in a `Stream`; each reader opens a `Bookmark` in it, for its stream and group. The
offset in it is the one to read next: everything below it is done.

What keeps two processes of a group from reading at once is not the store but the server, by the exclusive queue that a
reader holds (see `stream_reader`). But who lost that may not know yet. So a bookmark is *taken*: from then on whoever
had it stores nothing any more, and hears of it when he tries. To take it and to read what is stored is one step.

Stores of one's own derive from the two classes. `MemoryOffsets` is the shortest; a table or a key with a value that is
compared and set will do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

__all__ = ["Bookmark", "MemoryOffsets", "OffsetStore", "Place"]


class Place(NamedTuple):
    """Whose offset it is."""

    vhost: str
    stream: str
    group: str


class Bookmark(ABC):
    """The offset of one group in one stream, as one reader sees it. It connects when it is first used, and again when
    it has to.

    Called by one task at a time. All of it raises `BrokerError`; after a transient one it is called again.
    """

    witness: str | None = None
    """What tells the stream from another one of its name that is made when it was deleted: text of at most 60
    characters. It is set before `store`, to be kept with the offset, and `take` sets it to what was. A bookmark that
    keeps none leaves it alone: then a group that goes on in another process cannot tell."""

    @abstractmethod
    async def take(self) -> int | None:
        """Become the one who stores, and return the offset that is stored (None: there is none)."""

    @abstractmethod
    async def store(self, offset: int) -> bool:
        """Store, durably, also a lower one than before. False: somebody else has taken it; nothing was stored.

        A `store` that failed may still arrive; it must not when a later one has.
        """

    @abstractmethod
    async def is_ours(self) -> bool:
        """Whether nobody else has taken it since."""

    @abstractmethod
    async def close(self) -> None:
        """Free what it has, within a few seconds. Never raises. What is stored stays."""


class OffsetStore(ABC):
    """A place for offsets. Making one does no I/O, and `repr` shows no password."""

    @abstractmethod
    def open(self, place: Place) -> Bookmark:
        """A bookmark of that group's. No I/O."""


class MemoryOffsets(OffsetStore):
    """In this process, and only there: the next process begins where `Stream.offset` says. For tests, and for streams
    that are read from the beginning each time."""

    def __init__(self) -> None:
        self.stored: dict[Place, int] = {}
        self.witnesses: dict[Place, str | None] = {}
        self.takers: dict[Place, Bookmark] = {}

    def open(self, place: Place) -> Bookmark:
        """See `OffsetStore.open`."""
        return _InMemory(self, place)

    def __repr__(self) -> str:
        return f"MemoryOffsets({len(self.stored)} stored)"


class _InMemory(Bookmark):
    def __init__(self, shared: MemoryOffsets, place: Place) -> None:
        self._shared, self._place = shared, place

    async def take(self) -> int | None:
        self._shared.takers[self._place] = self
        self.witness = self._shared.witnesses.get(self._place)
        return self._shared.stored.get(self._place)

    async def store(self, offset: int) -> bool:
        if not await self.is_ours():
            return False
        self._shared.stored[self._place] = offset
        self._shared.witnesses[self._place] = self.witness
        return True

    async def is_ours(self) -> bool:
        return self._shared.takers.get(self._place) is self

    async def close(self) -> None:
        if await self.is_ours():
            del self._shared.takers[self._place]
