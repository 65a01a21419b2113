"""The pump over prepared messages: parameters, contexts, timeouts, outcomes, order, settling."""

from __future__ import annotations

import asyncio
import contextvars
import random
import time
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any

import anyio
import pytest

from streamfw import Attempt, Header, Message, State
from streamfw.broker import Delivery
from streamfw.errors import BrokerRefused, Rejected, Unavailable
from streamfw.middleware import Next
from streamfw.outcome import Ack, Backoff, DeadLetter, Drop, Policy, Retry
from tests.helpers import eventually

from .rig import BARE, NATIVE, FakeSource, Order, away, prepared, pumping, quick, run_all, turns

leak: contextvars.ContextVar[object] = contextvars.ContextVar("leak", default=None)
either_way = pytest.mark.parametrize("capabilities", [NATIVE, BARE], ids=["native", "bare"])
one_or_many = pytest.mark.parametrize("workers", [1, 8])


# -- parameters and contexts


async def test_parameters() -> None:
    seen: list[object] = []

    async def handle(
        order: Order,
        tenant: Annotated[str, Header("tenant")],
        message: Message,
        attempt: Annotated[int, Attempt],
        pool: Annotated[dict[str, int], State],
    ) -> None:
        seen.append((order.id, tenant, message.message_id, attempt, pool["x"]))

    await run_all(handle, prepared(5), state={"pool": {"x": 7}})
    assert seen == [(n, f"t{n % 3}", f"m{n}", 1, 7) for n in range(5)]


@one_or_many
@pytest.mark.parametrize("suspend", [False, True])
async def test_a_leaked_variable_reaches_no_other_message(workers: int, suspend: bool) -> None:
    wrong: list[object] = []

    async def handle(order: Order) -> None:
        if leak.get() is not None:
            wrong.append((order.id, leak.get()))
        leak.set(order.id)
        if suspend:
            await asyncio.sleep(0)
        if leak.get() != order.id:
            wrong.append(("lost", order.id))

    rig = await run_all(handle, prepared(300), workers=workers)
    assert wrong == []
    assert 1 <= rig.pump.crew.replaced <= workers, "isolated from the first leak on"
    assert rig.pump.counters.acked == 300


async def test_a_handler_that_tidies_up_keeps_its_worker() -> None:
    async def handle(order: Order) -> None:
        token = leak.set(order.id)
        await asyncio.sleep(0)
        assert leak.get() == order.id
        leak.reset(token)

    rig = await run_all(handle, prepared(100), workers=4)
    assert rig.pump.crew.replaced == 0


async def test_a_plain_function_that_leaks_is_isolated_too() -> None:
    def plain(message: Any, call_next: Next) -> Any:
        assert leak.get() is None
        leak.set(1)
        return call_next(message)

    async def handle(order: Order) -> None: ...

    rig = await run_all(handle, prepared(100), middleware=[plain], workers=2)
    assert rig.pump.crew.replaced <= 2
    assert rig.pump.counters.acked == 100


async def test_a_variable_whose_comparison_fails() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise ValueError("cannot be compared")

    async def handle(order: Order) -> None:
        leak.set(Odd())

    assert (await run_all(handle, prepared(30))).pump.counters.acked == 30


async def test_decimal_sums_are_no_leak() -> None:
    async def handle(order: Order) -> None:
        assert Decimal(1) / Decimal(3)

    assert (await run_all(handle, prepared(50), workers=2)).pump.crew.replaced == 0


async def test_an_awaitable_that_is_no_coroutine_is_awaited_with_and_without_isolation() -> None:
    def in_a_task(message: Any, call_next: Next) -> Any:
        return asyncio.ensure_future(call_next(message))

    def leaks(message: Any, call_next: Next) -> Any:
        leak.set(2)
        return call_next(message)

    done: list[int] = []

    async def handle(order: Order) -> None:
        done.append(order.id)

    await run_all(handle, prepared(20), middleware=[leaks, in_a_task])
    assert done == list(range(20))


# -- cancellation and time


