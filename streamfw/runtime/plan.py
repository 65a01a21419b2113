"""What a pump is given, and what it counts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from streamfw.broker import Capabilities, Delivery, Subscription
from streamfw.handler import Call
from streamfw.outcome import DeadLetter, Policy
from streamfw.subscriber import Batch

__all__ = ["Counters", "Plan"]


class Plan(msgspec.Struct, kw_only=True):
    """Everything the pump of one subscriber needs, decided at build."""

    where: str
    subscription: Subscription
    capabilities: Capabilities
    call: Call
    policy: Policy
    workers: int = 1
    batch: Batch | None = None
    decode: Callable[[object], object] | None = None
    timeout: float | None = None
    prefetch: int | None = None
    max_bytes: int = 64 * 1024 * 1024
    held: int = 10_000
    dead_letter: Callable[[Delivery, DeadLetter], Awaitable[None]] | None = None
    clock: Callable[[], float] = time.monotonic


class Counters(msgspec.Struct):
    """What a pump has done; touched once a group, or in cold paths.

    `settled` is what the source took, `acked` of it what handlers acknowledged. `retried`, `dropped`, `dead` and
    `released` count outcomes, also those that stay in this process; `lost` what turned out not to be ours.
    """

    fetched: int = 0
    settled: int = 0
    acked: int = 0
    retried: int = 0
    dropped: int = 0
    dead: int = 0
    released: int = 0
    lost: int = 0
    reopened: int = 0

    @classmethod
    def sum(cls, counters: Iterable[Counters]) -> Counters:
        """All of them together."""
        total = cls()
        for one in counters:
            for name in cls.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(one, name))
        return total
