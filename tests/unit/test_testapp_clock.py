"""TestApp's virtual clock: what `advance` makes due, in which order, and what it leaves to real time.

These tests run on asyncio's own event loop, whatever loop the others run on: no other has a clock that can be moved.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, ParamSpec

import pytest

from streamfw import App, Attempt, Backoff, Batch, Publisher, Retry, Unsupported, subscriber
from streamfw.testing import NotSettled, TestApp
from streamfw.testing._clock import SLACK
from tests.helpers import eventually

P = ParamSpec("P")

HOUR = 3600.0
"""Seconds. Real time flows between two advances, so what tests do with the clock is in hours: they do not take one."""


def on_asyncio(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test on a loop of asyncio's own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(main())

    return run


class Boom(Exception):
    pass


class Log:
    """Who did what, and when of the loop's clock, from its making on: in hours, to a tenth."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.entries: list[tuple[str, float]] = []

    def __call__(self, what: object) -> None:
        self.entries.append((str(what), round((self._loop.time() - self._began) / HOUR, 1)))


# ------------------------------------------------------------------ what comes due


@on_asyncio
async def test_retries_with_growing_pauses_come_in_one_advance() -> None:
    log = Log()

    @subscriber("orders", attempts=5, backoff=Backoff(first=HOUR, factor=2, max=24 * HOUR, jitter=False))
    async def ship(number: int, attempt: Annotated[int, Attempt]) -> None:
        log(attempt)
        raise Boom

    async with TestApp(App(ship)) as tb:
        with tb.expect(Boom) as errors:
            await tb.publish("orders", 1)
            await tb.settle()
            tb.assert_retried(ship, times=1)
            await tb.advance(0.9 * HOUR)
            tb.assert_retried(ship, times=1)
            await tb.advance(6.1 * HOUR)  # 1 + 2 + 4 in all
            tb.assert_retried(ship, times=4)
            assert tb.dead_letters("orders") == []
            await tb.advance(8 * HOUR)
        assert log.entries == [("1", 0.0), ("2", 1.0), ("3", 3.0), ("4", 7.0), ("5", 15.0)]
        tb.assert_dead_lettered(ship, times=1, reason="Boom")
        assert len(errors) == 5 and [one.message.attempt for one in tb.received(ship)] == [1, 2, 3, 4, 5]


@on_asyncio
async def test_exactly_the_sum_of_the_pauses_is_enough() -> None:
    @subscriber("orders", backoff=Backoff(first=0.1, factor=1.3, jitter=False))
    async def ship(number: int, attempt: Annotated[int, Attempt]) -> None:
        if attempt < 20:
            raise Retry()

    async with TestApp(App(ship)) as tb:
        await tb.publish("orders", 1)
        await tb.settle()
        await tb.advance(sum(0.1 * 1.3**n for n in range(19)))
        tb.assert_acked(ship, times=1)


@on_asyncio
async def test_delayed_messages_come_in_the_order_of_their_time() -> None:
    log = Log()

    @subscriber("orders")
    async def ship(delay: float) -> None:
        log(delay)

    async with TestApp(App(ship)) as tb:
        for delay in (10.0, 2.0, 0.5):
            await tb.publish("orders", delay, delay=delay * HOUR)
        await tb.settle()
        assert log.entries == []
        await tb.advance(24 * HOUR)
        assert log.entries == [("0.5", 0.5), ("2.0", 2.0), ("10.0", 10.0)]
        assert [one.message.delay for one in tb.published("orders")] == [10 * HOUR, 2 * HOUR, 0.5 * HOUR]


@on_asyncio
async def test_a_cascade_of_delays_is_one_advance() -> None:
    log = Log()

    @subscriber("ticks")
    async def tick(count: int, again: Annotated[Publisher[int], "ticks"]) -> None:
        log(count)
        await again.publish(count + 1, delay=HOUR)

    async with TestApp(App(tick)) as tb:
        await tb.publish("ticks", 0)
        await tb.settle()
        await tb.advance(5 * HOUR)
        assert log.entries == [(str(n), float(n)) for n in range(6)]