@pytest.mark.parametrize("isolated", [False, True])
async def test_scopes_inside_handlers(isolated: bool) -> None:
    log: list[str] = []

    async def handle(order: Order) -> None:
        if isolated:
            leak.set(1)
        kind = order.id % 5
        if kind == 0:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await asyncio.sleep(10)
            log.append("timeout")
        elif kind == 1:
            with anyio.move_on_after(0.005) as scope:
                await anyio.sleep(10)
            assert scope.cancelled_caught
            log.append("scope")
        elif kind == 2:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
                    await asyncio.sleep(10)
            except* KeyError:
                pass
            log.append("group")
        elif kind == 3:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(10), 0.005)
            log.append("wait_for")
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 0.001)
            log.append("tasks")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def fail() -> None:
        raise KeyError

    rig = await run_all(handle, prepared(50), workers=8, timeout=30.0)
    assert sorted(log) == sorted(["timeout", "scope", "group", "wait_for", "tasks"] * 10)
    assert rig.source.outcomes(Ack) == list(range(50))
    assert (rig.pump.crew.replaced > 0) == isolated


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("workers", [1, 4])
async def test_timeout(workers: int, isolated: bool) -> None:
    finished: list[int] = []

    async def handle(order: Order) -> None:
        if isolated:
            leak.set(1)
        kind = order.id % 7
        if kind == 3:
            await asyncio.sleep(10)
        if kind == 4:
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        if kind == 5:
            with anyio.move_on_after(5):
                await asyncio.sleep(10)
        if kind == 6:  # swallows the cancellation
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                pass
        finished.append(order.id)

    rig = await run_all(handle, prepared(28), workers=workers, timeout=0.03, policy=Policy(attempts=1))
    late = [n for n in range(28) if n % 7 in (3, 4, 5)]
    assert rig.source.outcomes(DeadLetter) == late
    letters = [s.outcome for s in rig.source.settlements if isinstance(s.outcome, DeadLetter)]
    assert {(one.error_type, "0.03 s" in one.reason) for one in letters} == {("TimeoutError", True)}
    assert sorted(finished) == [n for n in range(28) if n not in late]
    assert rig.pump.crew.timeouts == 12
    assert rig.pump.crew.replaced >= 16, "a task that was cancelled is never reused"


async def test_a_timeout_is_not_early() -> None:
    took: list[float] = []

    async def handle(order: Order) -> None:
        began = time.monotonic()
        try:
            await asyncio.sleep(10)
        finally:
            took.append(time.monotonic() - began)

    await run_all(handle, prepared(6), workers=3, timeout=0.05, policy=Policy(attempts=1))
    assert len(took) == 6
    assert min(took) >= 0.049
    assert sorted(took)[3] < 0.5, "and by one timer, not by a wheel of ticks"


async def test_a_short_handler_after_a_long_one_has_all_its_time() -> None:
    """The timer is set once; what starts later does not expire with what it was set for."""

    async def handle(order: Order) -> None:
        await asyncio.sleep(0.03)

    rig = await run_all(handle, prepared(12), workers=1, timeout=0.2, policy=Policy(attempts=1))
    assert rig.source.outcomes(Ack) == list(range(12))


async def test_a_timeout_is_matched_by_on_error() -> None:
    async def handle(order: Order) -> None:
        await asyncio.sleep(10)

    rig = await run_all(handle, prepared(2), workers=2, timeout=0.01, policy=Policy(on_error={TimeoutError: Drop}))
    assert rig.source.outcomes(Drop) == [0, 1]


