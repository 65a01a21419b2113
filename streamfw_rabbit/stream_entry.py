"""How a reader goes on in a stream: whether what it goes on in is what was read before, and what of it is gone.

It asks for the witness (`stream_witness`), or, where there is none, for the message that is next. What it makes of what
comes, and of where the stream is found to begin and end:

- The witness comes: all is well. So it is where there is none and the next one comes.
- Another message comes in its place, or one behind it although the server has not dropped it: another stream.
- One behind it comes, and the server has dropped it: one cannot tell, and goes on at the next one.
- Nothing comes, and the stream ends before: another stream, or it has lost its end. Or the one that was asked is a
  replica that has to catch up, therefore not at once.

No I/O here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from .stream_witness import Seen, Witness

__all__ = ["Entry", "Verdict"]

Verdict: TypeAlias = Literal["open", "well", "another", "no telling"]


class Entry:
    """Of one reader. `sure`: that it is well is known.

    - `next`: the offset to go on at. `asked_for`: the one to begin at, for that.
    - `untried`: nothing has come. `blocked`: what comes is not to be taken: it may be of another stream.
    - `gone`: the offsets that were to be read and are not there, from and up to. `why`: it is another one.
    """

    def __init__(self, following: int, witness: Witness | None = None, sure: bool = False) -> None:
        self._witness = None if sure else witness
        self.next, self.sure = following, sure
        self.asked_for = following if self._witness is None else self._witness.offset
        self.untried, self.blocked = True, False
        self.gone: tuple[int, int] | None = None
        self.why = ""
        self._came: int | None = None
        self._short: float | None = None  # since when it ends too early

    @property
    def is_short(self) -> bool:
        """It ended before what was read, as last looked at."""
        return self._short is not None and not self.sure

    def came(self, first: Seen) -> bool:
        """The first message at or behind what was asked for; whether to take it. With no witness any is taken: the
        server itself leaves gaps."""
        self.untried, self._came = False, first.offset
        if first.offset == self.asked_for:
            self.sure = self._witness is None or first.witness() == self._witness
        self.blocked = self._witness is not None and not self.sure
        return not self.blocked

    def look(self, first: int | None, end: int | None, now: float, patience: float) -> Verdict:
        """The stream begins and ends there (None: it is empty). `now` and `patience` in seconds."""
        if first is None or end is None:
            self.sure = self.sure or self.next == 0
        elif not self.sure:
            asked_for = self.asked_for
            if end < self.next if self._witness is None else end <= asked_for:
                return self._look_at_the_end(end, now, patience)
            self._short = None
            if self._witness is None:
                self._look_for_a_gap(first)
            elif self.blocked and first > asked_for:
                return "no telling"
            elif self.blocked:
                self.why = f"offset {asked_for} is not the message that was read there"
                return "another"
        return "well" if self.sure else "open"

    def _look_at_the_end(self, end: int, now: float, patience: float) -> Verdict:
        self.why = f"it ends at {end}, before {self.next}"
        self._short = now if self._short is None else self._short
        return "another" if now - self._short >= patience else "open"

    def _look_for_a_gap(self, first: int) -> None:
        """What is gone lies before what came, and not before what is there by now."""
        if first > self.next and self._came is not None:
            self.gone = self.next, self._came - 1
        self.sure = first <= self.next or self._came is not None