@on_asyncio
async def test_handlers_sleep_and_time_out_on_the_virtual_clock() -> None:
    log = Log()

    @subscriber("sleeps", workers=3)
    async def sleeps(hours: float) -> None:
        await asyncio.sleep(hours * HOUR)
        log(hours)

    @subscriber("waits", timeout=3 * HOUR, attempts=2, backoff=Backoff(first=HOUR, max=HOUR, jitter=False))
    async def waits(number: int) -> None:
        log("begins")
        await asyncio.Event().wait()

    @subscriber("bounded", attempts=1)
    async def bounded(number: int) -> None:
        async with asyncio.timeout(10 * HOUR):
            await asyncio.Event().wait()

    async with TestApp(App(sleeps, waits, bounded)) as tb:
        for hours in (5, 2, 0.5):
            await tb.publish("sleeps", hours)
        await tb.publish("waits", 1)
        await tb.publish("bounded", 1)
        with tb.expect(TimeoutError) as errors:
            await tb.advance(12 * HOUR)
        assert log.entries == [
            ("begins", 0.0), ("0.5", 0.5), ("2.0", 2.0), ("begins", 4.0), ("5.0", 5.0)
        ]  # fmt: skip
        tb.assert_acked(sleeps, times=3)
        tb.assert_dead_lettered(waits, times=1, reason="longer than 10800.0 s")
        tb.assert_dead_lettered(bounded, times=1)
        assert len(errors) == 3
        assert isinstance(errors[0].__cause__, asyncio.CancelledError)  # and its traceback is the handler's
        await tb.settle()


@on_asyncio
async def test_a_task_for_each_message_sleeps_too() -> None:
    @subscriber("sleeps", task_per_message=True)
    async def sleeps(seconds: float) -> None:
        await asyncio.sleep(seconds)

    async with TestApp(App(sleeps)) as tb:
        await tb.publish("sleeps", 1000)
        await tb.advance(1000)
        tb.assert_acked(sleeps, times=1)


@on_asyncio
async def test_lanes_wait_for_their_retries_and_others_do_not() -> None:
    done: list[str] = []

    @subscriber("orders", ordered_by="key", workers=4, backoff=Backoff(first=HOUR, max=2 * HOUR, jitter=False))
    async def ship(name: str, attempt: Annotated[int, Attempt]) -> None:
        if name == "a1" and attempt < 3:
            raise Boom
        done.append(name)

    async with TestApp(App(ship)) as tb:
        with tb.expect(Boom):
            for name in ("a1", "a2", "b1", "a3", "b2"):
                await tb.publish("orders", name, key=name[0])
            await tb.settle()
            assert done == ["b1", "b2"]
            await tb.advance(HOUR)
            assert done == ["b1", "b2"]
            await tb.advance(2 * HOUR)
        assert done == ["b1", "b2", "a1", "a2", "a3"]
        assert [one.message.attempt for one in tb.received(ship) if one.value == "a1"] == [1, 2, 3]


def test_whoever_is_due_comes_whatever_the_floats() -> None:
    """The sum of a time and what is left until another may be a little less than that: the timer was early then."""
    chance = random.Random(7)
    seen: list[int] = []

    @subscriber("orders")
    async def ship(number: int) -> None:
        seen.append(number)

    async def passes(long: float) -> None:
        seen.clear()
        async with TestApp(App(ship)) as tb:
            for number, delay in enumerate((HOUR, long)):
                await tb.publish("orders", number, delay=delay)
            await tb.advance(long + 1.0)
        assert seen == [0, 1], long

    for _ in range(100):  # a new loop each, whose clock does not stand so far ahead yet that sums are exact
        asyncio.run(passes(chance.uniform(50.0, 5000.0) * HOUR))