@either_way
@one_or_many
async def test_a_handler_that_cancels_itself_has_failed(workers: int, capabilities: Any) -> None:
    """Like one that raises anything else; and nobody else's message is hit by it, nor pays for it."""
    attempts: dict[int, list[int]] = {}

    async def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        attempts.setdefault(order.id, []).append(attempt)
        task = asyncio.current_task()
        assert task is not None
        if order.id % 10 == 5:
            task.cancel()
            await asyncio.sleep(1)
        if order.id % 10 == 7 and attempt == 1:
            task.cancel()  # and returns: it would meet whatever comes next
        if order.id % 10 == 9 and attempt == 1:
            task.cancel()
            task.uncancel()  # before Python 3.13 this does not take back what has not come yet
        if order.id % 10 in (8, 0):  # here it would come
            await asyncio.sleep(0)

    rig = await run_all(handle, prepared(50), workers=workers, capabilities=capabilities, policy=quick(3))
    failed = [5, 15, 25, 35, 45]
    assert rig.source.outcomes(Ack) == [n for n in range(50) if n not in failed or not capabilities.dead_letter]
    assert rig.pump.counters.dead == len(failed)
    assert {n: a for n, a in attempts.items() if a != [1]} == {n: [1, 2, 3] for n in failed}
    assert (rig.pump.counters.released, rig.pump.counters.retried) == (0, 2 * len(failed))
    assert rig.pump.crew.replaced == 3 * len(failed) + 5 + 5


async def test_a_self_cancellation_is_matched_by_on_error() -> None:
    async def handle(order: Order) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel("enough")
        await asyncio.sleep(1)

    rig = await run_all(handle, prepared(2), policy=Policy(on_error={asyncio.CancelledError: Drop}))
    assert rig.source.outcomes(Drop) == [0, 1]


async def test_the_timeout_holds_for_a_handler_that_swallows_its_own_cancellation() -> None:
    async def handle(order: Order) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        await asyncio.sleep(10)

    rig = await run_all(handle, prepared(1), timeout=0.02, policy=Policy(attempts=1))
    assert (rig.pump.crew.timeouts, rig.pump.counters.dead) == (1, 1)


@pytest.mark.parametrize("leaks", [False, True])
async def test_what_is_cancelled_with_everything_else_is_unsettled(leaks: bool) -> None:
    """As the end of `asyncio.run` does when its main task has left an app behind."""
    loop = asyncio.get_running_loop()
    other = loop.create_future()

    async def handle(order: Order) -> None:
        await (other if leaks else asyncio.Event().wait())

    source = FakeSource(prepared(3))
    async with pumping(handle, source, workers=3, policy=Policy(attempts=1)) as rig:
        await eventually(lambda: rig.pump.crew.running == 3)
        if leaks:
            other.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await eventually(lambda: rig.pump.crew.running == 0)
        assert (rig.pump.counters.dead, rig.pump.counters.released) == (0, 3)
        source.calls.remove("fetch cancelled")  # which nobody does but the loop's end
    assert source.ended == {}


async def test_a_worker_cancelled_while_it_rests_is_replaced() -> None:
    async def handle(order: Order) -> None: ...

    source = FakeSource([])
    async with pumping(handle, source, workers=3) as rig:
        await turns(3)
        for slot in list(rig.pump.crew.slots):
            slot.task.cancel()
        source.add(*prepared(50))
        await rig.all_ended(50)
        assert len(rig.pump.crew.slots) == 3


# -- outcomes


async def test_outcomes() -> None:
    calls: list[int] = []

    async def handle(order: Order) -> object:
        calls.append(order.id)
        match order.id:
            case 1:
                raise Retry(after=0.01)
            case 2:
                return Drop()
            case 3:
                return DeadLetter("no")
            case 4:
                raise KeyError("x")
            case 5:
                raise ZeroDivisionError
            case 6:
                return Retry()
            case 7:
                raise Ack()
            case _:
                return None

    messages = prepared(9)
    messages[8].body = b"not json"
    rig = await run_all(handle, messages, workers=2, policy=quick(3, on_error={ZeroDivisionError: Drop}))
    assert {n: calls.count(n) for n in range(9)} == {0: 1, 1: 3, 2: 1, 3: 1, 4: 3, 5: 1, 6: 3, 7: 1, 8: 0}
    source = rig.source
    assert source.outcomes(DeadLetter) == [1, 3, 4, 6, 8]
    assert source.outcomes(Drop) == [2, 5]
    assert source.outcomes(Ack) == [0, 7]
    reasons = {
        s.delivery.message_id: s.outcome.args[0] for s in source.settlements if isinstance(s.outcome, DeadLetter)
    }
    assert reasons["m3"] == "no"
    assert reasons["m4"] == "KeyError: 'x'"
    assert "cannot be decoded" in reasons["m8"]
    counters = rig.pump.counters
    assert (counters.dead, counters.dropped, counters.retried, counters.acked) == (5, 2, 6, 2)


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("outcome", [Ack, Drop, lambda: Retry(after=0.001), lambda: DeadLetter("x"), Retry])
async def test_returned_and_raised_mean_the_same(outcome: Callable[[], Ack], raised: bool) -> None:
    async def handle(order: Order) -> object:
        if raised:
            raise outcome()
        return outcome()

    rig = await run_all(handle, prepared(1), policy=quick(2))
    expected = {Ack: Ack, Drop: Drop}.get(type(outcome()), DeadLetter)
    assert rig.source.outcomes(expected) == [0]


