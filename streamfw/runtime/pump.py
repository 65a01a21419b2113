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
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from streamfw.broker import Connection, Delivery, Health, Settlement, Source
from streamfw.errors import BrokerClosed, BrokerError, SettleError
from streamfw.observe.logs import SubscriberLog
from streamfw.outcome import RELEASE, SETTLED, DeadLetter, Drop, Outcome, Retry

from .batches import BatchCrew
from .crew import Crew
from .lanes import Lanes
from .plan import Counters, Plan
from .prefetch import Prefetch
from .settler import Settler, backoff
from .signal import Signal

__all__ = ["Pump"]

TICK = 1.0  # seconds between two looks at what is at hand
GRACE = 5.0  # seconds for the last settlements, after the handlers' own deadline
CALM = 30.0  # seconds after which a source that broke counts as well again, though it had nothing to deliver
PAUSE = (0.05, 0.5)  # seconds before what is unsettled is tried again


class Pump:
    """Runs one subscriber. `failed` is called once with the error that ends it."""

    def __init__(self, plan: Plan, failed: Callable[[BaseException], None]) -> None:
        self.plan, self.log = plan, SubscriberLog(plan.where, plan.subscription)
        self.counters = Counters()
        self.in_flight = 0
        self.state: Literal["starting", "live", "draining", "stopped"] = "starting"
        self.error: BaseException | None = None
        self.troubles: dict[str, BaseException] = {}  # what does not work at present, and is tried again
        self._failed = failed
        self._stopping = False
        self._free, self._to_settle, self._retry = Signal(), Signal(), Signal()
        self._done: list[Settlement] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_held = self._warned_pause = False
        self._attempts = 0  # to open the source again, without anything fetched in between
        self._reopened = (0, -math.inf)  # how much was fetched when it was opened again, and when that was
        self._retries_here = not plan.capabilities.retry
        start = max(plan.capabilities.prefetch, 2 * plan.workers)
        size = plan.batch.size if plan.batch else 0
        self.prefetch = Prefetch(
            plan.workers, start, plan.subscription.prefetch, plan.max_bytes, plan.prefetch, 2 * size * plan.workers
        )
        self.lanes = Lanes(self._again, plan.clock)
        self.crew = self._make_crew(plan)
        self.settler = Settler(
            self._done,
            self._to_settle,
            settled=self._settled,
            errors=self._settle_errors,
            may_wait=lambda count: count * 4 < self.prefetch.size and bool(self.crew.ready or not self.crew.hungry),
            dead_letter=plan.dead_letter,
            trouble=self._trouble,
            clock=plan.clock,
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
        crew.warn = lambda text: self.log(logging.WARNING, "%s", text)
        crew.goes_down = lambda: any(task.cancelling() for task in self._tasks)  # which no handler knows
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
        self._adapt()
        self._give_surplus_back()
        self._make_room()

    def _adapt(self) -> None:
        now, crew = self.plan.clock(), self.crew
        taken = self.counters.fetched - len(crew.ready) - len(crew.shelf or ()) - self.lanes.parked
        if self.prefetch.due(taken, now):
            self.prefetch.adapt(taken, now, crew.hungry and not crew.ready)

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

    @property
    def stuck(self) -> bool:
        """Whether the drain left threads behind: then its source is still open, or their deliveries would be given
        to others while they run."""
        return self.crew.stuck

    async def drain(self, deadline: float, leave_threads: bool = False) -> None:
        """Stop fetching, let handlers finish until `deadline`, cancel the rest, flush, close.

        Handlers in threads are waited for, however long they take, or (`leave_threads`) left behind; see `Crew.end`.

        What has not begun is left to `Source.close`, which releases it with no attempt counted. Whatever the source
        raises meanwhile is logged: closing goes on.
        """
        self._stopping = True
        self.crew.leave_threads = leave_threads
        if self.state == "live":
            self.state = "draining"
        if self._tasks and self.plan.capabilities.settlement == "positional":
            await self._end_what_holds_back(deadline)
        self.crew.abandon()
        await self._safely("stop", self.source.stop(), GRACE)
        last = deadline
        if self._tasks:
            last = await self._end_tasks(deadline)
            left = last - asyncio.get_running_loop().time()
            await self._safely("flush", self.source.flush(last), left + GRACE)
        if not self.stuck:
            await self._safely("close", self.source.close(), GRACE)
        self.state = "stopped"

    async def _end_what_holds_back(self, deadline: float) -> None:
        """In a log, what was done behind a message that has not begun would be repeated: let those finish as well."""
        loop = asyncio.get_running_loop()
        self.hold()
        await self._safely("stop", self.source.stop(), GRACE)
        await self.quiesce(deadline - loop.time(), self.source.holds_back)

    async def _end_tasks(self, deadline: float) -> float:
        """End workers, fetcher and settler; return until when the last settlements may take."""
        loop = asyncio.get_running_loop()
        self._ticker.cancel()
        self._free.set()
        self._retry.set()
        await self.crew.end(deadline)
        last = max(deadline, loop.time() + GRACE)
        await self.settler.drain(last)
        _, late = await asyncio.wait(self._tasks, timeout=last - loop.time() + 1.0)
        for task in late:
            self.log(logging.WARNING, "the source does not answer; its call is cancelled")
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=GRACE)
        return last

    async def _safely(self, what: str, step: Coroutine[Any, Any, None], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await step
        except Exception as error:  # a bug of the source as well: everything else is closed all the same
            self.log(logging.WARNING, "%s: %s: %s", what, type(error).__name__, error, error=error)

    def _ending(self) -> bool:
        return self._stopping

    def health(self) -> Health:
        """Whether this subscriber has a live source."""
        if self.state != "live":
            return Health(False, f"{self.state}: {self.error}" if self.error else self.state)
        for what, error in self.troubles.items():
            return Health(False, f"{what}: {error}")
        return self.source.health()

    # -- fetch

    async def _fetch(self) -> None:
        fetch, prefetch, crew, counters = self.source.fetch, self.prefetch, self.crew, self.counters
        while not self._stopping:
            if not self._room():
                await self._free.wait()
                continue
            held = self.lanes.held
            wanted = min(prefetch.room(self.in_flight - held, held), prefetch.at_once)
            try:
                batch = await fetch(wanted, prefetch.bytes_left(self.in_flight))
            except BrokerError as error:
                if self._ending():
                    return
                if not error.transient:
                    raise
                await self._reopen(error)
                continue
            if self._ending():
                return  # what came is unsettled: closing the source gives it back
            if not batch:
                raise BrokerClosed(f"{self.plan.where}: its source was stopped by somebody else")
            count = len(batch)
            some = batch[:: prefetch.step]
            prefetch.saw(len(some), sum([len(d.body) for d in some]) if type(some[0].body) is bytes else len(some))
            self._adapt()
            self.in_flight += count
            counters.fetched += count
            crew.arrive(batch)

    def _room(self) -> bool:
        """Fetch when half is free, or anything is and a worker has nothing to do: few and large fetches.

        A quarter must be free while a settlement is on its way: it will make room in a moment.
        """
        held = self.lanes.held
        if held >= self.plan.held:
            self._warn_held(held)
            return False
        free = self.prefetch.room(self.in_flight - held, held)
        if free <= 0:
            return False
        capacity = self.prefetch.capacity
        if free * 2 >= capacity:
            return True
        if not self.crew.hungry or self.crew.ready:
            return False
        return free * 4 >= capacity or not self.settler.busy

    def _warn_held(self, held: int) -> None:
        if not self._warned_held:
            self._warned_held = True
            self.log(logging.WARNING, "%d messages wait behind retries; fetching stops until there are fewer", held)

    def _give_surplus_back(self) -> None:
        """The workers turned out slower than the start assumed: let others have what will not be begun soon."""
        ready, keep = self.crew.ready, self.prefetch.size
        if len(ready) <= 2 * keep or not self.plan.capabilities.release or self.plan.subscription.ordered_by:
            return
        surplus = [ready.pop() for _ in range(len(ready) - keep)]
        self.counters.released += sum(not delivery.lost for delivery in surplus)
        for delivery in surplus:
            if delivery.lost:
                self._forget(delivery)
            else:
                self._settle(delivery, RELEASE)

    async def _reopen(self, error: BrokerError) -> None:
        """The source broke: open it again, with growing pauses."""
        self._trouble("fetching", error)
        fetched, reopened_at = self._reopened
        if self.counters.fetched > fetched or self.plan.clock() - reopened_at > CALM:
            self._attempts = 0
        while not self._ending():
            await self._retry.wait_for(backoff(self._attempts))
            self._attempts += 1
            if self._ending():
                return
            try:
                await self.source.reopen()
            except BrokerError as again:
                if not again.transient:
                    raise
                self.troubles["fetching"] = again
                continue
            self._trouble("fetching", None)
            self.counters.reopened += 1
            self._reopened = self.counters.fetched, self.plan.clock()
            self._purge(lambda delivery: delivery.lost)
            return

    def _trouble(self, what: str, error: BaseException | None) -> None:
        """Something does not work and is tried again, or (None) works again."""
        if error is None:
            self.troubles.pop(what, None)
            self.log(logging.INFO, "%s: works again", what)
            return
        if what not in self.troubles or not isinstance(error, BrokerError):
            self.log(logging.WARNING, "%s: %s; trying again", what, error, error=error)
        self.troubles[what] = error

    # -- the end of a delivery

    def _settled(self, count: int, odd: int) -> None:
        self.counters.settled += count
        self.counters.acked += count - odd
        self._gone(count)

    def _settle_errors(self, errors: Sequence[SettleError], acknowledgements: int) -> None:
        self.counters.lost += len(errors)
        self.counters.settled -= len(errors)
        self.counters.acked -= acknowledgements
        text, first = "%d settlements came too late, the first: %s", errors[0]
        self.log(logging.WARNING, text, len(errors), first, message=first.delivery, error=first)

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
        counters, caps = self.counters, self.plan.capabilities
        if outcome is SETTLED:
            counters.settled += 1
            counters.acked += 1
            self._gone(1)
            return False
        if outcome is RELEASE:
            return self._cancelled(delivery)
        if isinstance(outcome, Retry):
            counters.retried += 1
            short = (outcome.after or 0.0) < caps.retry_after
            here = self._retries_here or short or self._keeps_lane(delivery)
            if here or not self.source.can_retry(delivery):
                if not self._stopping:  # else it is left to the source: behind it in its lane wait others
                    delivery.attempt += 1
                    self.lanes.wait(delivery, self._not_too_long(outcome.after or 0.0))
                return True
        elif isinstance(outcome, DeadLetter):
            counters.dead += 1
            if not caps.dead_letter:
                self.settler.bury(delivery, outcome)
                return False
        elif isinstance(outcome, Drop):
            counters.dropped += 1
        self._settle(delivery, outcome)
        return False

    def _not_too_long(self, pause: float) -> float:
        longest = self.plan.capabilities.longest_pause
        if longest is None or pause <= longest:
            return pause
        if not self._warned_pause:
            self._warned_pause = True
            text = "a retry after %g s comes after %g s: it waits in the process, for as long as the broker lets it"
            self.log(logging.WARNING, text, pause, longest)
        return longest

    def _keeps_lane(self, delivery: Delivery) -> bool:
        return delivery.lane is not None and not self.plan.capabilities.overtaking

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """Hand over what is not an acknowledgement."""
        self._done.append(Settlement(delivery, outcome))
        self.settler.odd += 1
        self._to_settle.set()

    def _cancelled(self, delivery: Delivery) -> bool:
        """We have cancelled a handler, or its transaction broke, so its delivery is unsettled. In a drain
        `Source.close` gives it back; otherwise it is tried again here, not at once: it may be the same again."""
        if delivery.lost:
            self._forget(delivery)
            return False
        self.counters.released += 1
        if not self._stopping:
            self.lanes.wait(delivery, random.uniform(*PAUSE))
        return True

    def _again(self, delivery: Delivery) -> None:
        """The pause of a delivery that waited here is over."""
        self._warned_held = False
        if self._stopping:
            return
        self.crew.give_back([delivery])
        self._make_room()

    # -- PumpControl: a source holds the pump while deliveries move

    def hold(self) -> None:
        """Start nothing new; see `streamfw.broker.PumpControl`."""
        self.crew.hold()

    async def quiesce(self, seconds: float, finish: Callable[[Delivery], bool] | None = None) -> bool:
        """Wait until nothing runs and what ran is settled; see `streamfw.broker.PumpControl`."""
        deadline = asyncio.get_running_loop().time() + seconds
        if not await self._is_quiet(deadline):
            return False
        if finish is None:
            return True
        self.crew.hold(but=finish)
        try:
            return await self._is_quiet(deadline)
        finally:
            self.crew.hold()

    @property
    def _quiet(self) -> bool:
        return not (self.crew.running or self.crew.ready or self.settler.busy)

    async def _is_quiet(self, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        quiet = Signal()
        waiters = (self.crew.quiet, self.settler.rested)
        for waiting in waiters:
            waiting.add(quiet)
        try:
            while not self._quiet:
                self.settler.hurry()
                left = deadline - loop.time()
                if left <= 0:
                    return False
                await quiet.wait_for(left)
            return True
        finally:
            for waiting in waiters:
                waiting.discard(quiet)

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None:
        """Go on; see `streamfw.broker.PumpControl`."""
        if self.crew.shelf is None:
            return
        gone = 0
        if drop is not None:
            self.crew.lose(drop)
            dropped, behind = self.lanes.cancel(drop)
            gone = len(dropped)
            self.crew.front(behind)
        gone += self.crew.unhold(drop)
        self.counters.lost += gone
        self._gone(gone)

    def take_back(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        """Give the source what has not begun; see `streamfw.broker.PumpControl`."""
        crew = self.crew
        held = crew.shelf is not None
        crew.hold()
        waiting = crew.shelf or []
        taken = [delivery for delivery in waiting if wanted(delivery)]
        if taken:
            crew.shelf = [delivery for delivery in waiting if not wanted(delivery)]
        if not held:
            crew.unhold()
        self.counters.released += len(taken)
        self._gone(len(taken))
        return taken

    def vouch(self, seconds: float, look: Callable[[], None]) -> None:
        """What is out is ours so long; see `streamfw.broker.PumpControl`."""
        self.crew.vouched, self.crew.look = self.plan.clock() + seconds, look

    def _purge(self, drop: Callable[[Delivery], bool]) -> None:
        """Forget what waits in this process and matches `drop`."""
        held = self.crew.shelf is not None
        self.hold()
        self.release(drop)
        if held:
            self.hold()
