"""Whether a stream is the one that was read before: a message of it that is remembered tells.

Theory of operation
    A stream that is deleted and made anew has the same name, and begins at 0 again. Who goes on at the offset where it
    was would leave out what lies before. So a reader goes on at a message that it has seen, and looks whether that is
    the one it remembers: by its id, its time and a hash of its body. It asks for one message more than it needs.

    What is remembered is one message: the last one of what came at once. It is hashed when the offset is stored, some
    times a second, and its body is kept no longer than that.

    To store, it has to be one below the stored offset: what lies above has not come, or comes again, to whoever goes
    on. So the last message at one look is stored when the watermark has passed it, as a later look finds.

    Messages that are alike in all three cannot be told apart, nor can one tell when the server has dropped it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

__all__ = ["Seen", "Trail", "Witness"]

_SIZE: Final = 16  # bytes of a hash


class Witness(NamedTuple):
    """A message that was read: its offset, and a hash of it."""

    offset: int
    digest: str

    def text(self) -> str:
        """As a bookmark keeps it."""
        return f"{self.offset}:{self.digest}"

    @classmethod
    def of(cls, text: str | None, below: int, at_most: int) -> Witness | None:
        """What a bookmark kept, if it serves who goes on at `below`: it has to be before that, and at most so many
        messages, for they are all read again."""
        offset, _, digest = (text or "").partition(":")
        if not (offset.isascii() and offset.isdigit() and below - at_most <= int(offset) < below):
            return None
        return cls(int(offset), digest)


class Seen(NamedTuple):
    """A message, as far as it tells one stream from another."""

    offset: int
    message_id: str
    timestamp: float
    body: bytes

    def witness(self) -> Witness:
        """What is remembered of it."""
        digest = blake2b(f"{float(self.timestamp)!r} {self.message_id!r} ".encode(), digest_size=_SIZE)
        digest.update(self.body)
        return Witness(self.offset, digest.hexdigest())


class Trail:
    """What is remembered of one reading. `stored`: what is to be stored with the offset last looked at."""

    __slots__ = ("_last", "_next", "stored")

    def __init__(self, begin: Witness | None = None) -> None:
        self._last: Seen | Witness | None = begin
        self._next: Witness | None = None
        self.stored = begin

    def saw(self, seen: Seen) -> None:
        """It was read, behind all that was seen before."""
        self._last = seen

    @property
    def last(self) -> Witness | None:
        """The last message that was seen."""
        if isinstance(self._last, Seen):
            self._last = self._last.witness()
        return self._last

    def forget(self) -> None:
        """What was seen is of no use any more."""
        self._last = self._next = self.stored = None

    def look(self, position: int) -> None:
        """The watermark is there."""
        last = self.last
        if last is not None and last.offset < position:
            self.stored, self._next = last, None
        elif self._next is None:
            self._next = last
        elif self._next.offset < position:
            self.stored, self._next = self._next, last
