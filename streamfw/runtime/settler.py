"""What is finished goes back to the source, in groups.

Theory of operation
    Workers append to one list; one task takes all there is and settles it in one round trip, while the next group
    gathers. An idle subscriber settles at once. While workers are busy, a *small* group waits eight times what the last
    settlement took (at most 20 ms), ended when a worker runs dry: otherwise one worker with a 100 us handler would
    commit once a message.

    A source that cannot be reached keeps the group: it is settled again after a pause, for nothing of it counts. What
    the source cannot do itself with a dead letter, `bury` does: publish, confirmed, then acknowledge. Its lane goes on
    meanwhile, as it does when the source does it. It is tried again for as long as that may help; what the broker says
    it cannot take, or a server that refuses us, stays so until a person acts, so nothing waits for it: neither a drain
    nor a source that wants everything settled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from streamfw.broker import Delivery, Settlement, Source
from streamfw.errors import BrokerError, PublishError, Rejected, SettleError
from streamfw.outcome import ACK, Ack, DeadLetter
from streamfw.texts import one_line

from .signal import Signal

__all__ = ["Settler", "backoff"]

PACE = 8.0  # times the last settlement's duration
MOST_PACE = 0.02  # seconds
BURIED = Ack()  # ends the original of a dead letter: no handler acknowledged it, so it is not counted as that


def backoff(attempt: int) -> float:
    """Seconds before trying a server again: full jitter, 0.1 s doubling to 30 s."""
    return random.uniform(0.0, min(30.0, 0.1 * 2.0 ** min(attempt, 12))) + 0.01


def _stays(error: BaseException | None) -> bool:
    """Whether an error will stay the same until a person acts: of the message itself, or of the connection."""
    if isinstance(error, Rejected):
        return True
    cause = error.__cause__ if isinstance(error, PublishError) else error
    return isinstance(cause, BrokerError) and not cause.transient


class Settler:
    """Settles what is in `done`. `settled` is called with how many ended; `may_wait` tells whether a group of that
    size is small and every worker busy."""

    def __init__(
        self,
        done: list[Settlement],
        to_settle: Signal,
        *,
        settled: Callable[[int, int], None],
        errors: Callable[[Sequence[SettleError], int], None],
        may_wait: Callable[[int], bool],
        dead_letter: Callable[[Delivery, DeadLetter], Awaitable[None]] | None,
        trouble: Callable[[str, BaseException | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._done, self._to_settle, self._nap, self._retry = done, to_settle, Signal(), Signal()
        self._settled, self._errors, self._may_wait = settled, errors, may_wait
        self._dead_letter, self._trouble = dead_letter, trouble
        self._clock = clock  # not the loop's: uvloop counts in milliseconds, and a settlement takes less
        self._drained = False
        self._burials: set[asyncio.Task[None]] = set()
        self._refused: set[asyncio.Task[None]] = set()  # of them, those that nobody waits for
        self._ending = asyncio.Event()
        self.groups = 0
        self.odd = 0  # of those in `done`, how many are no acknowledgements of handled messages
        self.give_up_at: float | None = None
        self._settling = False
        self.rested: set[Signal] = set()  # of those who wait until nothing is left to settle

    @property
    def busy(self) -> bool:
        """Whether something that ended is not settled yet."""
        return self._settling or bool(self._done) or len(self._burials) > len(self._refused)

    def hurry(self) -> None:
        """A worker ran dry: what is finished may be what keeps the prefetch full."""
        if self._nap.waiter is not None:
            self._nap.set()

    async def run(self, source: Source) -> None:
        done, clock = self._done, self._clock
        rest_until = 0.0
        while True:
            if not done:
                self._settling = False
                self._look_up()
                if self._drained:
                    return
                await self._to_settle.wait()
                continue
            hurried = self._drained or self.rested
            if not hurried and self._may_wait(len(done)) and (rest := rest_until - clock()) > 0:
                await self._nap.wait_for(rest)
            group = done[:]
            done.clear()  # the same list for ever: workers hold its append
            self._settling = True
            odd, self.odd = self.odd, 0
            began = clock()
            if not await self._settle(source, group, odd):
                return
            now = clock()
            rest_until = now + min(MOST_PACE, PACE * (now - began))

    async def _settle(self, source: Source, group: list[Settlement], odd: int) -> bool:
        attempt = 0
        while True:
            try:
                errors = await source.settle(group)
            except BrokerError as error:
                if not error.transient:
                    raise
                self._trouble("settling", error)
                if not await self._pause(attempt):
                    return False
                attempt += 1
                continue
            if attempt:
                self._trouble("settling", None)
            self.groups += 1
            if errors:
                failed = {id(error.delivery) for error in errors}
                self._errors(errors, sum(s.outcome is ACK and id(s.delivery) in failed for s in group))
            self._settling = False
            self._settled(len(group), odd)
            return True

    async def _pause(self, attempt: int) -> bool:
        """Wait before another attempt; False when there is no time left for one."""
        pause = backoff(attempt)
        if self.give_up_at is not None and asyncio.get_running_loop().time() + pause > self.give_up_at:
            return False
        await self._retry.wait_for(pause)
        return True

    def _look_up(self) -> None:
        for signal in self.rested:
            signal.set()

    def bury(self, delivery: Delivery, outcome: DeadLetter) -> None:
        """Publish a dead letter and then end the original: for sources that cannot do both in one step."""
        task = asyncio.get_running_loop().create_task(self._bury(delivery, outcome))
        self._burials.add(task)
        task.add_done_callback(self._buried)

    def _buried(self, task: asyncio.Task[None]) -> None:
        self._burials.discard(task)
        self._refused.discard(task)

    async def _bury(self, delivery: Delivery, outcome: DeadLetter) -> None:
        assert self._dead_letter is not None
        task = asyncio.current_task()
        assert task is not None
        trouble = f"the dead letter of message {one_line(delivery.message_id)}"
        attempt = 0
        while True:
            try:
                await self._dead_letter(delivery, outcome)
                break
            except Exception as error:  # whatever the publish raises: the original stays until it is confirmed
                self._trouble(trouble, error)
                if _stays(error):
                    if self._ending.is_set():
                        return
                    self._refused.add(task)
                    self._look_up()
                else:
                    self._refused.discard(task)
                await self._rest(attempt)
                attempt += 1
        self._refused.discard(task)
        if attempt:
            self._trouble(trouble, None)
        self._done.append(Settlement(delivery, BURIED))
        self.odd += 1
        self._to_settle.set()

    async def _rest(self, attempt: int) -> None:
        """The pause before a dead letter is tried again. A drain ends it: there is little time."""
        pause = backoff(attempt)
        if self._ending.is_set():
            await asyncio.sleep(pause)
            return
        try:
            async with asyncio.timeout(pause):
                await self._ending.wait()
        except TimeoutError:
            pass

    async def drain(self, deadline: float) -> None:
        """Settle what is left; give up at `deadline` (of the loop's clock)."""
        loop = asyncio.get_running_loop()
        self._ending.set()
        if self._burials:
            _, late = await asyncio.wait(self._burials, timeout=max(0.0, deadline - loop.time()))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        # Said, not inferred from the workers: their last callbacks may not have run yet.
        self._drained = True
        self.give_up_at = deadline
        self._to_settle.set()
        self._nap.set()
        self._retry.set()
