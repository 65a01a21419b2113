"""`TestApp`: the app as it goes to production, run in process by a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from streamfw.app import App
from streamfw.errors import NotRunning, Unsupported
from streamfw.message import Message, Outgoing
from streamfw.outcome import Outcome
from streamfw.outlet import PublishOptions
from streamfw.runtime.crew import Crew
from streamfw.runtime.plan import Plan
from streamfw.runtime.pump import Pump

from ._clock import SLACK, VirtualClock
from ._failures import Failures
from ._lent import StateGiven, bind_state, lent, not_in_memory
from ._memory import StandIn, TransactionFactory
from ._observations import Observations
from ._records import Entry, Outbox, Watched
from ._work import Expected, Work

__all__ = ["TestApp"]

E = TypeVar("E", bound=Exception)
DRAIN = 1.0  # seconds that handlers have to end when the test is over


class TestApp(Observations):
    """Runs `app` in process for a test, with memory in the place of all its brokers.

        async with TestApp(app) as tb:
            await tb.publish("orders", Order(1, "tea"))
            await tb.settle()
            tb.assert_acked(ship, times=1)

    - `live`: run on the app's own brokers instead, with the same test body. Time is real then, in `advance` too.
    - `state`: what handlers take as `State`; the app's lifespan is not run. A sequence is looked through by type, as
      what a lifespan yields; a mapping says which type each value stands for: ``state={Pool: FakePool()}``.
    - `transaction`: for ``transactional=True``, which memory does not have: a function that gives an async context
      manager, which yields what the handler takes as its transaction; left with an error where it is to roll back.
    - `raise_errors`: whether `settle`, `advance` and the end of the context raise what handlers raised.
    - `timeout`: seconds of real time that `settle` and `advance` may take.

    Enter it once; make another for another run. The app is afterwards as it was before. Leaving gives handlers one
    second to end, raises errors of handlers that the test has not seen, and the error that ended the app, if one did.
    Entering raises what `App.build` raises.
    """

    __test__ = False  # for pytest: no test class, whatever its name

    def __init__(
        self,
        app: App,
        *,
        live: bool = False,
        state: StateGiven | None = None,
        transaction: TransactionFactory | None = None,
        raise_errors: bool = True,
        timeout: float = 10.0,
    ) -> None:
        if live and transaction is not None:
            raise ValueError("transaction= is for memory; with live=True the broker has its own")
        super().__init__(app)
        self._live, self._state, self._transaction, self._timeout = live, state, transaction, timeout
        self._failures = Failures(raise_errors)
        self._stack = ExitStack()
        self._runner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stand_ins: dict[str, StandIn] = {}
        self._clock: VirtualClock | None = None
        self._entered = False
        self._told: BaseException | None = None  # the app's failure, once it was raised

    # -- life

    async def __aenter__(self) -> Self:
        if self._entered:
            raise NotRunning("a TestApp is entered once; make another one for another run")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise Unsupported(
                "a TestApp runs on asyncio; with anyio's pytest plugin: anyio_backend = 'asyncio'"
            ) from None
        self._entered = True
        with ExitStack() as stack:
            if not self._live:
                self._clock = VirtualClock.of(loop)
                if self._clock is not None:
                    stack.callback(self._clock.give_up)
            self._borrow(stack)
            self._prepare()
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            failure = await self._end()
        if error is not None:
            for one in (*self._failures.take(), *([failure] if failure not in (None, error) else ())):
                if one is not error:
                    error.add_note("\n".join([f"meanwhile: {one!r}", *getattr(one, "__notes__", ())]))
            return
        if failure is not None:
            raise failure
        self._failures.raise_pending()

    def _borrow(self, stack: ExitStack) -> None:
        """Take the app, on memory unless `live`."""
        brokers = None if self._live else self._make_stand_ins
        stack.enter_context(
            lent(self.app, brokers, self._state, self._watch_connection, drain_timeout=DRAIN, wait=self._timeout)
        )

    def _make_stand_ins(self, names: Iterable[str]) -> dict[str, StandIn]:
        clock = self._clock.time if self._clock is not None else None
        self._stand_ins = {name: StandIn(name, clock, self._transaction) for name in names}
        return self._stand_ins

    def _prepare(self) -> None:
        """Build the app, and put its subscribers under observation."""
        built = self.app.build()
        if not self._live:
            not_in_memory(built.subscribers)
        if self._state is not None:
            bind_state(built, self._state)
        self._watched = [Watched(one, self._on_error, self._on_end) for one in built.subscribers]
        for one in self._watched:
            one.built.make_plan = self._watching(one, one.built.make_plan)
        self._expected = Expected(self._watched)
        asides = {(one.built.broker, one.built.subscription.dead_letter) for one in self._watched}
        self._outbox = Outbox(self._on_sending, self._on_refused, asides)
        self._work = Work(self._watched, self._outbox, self._ready, self._check, self._clock)

    def _watching(self, one: Watched, make_plan: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
        def make_watched_plan(source: Any) -> Plan:
            plan = make_plan(source)
            plan.call, plan.policy = one.call(plan.call), one.policy(plan.policy)
            if self._clock is not None:
                plan.clock = self._clock.time
            return plan

        return make_watched_plan

    async def _start(self) -> None:
        """Run the app in a task of its own: a fixture may be left in another than it was entered in."""
        started = asyncio.get_running_loop().create_future()
        self._runner = runner = asyncio.create_task(self._run(started), name="TestApp")
        try:
            await asyncio.wait({runner, started}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end(at_once=True)
            raise
        if runner.done():
            runner.result()
            raise AssertionError("the app ended before it had started")

    async def _run(self, started: asyncio.Future[None]) -> None:
        async with self.app.running():
            started.set_result(None)
            await self._stop.wait()

    async def _end(self, at_once: bool = False) -> BaseException | None:
        """End the app; return the error that ended it, unless the test knows it."""
        runner, cancelled = self._runner, False
        assert runner is not None
        self._stop.set()
        if at_once:
            runner.cancel()
        while not runner.done():
            try:
                await asyncio.wait({runner})
            except asyncio.CancelledError:
                cancelled = True
                runner.cancel()
        if cancelled:
            raise asyncio.CancelledError
        failure = None if runner.cancelled() else runner.exception()
        return failure if failure is not self._told else None

    # -- what it is told

    def _watch_connection(self, broker: str, connection: Any) -> None:
        self._outbox.watch(broker, connection)

    def _on_sending(self, broker: str, message: Outgoing) -> None:
        if self._live:
            self._expected.sending(broker, message)

    def _on_refused(self, broker: str, message: Outgoing) -> None:
        if self._live:
            self._expected.refused(broker, message)

    def _on_end(self, one: Watched, message: Message, outcome: Outcome) -> None:
        if self._live:
            self._expected.ended(one, message, outcome)

    def _on_error(self, one: Watched, entry: Entry, error: Exception) -> None:
        message = entry.message
        outcome = f"; the outcome is {entry.outcome!r}" if entry.outcome is not None else ""
        self._failures.add(
            error, f"in {one.where}, with message {message.message_id}, attempt {message.attempt}{outcome}"
        )

    def _ready(self) -> Iterable[str]:
        """What brokers have that somebody could take now."""
        if self._live:
            return self._expected.missing()
        return [
            f"{one.where} has messages ready at its broker"
            for one in self._watched
            if self._stand_ins[one.built.broker].ready(one.built.subscription)
            and one.pump.lanes.held < one.pump.plan.held
        ]

    def _check(self) -> None:
        """Raise what ended the app."""
        if self._runner is None:
            raise NotRunning("this TestApp is not entered: async with TestApp(app) as tb")
        failure = self.app.failure
        if self._runner.done():
            failure = None if self._runner.cancelled() else self._runner.exception()
        if failure is not None:
            self._told = failure
            raise failure
        if self._runner.done():
            raise NotRunning("this TestApp was left: nothing runs any more")

    # -- what a test does

    async def publish(
        self, name: str, payload: object, *, broker: str = "default", **options: Unpack[PublishOptions]
    ) -> str:
        """Publish as `App.publish` does, and return the message id. What follows is awaited with `settle`."""
        self._check()
        return await self.app.publish(name, payload, broker=broker, **options)

    async def settle(self, timeout: float | None = None) -> None:
        """Wait until nothing is in work, ready, or on its way: everything that was published, and what followed of it.

        What waits for its time (a delayed message, a retry's pause) is not waited for: that is `advance`. A batch that
        is not full is handed over without its wait. Of a task that a handler started and did not await nobody knows.

        Raises what handlers raised (several: an `ExceptionGroup`), `NotSettled` after `timeout` seconds of real time,
        and the error that ended the app.
        """
        await self._until(self._work_of().until_settled(self._timeout if timeout is None else timeout))

    async def advance(self, seconds: float, timeout: float | None = None) -> None:
        """Let so many seconds pass: retries, delays, handlers' timeouts and their ``asyncio.sleep`` come due one after
        another, each with all that follows of it, in no time.

        It stops at the first error that a handler raises, and raises it. A handler that waits for something else than
        time (a database, a thread) has a tenth of a second for it before the clock moves on. Raises what `settle` does;
        `Unsupported` on uvloop, whose clock nobody can set. With ``live=True`` the time really passes; it must be less
        than `timeout`.
        """
        if not seconds >= 0:
            raise ValueError(f"advance({seconds!r}): seconds, zero or more")
        bound = self._timeout if timeout is None else timeout
        work = self._work_of()
        if self._live:
            if seconds >= bound:
                raise ValueError(
                    f"advance({seconds:g}) with live=True really takes so long, and timeout is {bound:g} s: let the "
                    "pauses be shorter in this test, or give it more time with timeout="
                )
            await asyncio.sleep(seconds)
            await self._until(work.until_settled(bound))
            return
        if self._clock is None:
            loop = type(asyncio.get_running_loop()).__module__
            raise Unsupported(
                f"advance() moves the clock of asyncio's own event loop, and that of {loop} cannot be moved: run this "
                "test on asyncio.new_event_loop()"
            )
        await self._until(self._advance(work, self._clock, seconds, bound))

    async def _advance(self, work: Work, clock: VirtualClock, seconds: float, bound: float) -> None:
        """From timer to timer, and quiet between them; ends early when a handler failed."""
        deadline = time.monotonic() + bound
        with clock.standing():
            began = clock.time()
            end = began + seconds
            while True:
                now = clock.time()
                what = f"advance({seconds:g}) came to {now - began:g} s in {bound:g} s of real time (timeout=)"
                await work.until_quiet(deadline, what)
                if now >= end or self._failures.pending:
                    return
                if time.monotonic() > deadline:
                    raise work.not_settled(what)
                due = clock.next_timer(_is_idle)
                if due is None or due > end + SLACK:
                    clock.move_to(end)
                else:
                    end += clock.move_past(due)  # what follows of it is later by as much

    async def _until(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Await it, and raise what handlers raised meanwhile, before or rather than that it did not end."""
        try:
            await waiting
        except Exception as error:
            for one in self._failures.take():
                error.add_note("\n".join([f"meanwhile: {one!r}", *getattr(one, "__notes__", ())]))
            raise
        self._failures.raise_pending()

    def _work_of(self) -> Work:
        self._check()
        return self._work

    def expect(
        self, kinds: type[E] | tuple[type[E], ...], *, match: str | None = None
    ) -> AbstractContextManager[list[Exception]]:
        """Errors of these kinds that handlers raise within the block are expected: nothing raises them. The block gets
        a list of them. Raises `AssertionError` at its end when there was none (whose text `match` is found in)."""
        return self._failures.expect(kinds, match)


def _is_idle(callback: Any) -> bool:
    """Whether this timer of ours does nothing now: it comes again and again, and falls due with the next that does."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, Crew):
        return callback.__name__ == "_check_timeouts" and not owner.running
    return isinstance(owner, Pump) and callback.__name__ == "_tick"