async def test_the_first_rule_that_matches_wins() -> None:
    async def handle(order: Order) -> None:
        raise [KeyError, IndexError, ValueError][order.id]

    rules = {KeyError: Drop, LookupError: DeadLetter, Exception: lambda error: Drop()}
    rig = await run_all(handle, prepared(3), policy=Policy(on_error=rules))  # type: ignore[arg-type]
    assert rig.source.outcomes(Drop) == [0, 2]
    assert rig.source.outcomes(DeadLetter) == [1]


@pytest.mark.parametrize("rule", [lambda error: 1 / 0, lambda error: "no outcome"])
async def test_a_broken_rule_is_a_failure_and_not_the_end_of_the_app(rule: Any) -> None:
    async def handle(order: Order) -> None:
        raise ValueError

    rig = await run_all(handle, prepared(3), policy=quick(2, on_error={ValueError: rule}))
    assert rig.source.outcomes(DeadLetter) == [0, 1, 2]
    assert rig.failures == []


async def test_an_error_without_text_is_a_failure_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("cannot be shown")

    async def handle(order: Order) -> None:
        raise Mute

    rig = await run_all(handle, prepared(2), policy=Policy(1))
    assert rig.source.outcomes(DeadLetter) == [0, 1]


async def test_pauses_grow_within_their_bounds() -> None:
    pauses: list[float | None] = []

    async def handle(order: Order) -> None:
        raise ValueError

    source = FakeSource(prepared(1))
    original = source._settle_one

    def at_once(settlement: Any) -> Any:
        if isinstance(settlement.outcome, Retry):
            pauses.append(settlement.outcome.after)
            settlement.outcome.after = 0.0
        return original(settlement)

    source._settle_one = at_once  # type: ignore[method-assign]
    policy = Policy(8, Backoff(first=1, factor=2, max=20, jitter=True))
    async with pumping(handle, source, policy=policy) as rig:
        await rig.all_ended(1)
    assert len(pauses) == 7
    for attempt, pause in enumerate(pauses):
        whole = min(20, 2**attempt)
        assert pause is not None
        assert whole / 2 <= pause <= whole


@either_way
async def test_what_came_before_the_handler_ends_too(capabilities: Any) -> None:
    """A missing header, a middleware that raises: nothing is left hanging."""

    async def stop(message: Any, call_next: Next) -> object:
        if message.position == 1:
            raise KeyError("in the middleware")
        return await call_next(message)

    async def handle(order: Order, who: Annotated[str, Header("who")]) -> None: ...

    rig = await run_all(handle, prepared(2), middleware=[stop], policy=quick(2), capabilities=capabilities)
    assert len(rig.source.ended) == 2
    assert rig.pump.counters.dead == 2


