"""What an oracle found, and how long things took, as the results show it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Judged", "Pauses"]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds."""

    median: float
    p95: float
    longest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Pauses:
        found = sorted(values) or [0.0]
        return cls(statistics.median(found), found[min(len(found) - 1, int(0.95 * len(found)))], found[-1], len(found))

    def __str__(self) -> str:
        return f"{self.median * 1000:.0f} / {self.p95 * 1000:.0f} / {self.longest * 1000:.0f} ms"


@dataclass(slots=True)
class Judged:
    """Only the counts may be anything; of what is listed there must be nothing (`faults`). `duplicates`: by cause."""

    published: int = 0
    handled: int = 0
    duplicates: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def wrong(self, what: str, found: Sequence[object]) -> None:
        if found:
            self.faults.append(f"{len(found)} {what}, for example {found[:3]}")

    @property
    def causes(self) -> str:
        """The duplicates in words."""
        return ", ".join(f"{cause} {count}" for cause, count in sorted(self.duplicates.items())) or "none"
