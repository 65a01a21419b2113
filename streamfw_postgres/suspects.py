"""Rows that may have killed their process, and the bystanders that died with them.

A claim counts an attempt for every row it took. When one row kills the process, its 199 neighbours have lost an
attempt as well, and after a few times all of them would go to the dead letter. So:

- `recovered` counts how often a row's lease ended without a settlement. From the second time on, and at once when the
  attempt is its last, a row is a *suspect*: it is handed out alone in its process, after everything else has ended.
- A row beyond its attempts goes to the dead letter without its handler only when it was alone as it died
  (`recovered` from ALONE on). Otherwise it gets one more delivery, alone. So nobody is put aside for another's crash;
  the price is that a crash can cost one delivery beyond `attempts`.
- A suspect that survives `PATIENCE` is noted (`recovered` from SURVIVED on) and the others go on beside it. Should
  the process die now, it was not alone; next time it is alone to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from streamfw.broker import PumpControl
from streamfw.texts import one_line

__all__ = ["ALONE", "PATIENCE", "SURVIVED", "Alone", "Solo", "is_condemned", "is_suspect", "mark"]

log = logging.getLogger("streamfw.postgres")

ALONE, SURVIVED = 100, 1000
# Seconds: how long one waits until nothing else runs, and how long a suspect must live before others go on.
PATIENCE = 30.0


def is_suspect(recovered: int, attempt: int, attempts: int | None) -> bool:
    """Whether a row just claimed must be alone. `attempt` counts this delivery."""
    return recovered >= 2 or (recovered >= 1 and attempts is not None and attempt >= attempts)


def is_condemned(recovered: int, attempt: int, attempts: int | None) -> bool:
    """Whether it is beyond its attempts and died alone."""
    return attempts is not None and attempt > attempts and ALONE <= recovered < SURVIVED


def mark(recovered: int, level: int) -> int:
    """`recovered` with its level set to ALONE or SURVIVED."""
    return level + min(recovered % ALONE, 50)


class Pumped(Protocol):
    """A source whose pump can be held."""

    @property
    def pump(self) -> PumpControl:
        """Its pump."""


class Solo:
    """One suspect at a time in a process: who holds it has stopped the pumps of all other sources."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._held: list[PumpControl] = []
        self.sources: list[Pumped] = []

    async def enter(self, source: Pumped, patience: float) -> bool:
        """Hold all others. False when some of them did not come to rest within so many seconds."""
        await self._lock.acquire()
        try:
            self._held = [s.pump for s in self.sources if s is not source]
            for pump in self._held:
                pump.hold()
            return all(await asyncio.gather(*(pump.quiesce(patience) for pump in self._held)))
        except BaseException:
            self.leave()
            raise

    def holds(self, pump: PumpControl) -> bool:
        """Whether this pump is held for a suspect of another source."""
        return any(held is pump for held in self._held)

    def leave(self) -> None:
        """Let all others go on."""
        for pump in self._held:
            pump.release()
        self._held = []
        self._lock.release()


class Alone:
    """One suspect that is out alone: from its delivery until it is settled, or others may go on."""

    __slots__ = ("_solo", "over", "recovered", "row_id")

    def __init__(self, solo: Solo, row_id: int, recovered: int) -> None:
        self._solo = solo
        self.row_id = row_id
        self.recovered = recovered
        self.over = asyncio.Event()

    def end(self) -> None:
        """It was settled, lost or given back, or it survived. Twice is once."""
        if not self.over.is_set():
            self.over.set()
            self._solo.leave()


def names(ids: Sequence[str]) -> str:
    """A few message ids for a log line."""
    return ", ".join(map(one_line, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