async def test_middleware_is_composed_in_order_and_may_be_plain() -> None:
    log: list[object] = []

    async def outer(message: Any, call_next: Next) -> object:
        log.append("outer<")
        result = await call_next(message)
        log.append(f"outer>{result}")
        return result

    def plain(message: Any, call_next: Next) -> Any:
        log.append("plain")
        return call_next(message)

    async def inner(message: Any, call_next: Next) -> object:
        if message.position == 1:
            return Drop()
        if message.position == 2:
            raise KeyError
        return await call_next(message)

    async def handle(order: Order) -> str:
        log.append(order.id)
        return "value"

    rig = await run_all(handle, prepared(3), middleware=[outer, plain, inner], policy=Policy(1))
    assert log == ["outer<", "plain", 0, "outer>value", "outer<", "plain", "outer>", "outer<", "plain"]
    assert (rig.source.outcomes(Ack), rig.source.outcomes(Drop), rig.source.outcomes(DeadLetter)) == ([0], [1], [2])


# -- lanes


@either_way
@one_or_many
@pytest.mark.parametrize("failing", [0.0, 0.2])
async def test_a_key_keeps_its_order(workers: int, failing: float, capabilities: Any) -> None:
    dice = random.Random(1)
    seen: dict[str | None, list[int]] = {}
    running: set[str | None] = set()

    async def handle(order: Order, message: Message) -> None:
        assert message.key not in running
        running.add(message.key)
        try:
            if order.id % 3:
                await asyncio.sleep(dice.choice([0, 0, 0.001]))
            if dice.random() < failing:
                raise Retry(after=dice.choice([0, 0.002]))
            seen.setdefault(message.key, []).append(order.id)
        finally:
            running.discard(message.key)

    messages = prepared(600, lambda n: f"k{n * 7919 % 31}" if n % 4 else "hot")
    rig = await run_all(
        handle, messages, workers=workers, ordered=True, prefetch=64, capabilities=capabilities, policy=Policy()
    )
    assert sum(map(len, seen.values())) == 600
    for key, numbers in seen.items():
        assert numbers == sorted(numbers), key
    assert (rig.pump.counters.retried > 50) == bool(failing)


async def test_a_leak_keeps_the_order() -> None:
    seen: dict[str | None, list[int]] = {}

    async def handle(order: Order, message: Message) -> None:
        leak.set(1)
        await asyncio.sleep(0)
        seen.setdefault(message.key, []).append(order.id)

    await run_all(handle, prepared(300, lambda n: f"k{n % 3}"), workers=8, ordered=True)
    assert {key: len(numbers) for key, numbers in seen.items()} == {"k0": 100, "k1": 100, "k2": 100}
    assert all(numbers == sorted(numbers) for numbers in seen.values())


async def test_one_blocked_key_blocks_nobody_else() -> None:
    done: list[int] = []

    async def handle(order: Order) -> None:
        if order.id == 0:
            raise Retry(after=30)
        done.append(order.id)

    source = FakeSource(prepared(500, lambda n: "stuck" if n % 2 == 0 else f"k{n % 10}"))
    async with pumping(handle, source, workers=2, ordered=True) as rig:
        await eventually(lambda: len(done) == 250)
        assert done == [n for n in range(500) if n % 2]
        assert rig.pump.lanes.held == 250
    assert sorted(m.position for m in source.queue) == list(range(0, 500, 2)), "given back by the close"
    assert {m.attempt for m in source.queue if m.position} == {1}


async def test_held_messages_stop_the_fetch_and_let_it_go_on() -> None:
    gate = False

    async def handle(order: Order) -> None:
        if not gate:
            raise Retry(after=0.05)

    source = FakeSource(prepared(400, lambda n: "one"))
    async with pumping(handle, source, ordered=True, held=50, prefetch=20, policy=Policy()) as rig:
        await eventually(lambda: rig.pump.lanes.held >= 50)
        await turns(20)
        assert len(source.out) < 50 + 20, "no more is fetched than one prefetch beyond the limit"
        gate = True
        await rig.all_ended(400)


async def test_held_messages_count_against_the_bytes() -> None:
    async def handle(order: Order) -> None:
        raise Retry(after=30)

    messages = prepared(400, lambda n: "one")
    source = FakeSource(messages)
    size = len(messages[-1].body)
    async with pumping(handle, source, ordered=True, max_bytes=100 * size, policy=Policy()) as rig:
        await eventually(lambda: rig.pump.lanes.held >= 50)
        await turns(50)
        assert len(source.out) <= 2 * 100, "max_bytes is what this process holds, waiting or not"