@on_asyncio
async def test_a_batch_waits_for_more_while_time_passes() -> None:
    batches: list[list[int]] = []

    @subscriber("orders", batch=Batch(3, wait=10 * HOUR))
    async def ship(numbers: list[int]) -> None:
        batches.append(numbers)

    @subscriber("clock")
    async def clock(number: int, orders: Annotated[Publisher[int], "orders"]) -> None:
        await orders.publish(number)

    async with TestApp(App(ship, clock)) as tb:
        for number, delay in enumerate((0, 4, 20, 21, 22, 100)):
            await tb.publish("clock", number, delay=delay * HOUR)
        await tb.advance(9.9 * HOUR)
        assert batches == []
        await tb.advance(190.1 * HOUR)
        assert batches == [[0, 1], [2, 3, 4], [5]]
        await tb.publish("orders", 6)
        await tb.settle()
        assert batches[3:] == [[6]]


@on_asyncio
async def test_the_first_error_ends_an_advance() -> None:
    @subscriber("orders", backoff=Backoff(first=1, factor=1, jitter=False))
    async def ship(number: int) -> None:
        raise Boom

    async with TestApp(App(ship)) as tb:
        await tb.publish("orders", 1)
        with pytest.raises(Boom):
            await tb.settle()
        with pytest.raises(Boom):
            await tb.advance(86400)
        tb.assert_retried(ship, times=2)


@on_asyncio
async def test_two_apps_share_the_clock_of_their_loop() -> None:
    log = Log()

    def app() -> App:
        @subscriber("orders")
        async def ship(number: int) -> None:
            log(number)

        return App(ship)

    async with TestApp(app()) as first, TestApp(app()) as second:
        await first.publish("orders", 1, delay=HOUR)
        await second.publish("orders", 2, delay=2 * HOUR)
        await first.advance(1.5 * HOUR)
        assert log.entries == [("1", 1.0)]
        await second.advance(1.5 * HOUR)
        assert log.entries == [("1", 1.0), ("2", 2.0)]


# ------------------------------------------------------------------ what it is not for


@on_asyncio
async def test_real_time_flows_between_advances() -> None:
    loop = asyncio.get_running_loop()

    @subscriber("orders")
    async def ship(number: int) -> None:
        await asyncio.sleep(0.05)

    async with TestApp(App(ship)) as tb:
        await tb.advance(1000)
        real, began = time.monotonic(), loop.time()
        await tb.publish("orders", 1)
        await tb.settle()
        tb.assert_acked(ship, times=1)
        passed = loop.time() - began
        assert 0.05 - SLACK <= passed <= time.monotonic() - real + SLACK


@on_asyncio
async def test_what_is_not_time_is_given_a_moment() -> None:
    """A query, a thread: the clock does not run past them at once, so that their timeouts do not expire."""

    @subscriber("orders", timeout=5, attempts=1)
    async def ship(number: int) -> None:
        await asyncio.to_thread(time.sleep, 0.02)

    async with TestApp(App(ship)) as tb:
        await tb.publish("orders", 1)
        await tb.advance(60)
        tb.assert_acked(ship, times=1)


@on_asyncio
async def test_an_advance_that_cannot_end_says_why() -> None:
    @subscriber("orders", backoff=Backoff(first=0, jitter=False))
    async def ship(number: int) -> None:
        raise Retry()

    @subscriber("minutes")
    async def minutes(number: int, again: Annotated[Publisher[int], "minutes"]) -> None:
        await again.publish(number, delay=1e-4)

    async with TestApp(App(ship, minutes)) as tb:
        await tb.publish("minutes", 1)
        with pytest.raises(NotSettled, match=r"advance\(1000\) came to .* s in 0.1 s of real time"):
            await tb.advance(1000, timeout=0.1)
        await tb.publish("orders", 1)
        with pytest.raises(NotSettled, match="ship"):
            await tb.settle(timeout=0.05)
        with pytest.raises(ValueError, match="zero or more"):
            await tb.advance(-1)


