"""The pump: one subscriber, from fetch to settle.

    fetcher --extend--> ready (deque) --popleft--> n workers --append--> done (list) --> settler
       ^                                                                                   |
       +----------------------------- in_flight (an int) ---------------------------------+

All in one thread, so no locks. Holding the pump moves what is ready to a shelf, where no worker looks: so the hot path
pays nothing for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from streamfw.broker import Capabilities, Connection, Delivery, Health, Settlement, Source, Subscription
from streamfw.errors import BrokerClosed, BrokerError, SettleError
from streamfw.handler import Call
from streamfw.outcome import RELEASE, SETTLED, DeadLetter, Drop, Outcome, Policy, Retry
from streamfw.subscriber import Batch

from .batches import BatchCrew
from .crew import Crew
from .lanes import Lanes
from .prefetch import Prefetch
from .settler import Settler, backoff
from .signal import Signal

__all__ = ["Counters", "Plan", "Pump"]

logger = logging.getLogger("streamfw")
TICK = 1.0  # seconds between two looks at what is at hand
GRACE = 5.0  # seconds for the last settlements, after the handlers' own deadline


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
    """What a pump has done; touched once a group, or in cold paths. Acknowledged is `settled` less the others."""

    fetched: int = 0
    settled: int = 0
    retried: int = 0
    dropped: int = 0
    dead: int = 0
    released: int = 0
    lost: int = 0
    reopened: int = 0


class Pump:
    """Runs one subscriber. `failed` is called once with the error that ends it."""

    def __init__(self, plan: Plan, failed: Callable[[BaseException], None]) -> None:
        self.plan = plan
        self.counters = Counters()
        self.in_flight = 0
        self.state: Literal["starting", "live", "broken", "stopped"] = "starting"
        self.error: BaseException | None = None
        self._failed = failed
        self._stopping = False
        self._free, self._to_settle, self._retry = Signal(), Signal(), Signal()
        self._done: list[Settlement] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_held = False
        self._retries_here = not plan.capabilities.retry
        start = max(plan.capabilities.prefetch, 2 * plan.workers)
        size = plan.batch.size if plan.batch else 0
        self.prefetch = Prefetch(
            plan.workers, start, plan.subscription.prefetch, plan.max_bytes, plan.prefetch, 2 * size * plan.workers
        )
        self.lanes = Lanes(self._again)
        self.crew = self._make_crew(plan)
        self.settler = Settler(
            self._done,
            self._to_settle,
            settled=self._settled,
            errors=self._settle_errors,
            may_wait=lambda count: count * 4 < self.prefetch.size and not self.crew.idle,
            dead_letter=plan.dead_letter,
            broken=self._settle_broken,
        )
        plan.subscription.pump = self

    def _make_crew(self, plan: Plan) -> Crew:
        crew_type = BatchCrew if plan.batch else Crew
        crew = crew_type(
            plan.call,
            plan.policy,
            self.lanes,
            workers=plan.workers,
            timeout=plan.timeout,
            clock=plan.clock,
            odd=self._odd,
            forget=self._forget,
            dry=self._dry,
            failed=self.fail,
            to_settle=self._to_settle,
            done=self._done,
        )
        crew.warn = lambda message: logger.warning("%s: %s", plan.where, message)
        if isinstance(crew, BatchCrew):
            assert plan.batch is not None
            crew.batch, crew.decode = plan.batch, plan.decode
        return crew

    # -- life

    async def open(self, connection: Connection) -> None:
        """Open the source. Raises a `BrokerError`."""
        self.source: Source = await connection.open(self.plan.subscription)

    def start(self) -> None:
        """Begin to fetch, handle and settle."""
        loop = asyncio.get_running_loop()
        self.state = "live"
        self.crew.start()
        for coroutine in (self._fetch(), self.settler.run(self.source)):
            task = loop.create_task(coroutine)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        self._ticker = loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        """Once a second: a fetch of many slow messages is not followed by another, so nobody else would look."""
        self._ticker = asyncio.get_running_loop().call_later(TICK, self._tick)
        ready = self.crew.ready
        self.prefetch.adapt(self.counters.fetched - len(ready), self.plan.clock(), not ready)
        self._give_surplus_back()
        self._make_room()

    def _make_room(self) -> None:
        if self._free.waiter is not None and self._room():
            self._free.set()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """This subscriber cannot go on."""
        if self.state != "stopped":
            self.state, self.error = "stopped", error
            self._failed(error)

    async def drain(self, deadline: float) -> None:
        """Stop fetching, let handlers finish until `deadline`, cancel the rest, flush, close.

        What has not begun is left to `Source.close`, which releases it with no attempt counted.
        """
        self._stopping = True
        await self.source.stop()
        if not self._tasks:  # opened, and never started
            await self.source.close()
            return
        self._ticker.cancel()
        self._free.set()
        self._retry.set()
        fetcher, settling = self._tasks
        await asyncio.wait([fetcher], timeout=GRACE)
        self._abandon()
        await self.crew.end(deadline)
        last = max(deadline, asyncio.get_running_loop().time()) + GRACE
        await self.settler.drain(last)
        _, late = await asyncio.wait([settling, fetcher], timeout=GRACE + 1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(fetcher, settling, return_exceptions=True)
        try:
            await self.source.flush(last)
        except BrokerError as error:
            logger.warning("%s: not everything could be flushed: %s", self.plan.where, error)
        await self.source.close()
        self.state = "stopped"

    def _abandon(self) -> None:
        self.crew.ready.clear()
        self.lanes.take_parked()
        self.lanes.cancel(lambda delivery: True)
        self.crew.shelf = None

    def _ending(self) -> bool:
        return self._stopping

    def health(self) -> Health:
        """Whether this subscriber has a live source."""
        if self.state != "live":
            return Health(False, f"{self.state}: {self.error}" if self.error else self.state)
        return self.source.health()

    # -- fetch

    async def _fetch(self) -> None:
        fetch, prefetch, crew, counters = self.source.fetch, self.prefetch, self.crew, self.counters
        ready = crew.ready
        while not self._stopping:
            if not self._room():
                await self._free.wait()
                continue
            wanted = prefetch.room(self.in_flight - self.lanes.held)
            try:
                batch = await fetch(wanted, prefetch.bytes_left(self.in_flight))
            except BrokerError as error:
                if not error.transient:
                    raise
                await self._reopen(error)
                continue
            if self._ending():
                return  # what came is unsettled: closing the source gives it back
            if not batch:
                raise BrokerClosed(f"{self.plan.where}: its source was stopped by somebody else")
            count = len(batch)
            prefetch.saw(count, sum([len(d.body) for d in batch]) if type(batch[0].body) is bytes else count)
            prefetch.adapt(counters.fetched - len(ready), self.plan.clock(), not ready)
            self.in_flight += count
            counters.fetched += count
            crew.arrive(batch)

    def _room(self) -> bool:
        """Fetch when half is free, or anything is and a worker has nothing to do: few and large fetches."""
        held = self.lanes.held
        if held >= self.plan.held:
            self._warn_held(held)
            return False
        free = self.prefetch.room(self.in_flight - held)
        if free <= 0:
            return False
        return free * 2 >= self.prefetch.size or (bool(self.crew.idle) and not self.crew.ready)

    def _warn_held(self, held: int) -> None:
        if not self._warned_held:
            self._warned_held = True
            logger.warning(
                "%s: %d messages wait behind retries; fetching stops until there are fewer", self.plan.where, held
            )

    def _give_surplus_back(self) -> None:
        """The workers turned out slower than the start assumed: let others have what will not be begun soon."""
        ready, keep = self.crew.ready, self.prefetch.size
        if len(ready) <= 2 * keep or not self.plan.capabilities.release or self.plan.subscription.ordered_by:
            return
        surplus = [ready.pop() for _ in range(len(ready) - keep)]
        self.counters.released += len(surplus)
        self._done.extend(Settlement(delivery, RELEASE) for delivery in surplus if not delivery.lost)
        self.in_flight -= sum(delivery.lost for delivery in surplus)
        self._to_settle.set()

    async def _reopen(self, error: BrokerError) -> None:
        """The source broke: open it again, with growing pauses."""
        self.state, self.error = "broken", error
        logger.warning("%s: %s; trying again", self.plan.where, error)
        attempt = 0
        while True:
            await self._retry.wait_for(backoff(attempt))
            attempt += 1
            if self._ending():
                return
            try:
                await self.source.reopen()
            except BrokerError as again:
                if not again.transient:
                    raise
                self.error = again
                continue
            self.state, self.error = "live", None
            self.counters.reopened += 1
            self._purge(lambda delivery: delivery.lost)
            logger.info("%s: consuming again", self.plan.where)
            return

    def _settle_broken(self, error: BrokerError | None) -> None:
        if error is not None and self.state == "live":
            logger.warning("%s: settling: %s; trying again", self.plan.where, error)
        if self.state in ("live", "broken"):
            self.state, self.error = ("broken", error) if error is not None else ("live", None)

    # -- the end of a delivery

    def _settled(self, count: int) -> None:
        self.in_flight -= count
        self.counters.settled += count
        self._make_room()

    def _settle_errors(self, errors: Sequence[SettleError]) -> None:
        self.counters.lost += len(errors)
        logger.warning("%s: %d settlements came too late, the first: %s", self.plan.where, len(errors), errors[0])

    def _forget(self, delivery: Delivery) -> None:
        """A delivery that is lost before its handler began: somebody else has it."""
        self.counters.lost += 1
        self._gone(1)

    def _gone(self, count: int) -> None:
        self.in_flight -= count
        self._make_room()

    def _dry(self) -> None:
        """A worker has nothing to do."""
        self.settler.hurry()
        self._make_room()

    def _odd(self, delivery: Delivery, outcome: Outcome) -> bool:
        """End, or keep, what is not acknowledged. True: it stays here, with its lane, to be done again."""
        counters = self.counters
        if outcome is SETTLED:
            self.counters.settled += 1
            self._gone(1)
            return False
        if outcome is RELEASE:
            return self._cancelled(delivery)
        if isinstance(outcome, Retry):
            counters.retried += 1
            if self._stays(delivery):
                delivery.attempt += 1
                self.lanes.wait(delivery, outcome.after or 0.0)
                return True
        elif isinstance(outcome, DeadLetter):
            counters.dead += 1
            logger.error(
                "%s: message %s goes to the dead letter: %s", self.plan.where, delivery.message_id, outcome.reason
            )
            if not self.plan.capabilities.dead_letter:
                self.settler.bury(delivery, outcome)
                return False
        elif isinstance(outcome, Drop):
            counters.dropped += 1
        self._done.append(Settlement(delivery, outcome))
        self._to_settle.set()
        return False

    def _stays(self, delivery: Delivery) -> bool:
        return (self._retries_here or delivery.lane is not None) and not self._stopping

    def _cancelled(self, delivery: Delivery) -> bool:
        """A handler was cancelled, so its delivery is unsettled. In a drain `Source.close` gives it back; a handler
        that cancelled itself gets its message again here."""
        self.counters.released += 1
        if self._stopping:
            return True
        self.crew.give_back(delivery)
        return True

    def _again(self, delivery: Delivery) -> None:
        """The pause of a delivery that waited here is over."""
        self._warned_held = False
        if self._stopping:
            return
        self.crew.give_back(delivery)
        self._make_room()

    # -- PumpControl: a source holds the pump while deliveries move

    def hold(self) -> None:
        """Start nothing new; see `streamfw.broker.PumpControl`."""
        self.crew.hold()

    async def quiesce(self, seconds: float) -> bool:
        """Wait until nothing runs; see `streamfw.broker.PumpControl`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.crew.running:
            left = deadline - loop.time()
            if left <= 0:
                return False
            await self.crew.quiet.wait_for(left)
        return True

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None:
        """Go on; see `streamfw.broker.PumpControl`."""
        if self.crew.shelf is None:
            return
        gone = len(self.lanes.cancel(drop)) if drop is not None else 0
        gone += self.crew.unhold(drop)
        self.counters.lost += gone
        self._gone(gone)

    def _purge(self, drop: Callable[[Delivery], bool]) -> None:
        """Forget what waits in this process and matches `drop`."""
        held = self.crew.shelf is not None
        self.hold()
        self.release(drop)
        if held:
            self.hold()