# -- native or here


async def test_retries_in_place() -> None:
    """A source that cannot take a single message back never sees a retry."""
    attempts: dict[int, list[int]] = {}

    async def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        attempts.setdefault(order.id, []).append(attempt)
        if attempt < 3:
            raise ValueError

    rig = await run_all(handle, prepared(20), workers=4, capabilities=BARE, policy=quick(5))
    assert attempts == {n: [1, 2, 3] for n in range(20)}
    assert {type(s.outcome) for s in rig.source.settlements} == {Ack}
    assert rig.pump.counters.retried == 40


@either_way
async def test_a_drain_leaves_what_waits_for_a_retry(capabilities: Any) -> None:
    async def handle(order: Order) -> None:
        raise Retry(after=30)

    source = FakeSource(prepared(20, lambda n: f"k{n % 5}"), capabilities)
    async with pumping(handle, source, workers=4, ordered=True) as rig:
        await eventually(lambda: rig.pump.lanes.held == 20)
    assert source.ended == {}
    assert [m.position for m in source.queue] == list(range(20))


@either_way
async def test_a_retry_during_the_drain_is_not_sent_past_those_behind_it(capabilities: Any) -> None:
    """The head of a lane fails while the pump drains: given back with the others, in order, not delayed by itself."""
    begun = asyncio.Event()

    async def handle(order: Order) -> None:
        begun.set()
        await asyncio.sleep(0.02)
        raise ValueError

    source = FakeSource(prepared(5, lambda n: "one"), capabilities)
    async with pumping(handle, source, ordered=True, policy=Policy(5, Backoff(first=20, max=20))):
        await begun.wait()
    assert source.settlements == []
    assert [m.position for m in source.queue] == list(range(5))


async def test_dead_letters_are_published_and_confirmed_first() -> None:
    async def handle(order: Order) -> None:
        raise DeadLetter("for later") from None

    source = FakeSource(prepared(3), BARE)
    async with pumping(handle, source) as rig:
        faults = [away(), ValueError("refused")]
        rig.connection.publish_faults.extend(faults)
        await eventually(lambda: rig.pump.troubles)
        assert not rig.pump.health().ok
        await rig.all_ended(3)
        assert rig.pump.health().ok, "and it is well again once they are through"
    assert source.outcomes(Ack) == [0, 1, 2]
    assert sorted(letter.message_id for letter in rig.connection.published) == ["m0", "m1", "m2"]
    letter = rig.connection.published[0]
    assert letter.name == "orders.dead"
    assert letter.headers["streamfw-error"] == "for later"
    assert letter.headers["streamfw-origin-attempt"] == "1"
    counters = rig.pump.counters
    assert (counters.dead, counters.acked, counters.settled) == (3, 0, 3)


async def test_the_original_stays_when_its_dead_letter_cannot_be_published() -> None:
    async def handle(order: Order) -> None:
        raise DeadLetter("for later")

    source = FakeSource(prepared(3), BARE)
    async with pumping(handle, source) as rig:
        rig.connection.publish_faults.extend(away() for _ in range(1000))
        await eventually(lambda: len(rig.pump.troubles) == 3)
        await rig.drain(0.05)
    assert source.settlements == []
    assert [m.position for m in source.queue] == [0, 1, 2]


def refused() -> Unavailable:
    error = Unavailable("it was not sent")
    error.__cause__ = BrokerRefused("your password has changed")
    return error


