"""What is published in RabbitMQ's fault suite, by the app itself, and what its publisher was told of it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from streamfw import App, OutcomeUnknown, PublishError
from tests.faults.pace import Pace
from tests.faults.rabbit_app import NAMES, RETRIES, Work, place_of
from tests.faults.rabbit_ledger import COPY
from tests.faults.rabbit_oracle import Answer
from tests.helpers import eventually

__all__ = ["Flow"]

EACH: Final = 2  # publishers a name
PUBLISHERS: Final = EACH * len(NAMES)
KEYS: Final = 5  # of each publisher
PROBES: Final = 1_000_000_000  # the first id that is a probe's
UNDER_WAY: Final = 30.0  # seconds for a publish to be answered, at most
PAUSE: Final = 0.05  # seconds until what was refused is published again


class Flow:
    """Ids to the names in turn. One of them is published until it is stored: before the next of its key is.

    - `published`: to which name each id was published; `answers`: by id and copy. See `judge`.
    - `refused`: answers that say that nothing is stored, by their names; `unknown`: how many answers do not say it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._under_way: Counter[str] = Counter()
        self._probes = PROBES
        self.published: dict[int, str] = {}
        self.answers: dict[tuple[int, int], Answer] = {}
        self.refused: Counter[str] = Counter()
        self.unknown = 0
        for name in NAMES:
            self._gates[name].set()

    async def publish(self, messages: int, pace: Pace) -> None:
        """All ids from 0 on."""
        async with asyncio.TaskGroup() as publishers:
            for publisher in range(PUBLISHERS):
                publishers.create_task(self._publish_some(range(publisher, messages, PUBLISHERS), pace))

    async def _publish_some(self, numbers: Iterable[int], pace: Pace) -> None:
        for number in numbers:
            await pace.turn(number)
            await self.publish_one(NAMES[number % len(NAMES)], number)

    async def publish_one(self, name: str, number: int) -> None:
        """Publish it again, with the same id, until it is stored."""
        copy = 1
        while not await self._answered(name, number, copy):
            copy += 1
        self.published[number] = name

    async def _answered(self, name: str, number: int, copy: int) -> bool:
        """Whether that copy is stored for sure."""
        await self._gates[name].wait()
        self._under_way[name] += 1
        self.answers[number, copy] = "unknown"  # until it is answered
        try:
            await self._app.publish(
                name, Work(number), key=self.key_of(number), message_id=f"{number}", headers={COPY: f"{copy}"}
            )
        except OutcomeUnknown:
            self.unknown += 1
            return False
        except PublishError as error:
            self.answers[number, copy] = "refused"
            self.refused[type(error).__name__] += 1
            await asyncio.sleep(PAUSE)
            return False
        finally:
            self._under_way[name] -= 1
        self.answers[number, copy] = "stored"
        return True

    def key_of(self, number: int) -> str:
        """The key of an id: those of one key are published by one publisher, in order."""
        if number >= PROBES:
            return f"probe {number}"
        return f"{number % PUBLISHERS} {number // PUBLISHERS % KEYS}"

    # -- probes

    async def probe(self) -> list[tuple[str, int]]:
        """Publish a fresh message to every subscriber; where each will come to its end."""
        probes = [(name, self._next(way=3)) for name in NAMES]
        probes.append((RETRIES, self._next(way=2)))  # ends as a dead letter
        async with asyncio.TaskGroup() as publishers:
            for name, number in probes:
                publishers.create_task(self.publish_one(name, number))
        return [(place_of(name, number), number) for name, number in probes]

    def _next(self, way: int) -> int:
        self._probes += 5
        return self._probes - self._probes % 5 + way

    # -- who waits for what

    async def shut(self, name: str) -> None:
        """Publish nothing more to it, until `open`; returns when nothing is under way."""
        self._gates[name].clear()
        await eventually(lambda: not self._under_way[name], UNDER_WAY, f"what is under way to {name} is answered")

    def open(self, name: str) -> None:
        self._gates[name].set()

    def missing(self, done: set[tuple[str, int]], name: str | None = None) -> list[int]:
        """Ids that were published, to `name` or all, and have not come to their end."""
        return [
            number
            for number, to in self.published.items()
            if name in (None, to) and (place_of(to, number), number) not in done
        ]
