"""The faults of RabbitMQ's suite: each happens, is seen to turn health red where it takes something away, ends, and is
over when every subscriber has handled a fresh message."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from streamfw import App
from streamfw_rabbit.channel import Channel
from streamfw_rabbit.source import RabbitSource
from streamfw_rabbit.stream_source import StreamSource
from tests.brokers.rabbit_broker_kit import raw
from tests.faults.pace import Pace
from tests.faults.processes import Processes
from tests.faults.rabbit_app import GROUP, HEARTBEAT, QUEUES
from tests.faults.rabbit_flow import Flow
from tests.faults.rabbit_ledger import Watch
from tests.faults.rabbit_oracle import Fate
from tests.helpers import eventually
from tests.services.proxy import Proxy
from tests.services.rabbit import OwnRabbit, Rabbit

__all__ = ["KILLED", "KINDS", "Faults"]

RED, GREEN = 20.0, 60.0  # seconds until health tells what is away, or all works again
SILENT: Final = 2 * HEARTBEAT + 1.5  # seconds after which a silent peer is known to be dead
APP: Final = "app"  # the process in which all of this runs
UNKNOWN_TAG: Final = 2**40
SYNC: Final = "mnesia:sync_log(), [dets:sync(Table) || Table <- dets:all()]"
GREETING: Final = b"AMQP\x00\x00\x09\x01"

KILLED: Final = "consumer killed"


class Faults:
    """- `fates`: what happened so far; `counts` by kind. `red`: in how many of them the app's health was.
    - `recoveries`: of each, seconds from when the server took connections (again) until all were at work."""

    def __init__(
        self,
        app: App,
        server: OwnRabbit,
        proxy: Proxy,
        others: Processes,
        flow: Flow,
        watch: Watch,
        chance: random.Random,
    ) -> None:
        self._app, self._server, self._proxy, self._others = app, server, proxy, others
        self._flow, self._watch, self.chance = flow, watch, chance
        self.fates: list[Fate] = []
        self.counts: Counter[str] = Counter()
        self.recoveries: list[tuple[str, float]] = []
        self.red = 0
        self._reds = 0

    async def run(self, plan: Sequence[str], pace: Pace) -> None:
        await self._recovered()  # so that all consume
        for kind in plan:
            await asyncio.sleep(self.chance.uniform(0.02, 0.3))
            self._others.check()
            await KINDS[kind].happen(self, Fate(time.monotonic_ns(), kind, 0))
            self.counts[kind] += 1
            pace.fault_is_over()

    def look(self) -> None:
        """Something has ended: does health tell?"""
        self._reds += not self._app.health().ok

    # -- what happens

    @asynccontextmanager
    async def _happens(self, fate: Fate, red: bool = True) -> AsyncIterator[None]:
        """What begins in its body, and ends when that has ended, and all works again. `red`: health has to tell."""
        self._reds = 0
        place = len(self.fates)
        self.fates.append(replace(fate, at=time.monotonic_ns()))
        yield
        back = await self._back()
        self.recoveries.append((fate.kind, await self._recovered() - back))
        self.fates[place] = replace(self.fates[place], until=time.monotonic_ns())
        assert self._reds or not red, f"{fate.kind}: health did not tell"
        self.red += self._reds > 0

    async def _back(self) -> float:
        """Wait until the server takes connections."""
        await eventually(lambda: _greets(self._server.facts), GREEN, "the server takes connections")
        return time.monotonic()

    async def _recovered(self) -> float:
        """Every subscriber handles a fresh message; when that was. Then, the app is healthy."""
        probes = await self._flow.probe()
        await eventually(lambda: self._have(probes), GREEN, f"{probes} are handled")
        handled = time.monotonic()
        await eventually(lambda: self._app.health().ok, GREEN, "the app is healthy again")
        return handled

    def _have(self, probes: Sequence[tuple[str, int]]) -> bool:
        return self._watch.look().issuperset(probes)

    async def _away(self) -> None:
        await eventually(lambda: not self._app.health().ok, RED, "health tells that the server is away")
        self.look()

    async def _close(self, fate: Fate) -> None:
        async with self._happens(fate):
            assert await asyncio.to_thread(self._server.close_all_connections) > 0

    async def _cut(self, fate: Fate) -> None:
        async with self._happens(replace(fate, process=APP)):
            self._proxy.cut()

    async def _swallow(self, fate: Fate) -> None:
        """Until it is known, or not that long; what was swallowed does not come back."""
        async with self._happens(replace(fate, process=APP)):
            self._proxy.black_hole()
            await asyncio.sleep(self.chance.choice((0.5, SILENT)))
            self._proxy.cut()
            self._proxy.resume()

    async def _restart(self, fate: Fate) -> None:
        async with self._happens(fate):
            await asyncio.to_thread(self._server.stop)
            await self._away()
            await asyncio.to_thread(self._server.start)

    async def _kill(self, fate: Fate) -> None:
        """Of a queue that was deleted and made again a second before, RabbitMQ (3.10.8) has not everything on its disk
        yet: after a SIGKILL it can never be used again, and what was confirmed in it is gone. Nobody can help that."""
        await asyncio.to_thread(self._server.facts.evaluate, SYNC)
        async with self._happens(fate):
            await asyncio.to_thread(self._server.kill)
            await self._away()
            await asyncio.to_thread(self._server.start)

    async def _freeze(self, fate: Fate) -> None:
        async with self._happens(fate):
            await asyncio.to_thread(self._server.freeze)
            await self._away()
            await asyncio.sleep(self.chance.uniform(0, 1.0))
            await asyncio.to_thread(self._server.thaw)

    async def _alarm(self, fate: Fate) -> None:
        """Who consumes goes on."""
        async with self._happens(replace(fate, ends=False), red=False):
            await asyncio.to_thread(self._server.alarm, True)
            probing = asyncio.create_task(self._flow.probe())  # it tells only who publishes
            await eventually(self._is_blocked, RED, "the broker's health tells of the alarm")
            await asyncio.sleep(self.chance.uniform(0.2, 1.0))
            await asyncio.to_thread(self._server.alarm, False)
            await probing

    async def _is_blocked(self) -> bool:
        return not (await self._app.connection().check()).ok

    async def _delete(self, fate: Fate) -> None:
        """When it is empty: so nothing is lost by it. Who publishes meanwhile is told."""
        name = self.chance.choice(QUEUES)
        await self._flow.shut(name)
        await eventually(lambda: not self._flow.missing(self._watch.look(), name), GREEN, f"{name} is handled")
        queue = f"{name}.{GROUP}"
        await eventually(lambda: self._holds_nothing(queue), GREEN, f"{queue} is empty")
        async with raw(self._server.facts) as other, self._happens(replace(fate, queue=queue)):
            channel = await other.channel()
            gone = await channel.queue_delete(queue)
            self._flow.open(name)
            assert gone is not None
            assert gone.message_count == 0, "nothing was lost by it"

    def _holds_nothing(self, queue: str) -> bool:
        """Also nothing that is out and not acknowledged."""
        told = self._server.facts.evaluate(
            f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),'
            "{_, {_, Total}, _} = ra:local_query(amqqueue:get_pid(Q), {rabbit_fifo, query_messages_total, []}), Total"
        )
        return told == "0"

    async def _violate(self, fate: Fate) -> None:
        """Acknowledge what was never delivered, on the channel of one of the app's subscribers."""
        queue, channel = self.chance.choice(self._channels())
        async with self._happens(replace(fate, process=APP, queue=queue)):
            assert channel.ack(UNKNOWN_TAG)

    def _channels(self) -> list[tuple[str, Channel]]:
        """Of the app's subscribers that consume: the queue and the channel."""
        found: list[tuple[str, Channel]] = []
        for pump in self._app.pumps:
            source = pump.source
            if isinstance(source, RabbitSource) and source._held is not None:
                found.append((source._plan.queue, source._held.channel))
            elif isinstance(source, StreamSource) and (reader := source._readership.reader) is not None:
                found.append((source._readership._plan.queue, reader._channel))
        return found

    async def _kill_another(self, fate: Fate) -> None:
        """The other process, once it has begun."""
        (name,) = self._others.names
        end = time.monotonic() + GREEN
        while not self._others.begun(name):
            assert time.monotonic() < end, f"{name} does not begin: {self._others.tail(name)}"
            await self._recovered()
        async with self._happens(replace(fate, process=name, kills=True), red=False):
            await self._others.kill(name)
        await self._others.start()


@dataclass(frozen=True, slots=True)
class Kind:
    """How many of twenty faults are of it, and what happens."""

    weight: int
    happen: Callable[[Faults, Fate], Awaitable[None]]


KINDS: Final = {
    "connections closed by the server": Kind(3, Faults._close),
    "connections cut": Kind(2, Faults._cut),
    "network swallowed": Kind(1, Faults._swallow),
    "node restarted": Kind(1, Faults._restart),
    "node killed (SIGKILL)": Kind(1, Faults._kill),
    "node frozen": Kind(1, Faults._freeze),
    "memory alarm": Kind(2, Faults._alarm),
    "queue deleted": Kind(4, Faults._delete),
    "channel closed by a precondition": Kind(3, Faults._violate),
    f"{KILLED} (SIGKILL)": Kind(2, Faults._kill_another),
}


async def _greets(facts: Rabbit) -> bool:
    """Whether the server begins to speak AMQP with who connects."""
    try:
        reader, writer = await asyncio.open_connection(facts.host, facts.port)
    except OSError:
        return False
    try:
        writer.write(GREETING)
        return await asyncio.wait_for(reader.read(1), 1.0) == b"\x01"
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
