"""From settlements in any order to the one position that may be committed.

Theory of operation
    A log is read in order and settled in any order, but its consumer can only say "everything below this position is
    done". `Watermark` keeps, for one partition and one assignment of it (an *epoch*), which positions are still open.

    - **hold** when a position is *read*, before anything can resolve past it. Positions are held in rising order, each
      once. What lies between two held positions (a compacted record, the marker of a transaction) was never delivered:
      it is a gap, and counts as resolved.
    - **resolve** when it is settled. `position` is the lowest open one, or, with nothing open, one past the last that
      was held or skipped: that is what to commit, and where reading goes on after a crash.
    - **skip** tells of a gap at the end of what was read, so that the position gets past it.

    The open positions are one byte each in a bytearray (1 open, 0 resolved, 2 a gap), from `_base` on. Advancing is one
    `bytearray.find`, done when somebody asks for the position and not for each settlement; the bytes in front of it
    are cut off then, which CPython does without moving the rest. A gap too wide to be worth its bytes, while
    something before it is open, starts a further run behind the first.

    An epoch ends when the partition moves. Its watermark is then forgotten as a whole: a late settlement belongs to
    an object that nobody asks any more. No I/O and no clock here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["Watermark"]

_GAP: Final = b"\2"
_WIDE: Final = 4096
"""A gap of this many positions starts a run of its own instead of being filled with bytes."""


class Watermark:
    """The open positions of one partition in one epoch. `start` is the position that is read first.

    `hold` + `resolve` cost a fraction of a microsecond and one byte a position until the watermark has passed it.
    """

    __slots__ = ("_base", "_end", "_later", "_open", "_ring")

    def __init__(self, start: int) -> None:
        self._base = start  # the position of the first byte
        self._end = start  # one past the last position that was held or skipped
        self._ring = bytearray()
        self._open = 0
        # Runs behind a wide gap: (base, ring), rising. Nearly always empty.
        self._later: list[tuple[int, bytearray]] = []

    @property
    def end(self) -> int:
        """One past the last position that was held or skipped: where reading goes on."""
        return self._end

    @property
    def open(self) -> int:
        """How many positions are held and not resolved."""
        return self._open

    @property
    def window(self) -> int:
        """How many positions lie between the watermark and the end: what a crash would read again, at most."""
        return self._end - self.position

    def hold(self, position: int, count: int = 1) -> None:
        """`count` positions from `position` on were read. Raises `ValueError` for one that was held before."""
        if position < self._end or count < 1:
            raise ValueError(f"position {position} (and {count - 1} more) cannot be held: {self._end} is next")
        if not self._open or position > self._end:
            self.skip(position)
        ring = self._later[-1][1] if self._later else self._ring
        ring.extend(b"\1" * count)
        self._open += count
        self._end = position + count

    def skip(self, position: int) -> None:
        """There is nothing to settle between what was read and `position`. Never goes back."""
        gap = position - self._end
        if not self._open:
            self._restart(max(position, self._end))
        elif gap >= _WIDE:
            self._later.append((position, bytearray()))
            self._end = position
        elif gap > 0:
            ring = self._later[-1][1] if self._later else self._ring
            ring.extend(_GAP * gap)
            self._end = position

    def resolve(self, position: int) -> bool:
        """`position` is settled. False when it was not open: settled before, or never held."""
        base, ring = self._base, self._ring
        if self._later:
            base, ring = self._run(position)
        index = position - base
        if index < 0 or index >= len(ring) or ring[index] != 1:
            return False
        ring[index] = 0
        self._open -= 1
        return True

    def open_below(self, position: int) -> int:
        """How many positions below `position` are open. Looks at each byte: for rare questions."""
        count = self._ring.count(1, 0, max(0, position - self._base))
        return count + sum(ring.count(1, 0, max(0, position - base)) for base, ring in self._later)

    def resolve_all(self, positions: list[int]) -> Sequence[int]:
        """All these are settled: the same as `resolve` for each, in a fraction of the time. Return those that were not
        open."""
        ring, count = self._ring, len(positions)
        if not count or self._later:
            return [position for position in positions if not self.resolve(position)]
        first, index = positions[0], positions[0] - self._base
        if (
            index >= 0
            and positions[-1] - first == count - 1
            and ring.count(1, index, index + count) == count
            and positions == list(range(first, first + count))
        ):  # one behind the other, as workers that never wait settle them
            ring[index : index + count] = bytes(count)
            self._open -= count
            return ()
        base, size = self._base, len(ring)
        wrong: list[int] = []
        for position in positions:
            index = position - base
            if 0 <= index < size and ring[index] == 1:
                ring[index] = 0
            else:
                wrong.append(position)
        self._open -= count - len(wrong)
        return wrong

    @property
    def position(self) -> int:
        """The lowest position that is open, or `end`: what may be committed. Never goes back."""
        if not self._open:
            self._restart(self._end)
            return self._end
        while (first := self._ring.find(1)) < 0:
            self._base, self._ring = self._later.pop(0)
        if first:
            del self._ring[:first]
            self._base += first
        return self._base

    def behind(self, position: int) -> bool:
        """Whether something after `position` is resolved: then it is held back by it, if it is open."""
        for base, ring in (*reversed(self._later), (self._base, self._ring)):
            if (last := ring.rfind(0)) >= 0:
                return position < base + last
        return False

    def _restart(self, position: int) -> None:
        self._base = self._end = position
        self._ring.clear()
        self._later.clear()

    def _run(self, position: int) -> tuple[int, bytearray]:
        """The run that `position` would be in."""
        for run in reversed(self._later):
            if position >= run[0]:
                return run
        return self._base, self._ring