@pytest.mark.parametrize("error", [Rejected("never like this"), refused(), BrokerRefused("no")], ids=repr)
async def test_what_the_broker_never_takes_holds_up_neither_a_drain_nor_its_source(error: Exception) -> None:
    async def handle(order: Order) -> None:
        raise DeadLetter("for later")

    source = FakeSource(prepared(3), BARE)
    async with pumping(handle, source) as rig:
        rig.connection.publish_faults.extend([error] * 1000)
        await eventually(lambda: len(rig.pump.troubles) == 3)
        rig.pump.hold()
        assert await rig.pump.quiesce(5.0), "everything is settled that can be"
        rig.pump.release()
        left = len(rig.connection.publish_faults)
        await asyncio.wait_for(rig.drain(600), 20)
        assert len(rig.connection.publish_faults) < left, "it was tried once more"
    assert source.settlements == []
    assert [m.position for m in source.queue] == [0, 1, 2]


async def test_what_the_source_cannot_take_back_is_tried_again_here() -> None:
    attempts: list[tuple[int, int]] = []

    async def handle(order: Order, message: Message) -> None:
        attempts.append((order.id, message.attempt))
        if order.id == 1 and message.attempt < 3:
            raise Retry(0.01)

    class Unwilling(FakeSource):
        def can_retry(self, delivery: Delivery) -> bool:
            return delivery.message_id != "m1"

    source = Unwilling(prepared(3))
    async with pumping(handle, source) as rig:
        await rig.all_ended(3)
    assert sorted(attempts) == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]
    assert {type(settlement.outcome) for settlement in source.settlements} == {Ack}


@pytest.mark.parametrize("text", ["\ud800 a lone surrogate", "x" * 10_000, "é" * 10_000, "a\0b"])
async def test_any_error_text_fits_into_a_header(text: str) -> None:
    async def handle(order: Order) -> None:
        if order.id:
            raise DeadLetter(text)
        raise ValueError(text)

    rig = await run_all(handle, prepared(2), capabilities=BARE, policy=Policy(1))
    for letter in rig.connection.published:
        raw = letter.headers.raw("streamfw-error")
        assert raw is not None
        assert 0 < len(raw) <= 1024 + 20
        assert b"\0" not in raw


# -- workers


async def test_as_many_at_once_as_there_are_workers() -> None:
    for workers in (1, 8):
        now = most = 0

        async def handle(order: Order) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1

        await run_all(handle, prepared(100), workers=workers)
        assert most == workers


async def test_a_handler_that_blocks_for_ever_holds_up_no_other_worker() -> None:
    gate = asyncio.Event()
    done = 0

    async def handle(order: Order) -> None:
        nonlocal done
        if order.id == 0:
            await gate.wait()
        done += 1
        if done == 199:
            gate.set()

    await run_all(handle, prepared(200), workers=2)
    assert done == 200


@one_or_many
async def test_other_tasks_get_their_turn(workers: int) -> None:
    """In CPU time of this process, so that a busy machine does not matter; the worst three turns are left out."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            gaps.append(now - last)
            last = now

    async def handle(order: Order) -> None:
        began = time.process_time()
        while time.process_time() - began < 0.0002:
            pass

    ticking = asyncio.create_task(tick())
    await run_all(handle, prepared(1500), workers=workers, prefetch=1000)
    ticking.cancel()
    await asyncio.wait([ticking])
    assert sorted(gaps)[-4] < 0.05
    assert len(gaps) > 100, "1,500 handlers of 0.2 ms are 300 slices of a millisecond"


@either_way
async def test_a_task_per_message(capabilities: Any) -> None:
    from streamfw.calls import in_a_task

    tasks: set[int] = set()
    kept: list[object] = []

    async def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        task = asyncio.current_task()
        assert task is not None
        kept.append(task)
        tasks.add(id(task))
        assert leak.get() is None
        leak.set(1)
        if order.id == 3:
            await asyncio.sleep(10)
        if order.id == 4 and attempt == 1:
            raise ValueError

    rig = await run_all(
        handle, prepared(30), workers=2, wrap=in_a_task, timeout=0.05, policy=quick(2), capabilities=capabilities
    )
    assert len(tasks) == len(kept) == 32
    assert rig.source.outcomes(DeadLetter) == ([3] if capabilities is NATIVE else [])
    assert (rig.pump.counters.dead, rig.pump.crew.timeouts) == (1, 2), "the timeout reaches the inner task"
    assert len(rig.source.ended) == 30