@on_asyncio
async def test_one_advance_at_a_time() -> None:
    async with TestApp(App()) as tb:
        results = await asyncio.gather(tb.advance(1), tb.advance(1), return_exceptions=True)
        assert results[0] is None and isinstance(results[1], Unsupported)


@on_asyncio
async def test_a_sleeping_handler_is_told_from_a_stuck_one() -> None:
    @subscriber("orders")
    async def ship(number: int) -> None:
        await asyncio.sleep(3600)

    async with TestApp(App(ship)) as tb:
        await tb.publish("orders", 1)
        with pytest.raises(NotSettled, match=r"asleep: `await tb\.advance"):
            await tb.settle(timeout=0.05)


@on_asyncio
async def test_the_loop_has_its_own_clock_back() -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    async with TestApp(App()) as tb:
        assert "time" in vars(loop)
    assert "time" not in vars(loop)
    async with TestApp(App()) as tb:
        await tb.advance(1000)
    assert loop.time() >= before + 1000  # it never goes back: there may be timers
    real, began = time.monotonic(), loop.time()
    await asyncio.sleep(0.01)
    passed = loop.time() - began
    assert 0.01 - SLACK <= passed <= time.monotonic() - real + SLACK
    async with TestApp(App()) as tb:
        await tb.advance(1000)
    assert loop.time() >= before + 2000


def test_another_loop_has_a_clock_that_cannot_be_moved() -> None:
    import uvloop

    @subscriber("orders")
    async def ship(number: int) -> None: ...

    async def main() -> None:
        async with TestApp(App(ship)) as tb:
            await tb.publish("orders", 1)
            await tb.settle()
            tb.assert_acked(ship, times=1)
            with pytest.raises(Unsupported, match="uvloop cannot be moved"):
                await tb.advance(1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# ------------------------------------------------------------------ live


@asynccontextmanager
async def live(app: App, timeout: float = 10.0) -> AsyncIterator[TestApp]:
    async with TestApp(app, live=True, timeout=timeout) as tb:
        yield tb


async def test_live_on_memory_runs_the_same_body_in_real_time() -> None:
    @subscriber("orders", publishes="receipts", attempts=2, backoff=Backoff(first=0.05, jitter=False))
    async def ship(number: int, attempt: Annotated[int, Attempt]) -> int:
        if number == 2 and attempt == 1:
            raise Boom
        return number

    @subscriber("receipts", batch=Batch(10, wait=60))
    async def archive(numbers: list[int]) -> None: ...

    app = App(ship, archive, brokers={"default": "memory://live"})
    broker = app.broker()
    async with live(app) as tb:
        assert app.broker() is broker
        await tb.publish("orders", 1)
        await tb.settle()
        tb.assert_acked(archive, times=1)
        with tb.expect(Boom):
            await tb.publish("orders", 2)
            await tb.publish("orders", 3, delay=0.05)
            await tb.settle()
            tb.assert_retried(ship, times=1)
            await tb.advance(0.1)
        assert sorted(one.value for one in tb.assert_acked(ship, times=3)) == [1, 2, 3]
        tb.assert_acked(archive, times=3)
        with pytest.raises(ValueError, match="really takes so long"):
            await tb.advance(3600)


async def test_live_settling_waits_for_what_was_published_and_says_what_has_not_come() -> None:
    @subscriber("orders", prefetch=1)
    async def ship(number: int) -> None:
        await release.wait()

    release = asyncio.Event()
    async with live(App(ship)) as tb:
        await tb.publish("orders", 1)
        second = await tb.publish("orders", 2)
        await eventually(lambda: tb.received(ship))
        with pytest.raises(NotSettled, match=f"has not had message {second}, which is due"):
            await tb.settle(timeout=0.05)
        release.set()
        await tb.settle()
        tb.assert_acked(ship, times=2)
