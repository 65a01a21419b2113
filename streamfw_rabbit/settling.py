"""Which delivery tags of one channel are settled, and the fewest acknowledgements that say so. Sans-I/O.

Theory of operation
    The server numbers the deliveries of a channel 1, 2, 3 and so on. ``ack(n, multiple)`` acknowledges all that is out
    up to `n`, for the price of one. It may pass over tags that were acknowledged singly; but a tag that is acknowledged
    twice, be it the one that a multiple names, ends the channel (406).

        1 ............. told | ....... ready | ..................
          some of it `open`    all settled     some settled: `done`

    `frames` tells what is ready, by one multiple. A *gap*, the unsettled tag behind `ready`, holds back what is done.
    When it does for too long, the caller has it stepped over: what is done is told tag by tag, and the gap goes among
    the `open` ones. While there are any, no multiple may be sent (it would take them along), so everything is told
    singly; when the last of them is settled, multiples begin again.

    The sets stay as small as what is out: the prefetch bounds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Frames", "Tags"]

Frames: TypeAlias = "list[tuple[int, bool]]"
"""Tags to acknowledge, in order, and whether each means all before it as well."""


class Tags:
    """The tags of one channel."""

    __slots__ = ("_closed", "_done", "_open", "_ready", "_told")

    def __init__(self) -> None:
        self._told = self._ready = 0
        self._done: set[int] = set()  # above ready + 1, settled
        self._open: set[int] = set()  # up to told, not settled
        self._closed: list[int] = []  # were open, are settled, not told

    @property
    def gap(self) -> int | None:
        """The unsettled tag that holds back others which are settled; None: nothing is held back."""
        return self._ready + 1 if self._done else None

    def untold(self, first: int, last: int) -> int:
        """How many from `first` to `last`, all of which were delivered, are not acknowledged."""
        late = sum(tag >= first for tags in (self._open, self._closed) for tag in tags)
        return late + max(0, last - max(first - 1, self._told))

    def is_out(self, tag: int) -> bool:
        """Whether a tag, which was delivered, is not settled."""
        if tag > self._ready:
            return tag not in self._done
        return tag in self._open

    def settle(self, tag: int) -> bool:
        """Note that a tag, which was delivered, is settled. False: it was already."""
        if tag == self._ready + 1:
            self._ready = tag
            if self._done:
                self._absorb()
            return True
        if tag > self._ready:
            if tag in self._done:
                return False
            self._done.add(tag)
            return True
        if tag not in self._open:
            return False
        self._open.remove(tag)
        self._closed.append(tag)
        return True

    def _absorb(self) -> None:
        done, tag = self._done, self._ready + 1
        while tag in done:
            done.remove(tag)
            tag += 1
        self._ready = tag - 1

    def give_back(self, tags: Iterable[int], last: int) -> list[int]:
        """Those of `tags` that are not settled; they count as told from now on, for the caller refuses them one by one.
        `last`: the last that was delivered. Only when all that is done has been told, as by ``frames(True)``."""
        self._open.update(range(self._told + 1, last + 1))
        self._told = self._ready = max(last, self._told)
        given = [tag for tag in tags if tag in self._open]
        self._open.difference_update(given)
        return given

    def oldest(self) -> int:
        """The first tag that is not settled. It may not have been delivered yet."""
        return min(self._open) if self._open else self._ready + 1

    def frames(self, step_over: bool = False) -> Frames:
        """What to tell now. `step_over`: also what a gap holds back."""
        closed, self._closed = self._closed, []
        run = range(self._told + 1, self._ready + 1)
        self._told = self._ready
        if run and not self._open:
            told: Frames = [(run[-1], True)]  # takes what was closed along
        else:
            told = [(tag, False) for tag in (*closed, *run)]
        if step_over and self._done:
            told += self._step_over()
        return told

    def _step_over(self) -> Frames:
        told = sorted(self._done)
        last = told[-1]
        self._open.update(tag for tag in range(self._ready + 1, last) if tag not in self._done)
        self._told = self._ready = last
        self._done.clear()
        return [(tag, False) for tag in told]
