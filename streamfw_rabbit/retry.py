"""Pauses that the server waits for: a ladder of queues whose rungs add up to the pause.

Theory of operation
    The rungs of a ladder last 1, 2, 4, 8 and so on seconds. A rung is an exchange and a queue of one name
    (``<ladder>.<milliseconds>``); the queue holds what is in it for as long as its name says, and then passes it on to
    the exchange of the rung below. The routing key is the pause in seconds, in binary, a word a digit::

        ...0.0.1.0.1  ->  exchange .4000 --1--> queue .4000 (4 s) --> exchange .2000 --0--> exchange .1000
                                   --1--> queue .1000 (1 s) --> exchange <ladder> --> where it belongs

    An exchange sends what has a 1 in its place into its queue, and what has a 0 straight to the exchange below. So a
    pause takes as many hops as it has ones, all of them in the server, and none has to wait behind a longer one.

    The queues are quorum queues, and move on what has waited at least once: what cannot be delivered stays. A rung is
    made when it is first needed. Whoever publishes is answered by the first exchange, and not told of what somebody
    has deleted further down; so a ladder that is used is made again every ten seconds. What was stopped goes on then,
    within minutes: the server tries again by itself.

    The last exchange is ``internal``: nobody can publish to it. But whoever may publish to the rungs may say that a
    message is tried for the tenth time; that is as much as he may do to our queues anyway.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import aiormq

from .channel import FieldValue
from .epochs import Epochs
from .errors import AccessRefused, NotFound

__all__ = ["LONGEST", "RETRY", "Ladder", "digits_of"]

RETRY: Final = "retry"
"""How a ladder for retries is called behind the name of its queue."""
LEVELS: Final = 23  # 2**22 seconds are the most that the server takes for a queue's TTL (32 bits of milliseconds)
_TRUSTED: Final = 10.0  # seconds that what was made is taken to be there
LONGEST: Final = 2**LEVELS - 1
"""The longest pause, in seconds: 97 days."""

Bind: TypeAlias = Callable[[aiormq.Channel, str], Awaitable[object]]
"""Bind what a ladder leads to, to its last exchange."""


def digits_of(seconds: float) -> str:
    """The routing key of a pause, which is rounded up to whole seconds."""
    return ".".join(format(min(max(1, math.ceil(seconds)), LONGEST), f"0{LEVELS}b"))


class Ladder:
    """The ladder of that name. `bind` makes its end lead somewhere."""

    def __init__(self, name: str, bind: Bind) -> None:
        self.name = name
        self._bind = bind
        self._making = asyncio.Lock()
        self._rungs: set[int] = set()  # whose queue is there
        self._height = -1  # the highest exchange that is there; -1: none, not even the last one
        self._made = 0.0  # when, by the loop's clock, the first of them

    def is_from(self, exchange: str) -> bool:
        """Whether a delivery that came by `exchange` came from here."""
        return exchange.startswith(self.name) and exchange[len(self.name) : len(self.name) + 1] in ("", ".")

    async def way(self, epochs: Epochs, seconds: float) -> tuple[str, str]:
        """Exchange and routing key by which a message comes out so many seconds later. Makes the rungs that it needs.

        Raises a `BrokerError`. A pause beyond `LONGEST` is cut to it.
        """
        key = digits_of(seconds)
        levels = [LEVELS - 1 - place for place, digit in enumerate(key.split(".")) if digit == "1"]
        top = levels[0]
        async with self._making:  # one after another, and in the order of the calls
            now = asyncio.get_running_loop().time()
            if now > self._made + _TRUSTED:
                self.forget()
                self._made = now
            if top > self._height or not self._rungs.issuperset(levels):
                async with epochs.declarations(f"making the retry queues {self.name!r}") as channel:
                    await self._make(channel, top, levels)
        return self._rung(top), key

    async def bind_again(self, epochs: Epochs) -> None:
        """What it leads to may have been deleted and made again, and the binding went with it: what waits on the rungs
        would stay there. Where there is no ladder yet, nothing is made. (Where it is not permitted, the first retry
        tells.) Raises a `BrokerError`."""
        try:
            async with epochs.declarations(f"leading the retry queues {self.name!r} to their end") as channel:
                await self._bind(channel, self.name)
        except (NotFound, AccessRefused):
            pass

    def forget(self) -> None:
        """Somebody may have deleted something: make it again when it is next needed."""
        self._rungs.clear()
        self._height = -1

    def _rung(self, level: int) -> str:
        return f"{self.name}.{1000 * 2**level}" if level >= 0 else self.name

    async def _make(self, channel: aiormq.Channel, top: int, levels: Sequence[int]) -> None:
        """From below, so that nothing is led to where nothing is yet."""
        if self._height < 0:
            await channel.exchange_declare(self.name, exchange_type="topic", durable=True, internal=True)
            await self._bind(channel, self.name)
        for level in range(top + 1):
            if level > self._height:
                await channel.exchange_declare(self._rung(level), exchange_type="topic", durable=True)
                await channel.exchange_bind(self._rung(level - 1), self._rung(level), _pattern(level, "0"))
            if level in levels and level not in self._rungs:
                await channel.queue_declare(self._rung(level), durable=True, arguments=self._arguments(level))
                await channel.queue_bind(self._rung(level), self._rung(level), _pattern(level, "1"))
        # Only now: what failed half way is made again.
        self._height = max(self._height, top)
        self._rungs.update(levels)

    def _arguments(self, level: int) -> dict[str, FieldValue]:
        return {
            "x-queue-type": "quorum",
            "x-message-ttl": 1000 * 2**level,
            "x-dead-letter-exchange": self._rung(level - 1),
            # At least once needs both, and is at most once without the second.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }

    async def delete(self, channel: aiormq.Channel) -> int:
        """Delete all of it; return how many messages waited there."""
        waited = 0
        for level in range(LEVELS):
            gone = await channel.queue_delete(self._rung(level))
            waited += gone.message_count or 0 if gone is not None else 0
        for level in range(-1, LEVELS):
            await channel.exchange_delete(self._rung(level))
        self.forget()
        return waited


def _pattern(level: int, digit: str) -> str:
    """What routing keys match that have this digit in the place of `level`."""
    return "*." * (LEVELS - 1 - level) + digit + (".#" if level else "")
