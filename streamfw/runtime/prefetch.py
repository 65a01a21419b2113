"""How many messages a subscriber keeps at hand.

Theory of operation
    The size of a fetch outweighs everything else in the loop (13.5 us a message at 1, 0.9 at 100), so it starts large.
    Then it follows what the workers *took*, not what was claimed (growth makes room, room makes claims, so the rate of
    claims chases itself; measured: 16 times too much): about a tenth of a second of work, at least two messages a
    worker, at most `most` and the byte budget. Sans-I/O: the fetcher reports, and asks.

    A grown buffer is filled by halves, so that one half is fetched while the other is worked on.

    What waits for a retry, and what is parked behind it, does not count against the size (one blocked key must not stop
    the others), but it does against the bytes: they are in this process all the same.
"""

from __future__ import annotations

__all__ = ["Prefetch"]

HORIZON = 0.1  # seconds of work to keep at hand
INTERVAL = 0.05  # seconds between two looks: a rate over less is noise


class Prefetch:
    """The target size. `fixed` (the user's ``prefetch=``) switches the adaption off."""

    __slots__ = ("_before", "_fixed", "_least", "_looked", "_most", "_start", "average", "max_bytes", "size")

    def __init__(self, workers: int, start: int, most: int, max_bytes: int, fixed: int | None, least: int = 0) -> None:
        self._least = max(2 * workers, least)
        self._most = max(most, self._least)
        self._fixed = fixed is not None
        self.size = max(fixed if fixed is not None else min(start, self._most), 1 if self._fixed else self._least)
        self.max_bytes = max_bytes
        self.average = 0.0  # bytes of a body, lately
        self._start = self.size
        self._looked: float | None = None
        self._before = 0

    def saw(self, count: int, size: int) -> None:
        """A fetch brought `count` messages of `size` bytes together. Grows at once and shrinks slowly: memory is what
        the budget is for."""
        mean = size / count
        self.average = mean if mean > self.average else self.average * 0.9 + mean * 0.1

    @property
    def step(self) -> int:
        """Of how many bodies to look at one. All are looked at while bytes may come to matter; otherwise some tell
        enough, for a source keeps each fetch within the budget by itself."""
        return 8 if 0 < self.average * self.size * 8 < self.max_bytes else 1

    def due(self, taken: int, now: float) -> bool:
        """Whether it is time for another look: a while has passed, or all there is room for was taken meanwhile."""
        if self._fixed:
            return False
        return self._looked is None or now - self._looked >= INTERVAL or taken - self._before >= self.size

    def adapt(self, taken: int, now: float, dry: bool) -> None:
        """`taken` is how many messages workers have begun in all; `dry`: they had nothing to do before this fetch. Only
        when it is `due`."""
        before, looked = self._before, self._looked
        self._before, self._looked = taken, now
        if looked is None:
            return
        wanted = int((taken - before) / max(now - looked, 1e-6) * HORIZON)
        if dry:  # the rate was bounded by us, not by the workers
            wanted = max(wanted, self.size)
        # At most half or double in one look: a pause of the process must not empty the buffer.
        wanted = min(max(wanted, self.size // 2), self.size * 2)
        self.size = min(max(wanted, self._least), self._most)

    @property
    def capacity(self) -> int:
        """How many messages there may be at once, by count and by bytes; at least one, however large."""
        if not self.average:
            return self.size
        return max(1, min(self.size, int(self.max_bytes / self.average)))

    @property
    def at_once(self) -> int:
        """How many messages to fetch at most in one step: the size it started with, or half of what it has grown to."""
        return self.size if self._fixed else max(self._start, self.size // 2)

    def room(self, active: int, held: int) -> int:
        """How many messages may be fetched now, with `active` of them at hand and `held` behind retries."""
        free = self.size - active
        if self.average:
            free = min(free, int(self.max_bytes / self.average) - active - held)
            if free <= 0 and active == 0 and held == 0:
                return 1  # one message larger than the whole budget still comes, alone
        return free

    def bytes_left(self, count: int) -> int:
        """The byte budget that `count` messages leave, at least one byte (a single larger message comes alone)."""
        return max(1, int(self.max_bytes - count * self.average))
