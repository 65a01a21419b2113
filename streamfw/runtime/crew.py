"""The workers of one pump.

Theory of operation
    n long-lived tasks take messages from one deque and await the handler directly, each in its own task. A handler
    that never suspends is thus run with no task switch; one that suspends suspends its worker, and the next goes on.
    Nobody guesses which it will be: one *spare* worker is woken an arrival; it runs only when the one before suspends
    or runs dry, and then wakes the next. So handlers that never suspend pay one wake a fetch, not one a worker.

    A worker task is used for many messages, so it must come out of each as it went in. Two cheap checks tell (its
    context is what it was; nobody cancelled it, see `slot.Worker`). A worker that fails one is replaced by a new task,
    not repaired: ``cancel()`` may leave a second CancelledError pending, which Python 3.11 and 3.12 cannot take back,
    and a context variable that was unset cannot be unset again. A subscriber whose handler leaks context is run with a
    context a message from then on.

    A handler that is cancelled has failed, like one that raises anything else, whoever did it (the handler itself, a
    library): left uncounted it would be tried again for ever. Only what we cancel is unsettled, and what is cancelled
    with all else because the loop goes down.

    Costs (CPU, CPython 3.11, in units of ``await h()``, about 0.1 us): a Settlement 0.8, the clock 0.5, the context
    check 0.5, a lane 1.4, a turn of the loop 23, a future's wake 10, a task 40 to 60.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from streamfw.broker import Delivery, Settlement
from streamfw.handler import Call
from streamfw.outcome import ACK, RELEASE, Outcome, Policy

from .context import apart, clean_context, one_turn
from .lanes import Lanes
from .signal import Signal
from .slot import DRAIN, SLOT, Slot, Worker

__all__ = ["Crew", "Slot"]

GRACE = 5.0  # seconds that what was cancelled may take to end
REMIND = 30.0  # seconds between two words about handlers that still run in threads
SLICE = 0.001  # seconds a pump may run in one turn of the loop (a turn costs 2 us: 0.2 per cent)


class Crew:
    """Workers over `ready`. `odd` takes what is not an acknowledgement and says whether the delivery stays here."""

    def __init__(
        self,
        call: Call,
        policy: Policy,
        lanes: Lanes,
        *,
        workers: int,
        timeout: float | None,
        clock: Callable[[], float],
        odd: Callable[[Delivery, Outcome], bool],
        forget: Callable[[Delivery], None],
        dry: Callable[[], None],
        failed: Callable[[BaseException], None],
        to_settle: Signal,
        done: list[Settlement],
    ) -> None:
        self.call, self.policy, self.lanes = call, policy, lanes
        self.workers, self.timeout, self.clock = workers, timeout, clock
        self.ready: deque[Delivery] = deque()
        self.slots: set[Slot] = set()
        self.idle: list[Signal] = []
        self.shelf: list[Delivery] | None = None  # what is ready while the pump is held, where no worker looks
        self.stopping = False
        self.leave_threads = self.stuck = self._told_stubborn = False
        self.isolated = False
        self.replaced = self.timeouts = 0
        self.vouched = math.inf  # until when, by the clock, nothing is lost that `look` has not marked
        self.look: Callable[[], None] = lambda: None
        self.quiet: set[Signal] = set()  # of those who wait until nothing runs
        self._odd, self._forget, self._dry, self._on_failure = odd, forget, dry, failed
        self._to_settle, self._done = to_settle, done
        self._spare = self._marked = False
        self._slice, self._slice_end = max(SLICE / workers, 1e-4), 0.0  # each of n workers may have one a turn
        self._alarm: asyncio.TimerHandle | None = None
        self.warn: Callable[[str], None] = lambda message: None
        self.goes_down: Callable[[], bool] = lambda: False  # whether everything is being cancelled, not one handler

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # every worker starts from a copy of this one
        for _ in range(self.workers):
            self._spawn()
        if self.timeout is not None:
            self._alarm = self._loop.call_later(self.timeout, self._check_timeouts)

    # -- a worker's life

    def work(self, slot: Slot) -> Coroutine[Any, Any, None]:
        """The coroutine of one worker; a crew of another kind has another."""
        return self._work(slot)

    def _spawn(self) -> None:
        slot = Slot(self.clock)
        self.slots.add(slot)
        context = self._context.copy()
        context.run(SLOT.set, slot)
        slot.task = Worker(self.work(slot), loop=self._loop, context=context)
        slot.task.slot = slot
        slot.task.add_done_callback(partial(self._ended, slot))

    def _ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)  # a bug here: the supervisor's matter
        elif slot in self.slots and not self.stopping:  # cancelled by somebody between two messages
            slot.spoiled = True
            self.retire(slot, slot.holds)
        self.slots.discard(slot)
        self.hush()

    async def _work(self, slot: Slot) -> None:
        ready, idle, call, clock, policy = self.ready, self.idle, self.call, self.clock, self.policy
        table, isolated, odd, forget = self.lanes.table, self.isolated, self._odd, self._forget
        take, keep, to_settle = ready.popleft, self._done.append, self._to_settle  # all live as long as the pump
        clean = clean_context()
        while True:
            while not ready:
                if self.stopping:
                    return
                await self.rest()
            if len(ready) > 1 and idle and not self._spare:
                self.wake()
            now = clock()
            while ready:
                message = take()
                lane = message.lane
                if lane is not None:
                    if lane in table:
                        self.lanes.park(lane, message)
                        continue
                    table[lane] = None
                while True:  # once; with lanes, again for each message parked behind this one
                    stays, following = False, None
                    if now > self.vouched:  # the process, or its loop, stood still: our timers are late
                        self.look()
                    if message.lost:
                        forget(message)
                    else:
                        slot.message = message
                        slot.started = now
                        try:
                            if isolated:
                                result = await apart(call, message, copy_context())
                            else:
                                result = await call(message)
                            outcome = ACK if result is None else policy.outcome(message, result)
                        except BaseException as error:
                            outcome = self.outcome_of(slot, message, error)
                        if outcome is ACK:
                            keep(Settlement(message, outcome))
                            if to_settle.waiter is not None:
                                to_settle.set()
                        else:
                            stays = odd(message, outcome)
                    if lane is not None and not stays and (parked := table.pop(lane, None)):
                        following = parked.popleft()  # the lane stays this worker's
                        table[lane] = parked
                    # Is this task as it was? The equality compares one pointer unless a variable was set.
                    try:
                        fit = copy_context() == clean and not slot.spoiled
                    except Exception:  # a value whose == fails
                        fit = False
                    if not fit:
                        return self.retire(slot, [following] if following is not None else [])
                    now = clock()  # serves two: the slice and the timeout
                    if now > self._slice_end:
                        if self._marked:  # the loop has not turned since this slice began
                            following = await self._pass(slot, following)
                        now = self._new_slice()
                    if following is None:
                        break
                    message = following
            slot.message = result = None
            del message  # a worker at rest keeps no body alive

    async def _pass(self, slot: Slot, following: Delivery | None) -> Delivery | None:
        """Let the loop turn once; what this worker was to do next is known to others meanwhile."""
        slot.message = None
        if following is None:
            await one_turn()
            return None
        slot.holds = holds = [following]
        await one_turn()
        slot.holds = []
        return following if holds else None

    async def rest(self) -> None:
        """Wait to be woken: there is nothing to do."""
        self._dry()
        self.hush()
        woken = Signal()
        self.idle.append(woken)
        try:
            await woken.wait()
            self._spare = False
        except asyncio.CancelledError:
            if woken in self.idle:
                self.idle.remove(woken)
            else:  # woken and cancelled at once: pass the wake on
                self._spare = False
                self.wake()
            raise

    def wake(self) -> None:
        """Wake one worker, the spare. Invariant: work ready and a worker idle means that a spare is on its way.

        Only an arrival (here) or a spare that starts (in the worker) can break it, so no message pays for a check.
        """
        while self.idle and self.ready and not self._spare:
            self._spare = self.idle.pop().set()

    def _new_slice(self) -> float:
        """A slice begins; `_unmark` runs at the loop's next turn. A handler that suspended let the loop turn, so its
        worker need not yield as well."""
        if not self._marked:
            self._marked = True
            self._loop.call_soon(self._unmark)
        now = self.clock()
        self._slice_end = now + self._slice
        return now

    def _unmark(self) -> None:
        self._marked = False

    def retire(self, slot: Slot, following: list[Delivery]) -> None:
        """This task is not as it was: replace it. `following` is what it would have begun next, in lanes of its own."""
        self.replaced += 1
        if not slot.spoiled and not self.isolated:
            self.isolated = True
            self.warn("the handler leaves context variables set; each of its messages gets a context of its own now")
        self.slots.discard(slot)
        self.give_back(following)
        if not self.stopping:
            self._spawn()

    def outcome_of(self, slot: Slot, message: Any, error: BaseException) -> Outcome:
        """The outcome of a handler that raised `error`."""
        if isinstance(error, asyncio.CancelledError):
            if slot.expired:
                error = self.timed_out()
                self.timeouts += 1
            elif slot.drained or self.goes_down():
                slot.spoiled = True
                return RELEASE  # unsettled: no acknowledgement, no failure, no attempt
        elif not isinstance(error, Exception):
            # It ends the app, by a drain. Raised from here, a SystemExit would end the loop and all that runs in it.
            slot.spoiled = True
            self._on_failure(error)
            if isinstance(error, KeyboardInterrupt):  # a terminal throws it at whoever runs
                return RELEASE
            # And it is a failure of its message: given back uncounted, that would end every process to come.
        elif slot.drained and not slot.expired and not isinstance(error, Outcome):
            return RELEASE  # the drain cancelled it, and a library made an error of its own of that
        return self.policy.outcome(message, error)

    def timed_out(self) -> TimeoutError:
        return TimeoutError(f"the handler ran longer than {self.timeout} s and was cancelled")

    # -- what is ready

    def arrive(self, batch: Sequence[Delivery]) -> None:
        """Put what was fetched behind everything else."""
        if self.shelf is not None:
            self.shelf.extend(batch)
            return
        self.ready.extend(batch)
        self.wake()

    def give_back(self, deliveries: list[Delivery]) -> None:
        """Give up the lanes of `deliveries`: they, and all behind them, are taken again, in order, before anything
        else."""
        if deliveries:
            self.front([*deliveries, *self.lanes.reopen(deliveries)])

    def front(self, deliveries: list[Delivery]) -> None:
        """Put deliveries before everything else that is ready. Once the crew ends they are left to the source."""
        if self.stopping:
            return
        if self.shelf is not None:
            self.shelf[:0] = deliveries
            return
        self.ready.extendleft(reversed(deliveries))
        self.wake()

    def hold(self, but: Callable[[Delivery], bool] | None = None) -> None:
        """Start nothing new: what is ready, parked or about to begin goes to the shelf, in order; except what matches
        `but`, which goes on, also from the shelf."""
        parked = self.lanes.take_parked()  # first: taking what has begun gives its lanes up
        waiting = [*self._take_begun(), *parked, *self.ready, *(self.shelf or ())]
        self.ready.clear()
        self.shelf = waiting if but is None else [delivery for delivery in waiting if not but(delivery)]
        if but is not None and len(self.shelf) < len(waiting):
            self.ready.extend(delivery for delivery in waiting if but(delivery))
            self.wake()

    def _take_begun(self) -> list[Delivery]:
        """Take what workers are about to begin away from them, and give up its lanes (nothing is parked in them)."""
        begun: list[Delivery] = []
        for slot in self.slots:
            begun += slot.holds
            slot.holds.clear()
        self.lanes.reopen(begun)
        return begun

    def unhold(self, drop: Callable[[Delivery], bool] | None = None) -> int:
        """Go on with what is on the shelf, except what matches `drop`; return how many did."""
        # What was parked since: behind what was tried again, so before the shelf's own of that lane.
        shelf, self.shelf = [*self.lanes.take_parked(), *(self.shelf or ())], None
        kept = shelf if drop is None else [delivery for delivery in shelf if not drop(delivery)]
        self.front(kept)
        return len(shelf) - len(kept)

    def lose(self, gone: Callable[[Delivery], bool]) -> None:
        """Mark what runs and matches: it moved elsewhere."""
        for slot in self.slots:
            for message in slot.messages:
                if gone(message):
                    message.lost = True

    @property
    def hungry(self) -> bool:
        """Whether a worker has nothing to do."""
        return bool(self.idle)

    @property
    def running(self) -> int:
        return sum(slot.busy for slot in self.slots)

    def hush(self) -> None:
        """Tell who waits for it that nothing runs (see `Pump.quiesce`)."""
        if self.quiet and not self.running:
            for waiting in self.quiet:
                waiting.set()

    # -- timeout: one timer a pump. It sleeps until the oldest running handler could expire.

    def _check_timeouts(self) -> None:
        """Exact, not a wheel of ticks: what starts after this scan cannot expire before now + timeout."""
        assert self.timeout is not None
        now, timeout = self.clock(), self.timeout
        following = now + timeout
        for slot in self.slots:
            if slot.message is not None and not slot.expired and not slot.drained:
                expires = slot.started + timeout
                if expires <= now:
                    slot.expired = slot.for_good = True
                    slot.task.cancel()
                elif expires < following:
                    following = expires
        self._alarm = self._loop.call_later(following - now, self._check_timeouts)

    # -- the end

    def abandon(self) -> None:
        """Begin nothing more: what has not begun is left to the source, which gives it back when it closes."""
        self.stopping = True
        self.shelf = None
        self.ready.clear()
        self.lanes.take_parked()
        self.lanes.cancel(lambda delivery: True)
        self._take_begun()

    async def end(self, deadline: float) -> None:
        """Let what runs finish until `deadline` (of the loop's clock), then cancel it. Needs `abandon` first.

        A thread cannot be cancelled, and its delivery must not go to others while it runs: it is waited for, however
        long it takes. With `leave_threads` it is left behind after `GRACE`; then `stuck` is true, and the source must
        not be closed, because that would give the delivery back.
        """
        while self.idle:
            self.idle.pop().set()
        late: set[asyncio.Task[None]] = {slot.task for slot in self.slots}
        if late:
            _, late = await asyncio.wait(late, timeout=max(0.0, deadline - self._loop.time()))
        told = -math.inf
        while late:  # a handler may swallow one cancellation; it is told again
            for slot in self.slots:
                slot.drained = slot.for_good = True
                slot.task.cancel(DRAIN)
            in_threads = [slot for slot in self.slots if slot.in_thread]
            now = self._loop.time()
            if in_threads and now >= told + REMIND:
                told = now
                self._tell_of_threads(in_threads)
            _, late = await asyncio.wait(late, timeout=1.0)
            if late and self._loop.time() > deadline + GRACE and self._leave(late):
                break
        if self._alarm is not None:
            self._alarm.cancel()

    def _tell_of_threads(self, slots: list[Slot]) -> None:
        ids = ", ".join(slot.shown_ids(3) for slot in slots)
        self.warn(
            f"the time to drain is over, and {len(slots)} handlers still run in threads, which cannot be cancelled: "
            f"messages {ids}"
        )

    def _leave(self, late: set[asyncio.Task[None]]) -> bool:
        """What to do about those that do not end: True to leave them behind."""
        in_threads = late & {slot.task for slot in self.slots if slot.in_thread}
        stubborn = len(late - in_threads)
        if stubborn and not self._told_stubborn:
            self._told_stubborn = True
            self.warn(f"{stubborn} handlers do not end when they are cancelled; they are left behind")
        self.stuck = self.leave_threads and bool(in_threads)
        return self.stuck or not in_threads
