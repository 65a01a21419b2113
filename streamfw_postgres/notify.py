"""Waking subscribers: at once within the process, by NOTIFY across processes, and beneath it all the poll.

A transaction that notifies takes one lock for the whole server at its commit, so a publisher notifies *after* its
commit, by a statement of its own, at most every 50 ms. A notification is only a hint: one that is lost costs a poll.

The payload is a kind and the queue: ``n`` (new, ready), ``d`` (look from the beginning: something delayed or given
back), then ``=name``, or ``#sha256`` of a name too long for a payload (8,000 bytes).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakValueDictionary

import asyncpg

from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError

from .roles import Role

__all__ = ["Listener", "Notifier", "Wakeable", "Wakes", "channel_of", "shared_wakes"]

PAUSE = 0.05
CHECK_EVERY, CHECK_WITHIN = 30.0, 5.0
_LONGEST_NAME = 7000


class Wakeable(Protocol):
    """What can be woken: a source."""

    def wake(self, after: float = 0.0, rescan: bool = False) -> None:
        """There is something, in `after` seconds. `rescan`: perhaps below where claims start to look."""


def channel_of(schema: str) -> str:
    """The channel of a schema; a channel's name is an identifier of at most 63 bytes."""
    return f"streamfw_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"


def _address(queue: str) -> str:
    raw = queue.encode("utf-8", "surrogatepass")
    return f"={queue}" if len(raw) <= _LONGEST_NAME else f"#{hashlib.sha256(raw).hexdigest()}"


class Wakes:
    """The sources of one schema in this process, by queue."""

    def __init__(self) -> None:
        self._sources: dict[str, list[Wakeable]] = {}
        self._addresses: dict[str, str] = {}

    def add(self, queue: str, source: Wakeable) -> None:
        """From now on it is woken."""
        self._sources.setdefault(queue, []).append(source)
        self._addresses[_address(queue)] = queue

    def discard(self, queue: str, source: Wakeable) -> None:
        """Not any more."""
        sources = self._sources.get(queue, [])
        if source in sources:
            sources.remove(source)
        if not sources and queue in self._sources:
            del self._sources[queue], self._addresses[_address(queue)]

    def wake(self, queue: str, after: float = 0.0, rescan: bool = False) -> None:
        """Wake all sources of a queue."""
        for source in self._sources.get(queue, ()):
            source.wake(after, rescan)

    def heard(self, payload: str) -> None:
        """Wake by a notification's payload; one that nobody here wrote wakes everybody."""
        queue = self._addresses.get(payload[1:])
        if queue is not None:
            self.wake(queue, rescan=payload[:1] != "n")
        elif payload[1:2] not in ("=", "#"):
            self.all()

    def all(self) -> None:
        """Wake everybody: notifications may have been missed."""
        for queue in list(self._sources):
            self.wake(queue, rescan=True)


# By event loop, database and schema: a publish by one connection wakes the sources of every other in the process.
_shared: WeakValueDictionary[tuple[object, ...], Wakes] = WeakValueDictionary()


def shared_wakes(*key: object) -> Wakes:
    """The process's one `Wakes` for this key and the running loop."""
    place = (id(asyncio.get_running_loop()), *key)
    wakes = _shared.get(place)
    if wakes is None:
        wakes = _shared[place] = Wakes()
    return wakes


class Notifier:
    """Sends notifications after commits: the first at once, what follows within 50 ms together."""

    def __init__(self, role: Role, channel: str) -> None:
        self._role = role
        self._channel = channel
        self._waiting: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def published(self, queues: Mapping[str, float]) -> None:
        """These queues have something new, with these smallest delays in seconds."""
        for queue, delay in queues.items():
            self.note(queue, rescan=delay > 0)

    def note(self, queue: str, rescan: bool) -> None:
        """Tell the other processes."""
        if rescan or queue not in self._waiting:
            self._waiting[queue] = ("d" if rescan else "n") + _address(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="streamfw notify")

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self.flush()
                await asyncio.sleep(PAUSE)
        finally:
            self._task = None

    async def flush(self, timeout: float | None = None) -> None:
        """Send what waits. Never raises for a server that is away."""
        payloads = list(self._waiting.values())
        self._waiting.clear()
        if not payloads:
            return
        try:
            await self._role.fetch(
                "select pg_notify($1, p) from unnest($2::text[]) p", self._channel, payloads, timeout=timeout
            )
        except BrokerError:
            pass  # a hint only: the poll brings it

    async def close(self) -> None:
        """Send what waits, and end."""
        task, self._task = self._task, None
        if task is not None:
            await ended((task,))
        await self.flush(timeout=1.0)


class Listener:
    """Listens on a connection of its own; heals, checks itself, and wakes everybody after a gap."""

    def __init__(self, role: Role, channel: str, wakes: Wakes, is_own: Callable[[int], bool]) -> None:
        self._role = role
        self._channel = channel
        self._wakes = wakes
        self._is_own = is_own
        self._task: asyncio.Task[None] | None = None
        self.listening = asyncio.Event()

    def start(self) -> None:
        """Begin, unless it runs already. Subscribers do not wait for it: the poll serves them until it listens."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamfw listen")

    async def _run(self) -> None:
        pause = 0.1
        while True:
            try:
                await self._listen()
                pause = 0.1
            except BrokerClosed:
                return
            except BrokerError:
                pause = min(5.0, pause * 2)
            self.listening.clear()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _listen(self) -> None:
        """Listen until the connection ends or turns out to be deaf."""
        ended = asyncio.Event()

        async def begin(connection: asyncpg.Connection) -> None:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(self._channel, self._heard)

        await self._role.run(begin)
        self.listening.set()
        self._wakes.all()
        while True:
            try:
                await asyncio.wait_for(ended.wait(), CHECK_EVERY)
                return
            except TimeoutError:
                pass
            # On a connection that healed in between nothing listens: the answer is no.
            deaf = "select $1 <> all(array(select pg_listening_channels()))"
            if await self._role.value(deaf, self._channel, timeout=CHECK_WITHIN):
                self._role.terminate()
                return

    def _heard(self, _connection: object, pid: int, _channel: str, payload: object) -> None:
        if not self._is_own(pid):  # our own publishers have woken the sources already
            self._wakes.heard(str(payload))

    async def close(self) -> None:
        """End, also the connection."""
        task, self._task = self._task, None
        if task is not None:
            await ended((task,))
        await self._role.close()
