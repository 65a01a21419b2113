"""The pump and its source: holding, losing, reopening, settling, draining, and how much is fetched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import pytest

from streamfw import Attempt, Message
from streamfw.broker import Settlement
from streamfw.errors import BrokerClosed, BrokerRefused
from streamfw.outcome import Ack, DeadLetter, Outcome, Policy, Retry
from streamfw.runtime import pump as pump_module
from tests.helpers import eventually

from .rig import BARE, NATIVE, FakeSource, Order, away, prepared, pumping, quick, run_all, turns

either_way = pytest.mark.parametrize("capabilities", [NATIVE, BARE], ids=["native", "bare"])
one_or_many = pytest.mark.parametrize("workers", [1, 8])


async def nothing(order: Order) -> None: ...


# -- holding


@one_or_many
async def test_a_held_pump_begins_nothing_and_quiesces(workers: int) -> None:
    begun: list[int] = []
    gate = asyncio.Event()

    async def handle(order: Order) -> None:
        begun.append(order.id)
        await gate.wait()

    source = FakeSource(prepared(100, lambda n: f"k{n % 20}"))
    async with pumping(handle, source, workers=workers, ordered=True) as rig:
        pump = rig.pump
        await eventually(lambda: len(begun) == workers)
        pump.hold()
        assert not await pump.quiesce(0.01), "what runs goes on"
        gate.set()
        assert await pump.quiesce(5)
        assert len(begun) == workers
        source.add(*prepared(10, start=100))
        await turns(10)
        assert len(begun) == workers, "and what comes is not begun either"
        pump.release()
        await rig.all_ended(110)
    assert sorted(begun) == list(range(110))


@one_or_many
async def test_a_source_takes_back_what_has_not_begun(workers: int) -> None:
    begun: list[int] = []
    gate = asyncio.Event()

    async def handle(order: Order) -> None:
        begun.append(order.id)
        await gate.wait()

    source = FakeSource(prepared(100))
    async with pumping(handle, source, workers=workers) as rig:
        pump = rig.pump
        await eventually(lambda: len(begun) == workers)
        await eventually(lambda: not source.queue)
        some = pump.take_back(lambda delivery: delivery.message_id.endswith("9"))
        assert [one.message_id for one in some] == [f"m{n}9" for n in ("", *range(1, 10))]
        assert pump.in_flight == 90
        rest = pump.take_back(lambda delivery: not delivery.message_id.startswith("m2"))
        assert not pump.take_back(lambda delivery: delivery in rest)
        gate.set()
        await eventually(lambda: pump.in_flight == 0)
        source.out.clear()  # it is the source's again
    assert sorted(begun) == sorted({*range(workers), 2, *range(20, 29)}), "what was taken back is not begun"


async def test_a_retry_waits_in_the_process_for_as_long_as_the_broker_lets_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        if attempt < 3:
            raise Retry(after=3600)

    source = FakeSource(prepared(2), msgspec.structs.replace(BARE, longest_pause=0.02))
    async with pumping(handle, source) as rig:
        await rig.all_ended(2)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "a retry after 3600 s comes after 0.02 s" in warning


@one_or_many
async def test_what_is_to_finish_is_handled_while_the_pump_is_held(workers: int) -> None:
    begun: list[int] = []

    async def handle(order: Order) -> None:
        begun.append(order.id)
        await asyncio.sleep(0)

    source = FakeSource(prepared(60, lambda n: f"k{n % 20}"))
    async with pumping(handle, source, workers=workers, ordered=True) as rig:
        pump = rig.pump
        await eventually(lambda: bool(begun))
        pump.hold()
        assert await pump.quiesce(5)
        before = set(begun)
        assert await pump.quiesce(5, lambda delivery: delivery.key == "k19")
        assert set(begun) == before | {19, 39, 59}
        await turns(10)
        assert set(begun) == before | {19, 39, 59}, "and it is held again"
        pump.release()
        await rig.all_ended(60)
    assert [number for number in begun if number % 20 == 19] == [19, 39, 59]
    assert sorted(begun) == list(range(60))


async def test_two_may_wait_for_quiet() -> None:
    gate = asyncio.Event()

    async def handle(order: Order) -> None:
        await gate.wait()

    source = FakeSource(prepared(1))
    async with pumping(handle, source) as rig:
        await eventually(lambda: rig.pump.crew.running)
        rig.pump.hold()
        both = asyncio.gather(rig.pump.quiesce(5), rig.pump.quiesce(5))
        await turns(2)
        gate.set()
        assert list(await both) == [True, True]
        rig.pump.release()


@one_or_many
async def test_release_drops_what_moved_and_keeps_the_rest_in_order(workers: int) -> None:
    seen: dict[str | None, list[int]] = {}

    async def handle(order: Order, message: Message) -> None:
        await asyncio.sleep(0)
        seen.setdefault(message.key, []).append(order.id)
        if sum(map(len, seen.values())) == 20:  # in the middle of the first fetch
            rig.pump.hold()

    source = FakeSource(prepared(200, lambda n: f"k{n % 4}"))
    async with pumping(handle, source, workers=workers, ordered=True) as rig:
        await eventually(lambda: sum(map(len, seen.values())) >= 20)
        assert await rig.pump.quiesce(5)
        before = len(seen["k1"])
        moved = [d for d in source.out.values() if d.key == "k1" and d.position not in seen["k1"]]
        for delivery in moved:
            delivery.lost = True
            del source.out[delivery.tag]
        source.queue = type(source.queue)(m for m in source.queue if m.key != "k1")
        rig.pump.release(lambda delivery: delivery.key == "k1")
        await rig.all_ended(150 + before)
        assert rig.pump.counters.lost == len(moved) > 0  # what was not fetched yet was never ours
    for key, numbers in seen.items():
        assert numbers == sorted(numbers), key
        assert len(numbers) == (before if key == "k1" else 50)


async def test_what_a_worker_is_about_to_begin_is_held_and_dropped_too() -> None:
    """A worker lets the loop turn with the next of its lane in hand: in that turn it is queued, not running."""
    begun: list[int] = []

    async def handle(order: Order) -> None:
        begun.append(order.id)
        await asyncio.sleep(0)

    source = FakeSource(prepared(20, lambda n: "one"))
    async with pumping(handle, source, workers=2, ordered=True) as rig:
        crew = rig.pump.crew

        def always_over() -> float:
            crew._marked, crew._slice_end = True, -1.0
            return crew.clock()

        crew._new_slice = always_over  # type: ignore[method-assign]
        for _ in range(1000):
            if any(slot.holds for slot in crew.slots):
                break
            await asyncio.sleep(0)
        held = [d for slot in crew.slots for d in slot.holds]
        assert len(held) == 1, "a worker yields with a message"
        number = int(held[0].message_id[1:])
        rig.pump.hold()
        assert rig.pump.crew.running == 0
        last = len(begun)
        assert await rig.pump.quiesce(1)
        source.lose(held[0])
        rig.pump.release(lambda delivery: delivery is held[0])
        assert rig.pump.counters.lost == 1
        await eventually(lambda: len(source.ended) == 20)
        assert last == number
        assert begun == [*range(number), *range(number + 1, 20), number]


@either_way
async def test_hold_during_retry_waits(capabilities: Any) -> None:
    """A pause may end while the pump is held: the message goes before those that are queued behind it."""
    order_seen: dict[str | None, list[int]] = {}

    async def handle(order: Order, message: Message, attempt: Annotated[int, Attempt]) -> None:
        if attempt < 3 and order.id < 8:
            raise Retry(after=0.01)
        order_seen.setdefault(message.key, []).append(order.id)

    source = FakeSource(prepared(80, lambda n: f"k{n % 4}"), capabilities)
    async with pumping(handle, source, workers=3, ordered=True, policy=Policy()) as rig:
        await eventually(lambda: rig.pump.lanes.waiting)
        rig.pump.hold()
        assert await rig.pump.quiesce(1)
        await eventually(lambda: not rig.pump.lanes.waiting, message="the pauses end while it is held")
        assert rig.pump.lanes.held == 0
        rig.pump.release()
        await rig.all_ended(80)
    assert all(numbers == sorted(numbers) for numbers in order_seen.values())


async def test_a_dropped_retry_lets_go_of_those_behind_it() -> None:
    failing = True
    done: list[int] = []

    async def handle(order: Order) -> None:
        if order.id == 0 and failing:
            raise Retry(after=30)
        done.append(order.id)

    source = FakeSource(prepared(10, lambda n: "one"))
    async with pumping(handle, source, ordered=True) as rig:
        await eventually(lambda: rig.pump.lanes.held == 10)
        first = next(d for d in source.out.values() if d.position == 0)
        failing = False
        source.lose(first)
        rig.pump.hold()
        rig.pump.release(lambda delivery: delivery is first)
        await rig.all_ended(10)
    assert done == [*range(1, 10), 0]


async def test_a_lost_delivery_is_not_begun_and_its_settlement_is_counted() -> None:
    begun: list[int] = []
    gate = asyncio.Event()

    async def handle(order: Order) -> None:
        begun.append(order.id)
        await gate.wait()

    source = FakeSource(prepared(6))
    async with pumping(handle, source, workers=2) as rig:
        await eventually(lambda: len(begun) == 2 and len(source.out) == 6)
        for delivery in list(source.out.values())[1:4]:  # one runs, two are queued
            source.lose(delivery)
        gate.set()
        await rig.all_ended(6)
        counters = rig.pump.counters
        assert counters.lost == 3
        assert counters.acked == counters.settled == 6
    assert sorted(begun) == [0, 1, 1, 2, 3, 4, 5]


# -- faults of the source


@either_way
async def test_a_transient_error_is_followed_by_reopen_until_it_works(capabilities: Any) -> None:
    source = FakeSource(prepared(10), capabilities)
    async with pumping(nothing, source, workers=2) as rig:
        await rig.all_ended(10)
        source.reopen_faults.extend([away(), away()])
        source.fail_fetch(away("the connection is cut"))
        await eventually(lambda: rig.pump.troubles)
        assert not rig.pump.health().ok
        assert "fetching: " in rig.pump.health().detail
        source.add(*prepared(10, start=10))
        await rig.all_ended(20)
        assert rig.pump.health().ok
        assert source.calls == ["reopen"] * 3
        assert rig.pump.counters.reopened == 1


async def test_a_source_that_opens_but_delivers_nothing_is_opened_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each opening may cost others something: in Kafka the whole group waits for it."""
    tries: list[int] = []

    def noted(attempt: int) -> float:
        tries.append(attempt)
        return 0.001

    monkeypatch.setattr(pump_module, "backoff", noted)
    source = FakeSource(prepared(10))
    async with pumping(nothing, source) as rig:
        await rig.all_ended(10)
        source.fail_fetch(*[away("damaged") for _ in range(4)])
        await eventually(lambda: rig.pump.counters.reopened == 4)
        assert tries == [0, 1, 2, 3]
        source.add(*prepared(1, start=10))
        await rig.all_ended(11)
        source.fail_fetch(away("the connection is cut"))
        await eventually(lambda: rig.pump.counters.reopened == 5)
        assert tries == [0, 1, 2, 3, 0]
        monkeypatch.setattr(pump_module, "CALM", 0.0)
        source.fail_fetch(away("the connection is cut"))
        await eventually(lambda: rig.pump.counters.reopened == 6)
        assert tries[-1] == 0


@one_or_many
async def test_what_did_not_survive_a_reopen_is_forgotten(workers: int) -> None:
    seen: dict[str | None, list[int]] = {}
    gate = asyncio.Event()

    async def handle(order: Order, message: Message) -> None:
        await gate.wait()
        seen.setdefault(message.key, []).append(order.id)

    source = FakeSource(prepared(60, lambda n: f"k{n % 10}"))

    def cut() -> None:
        lost = sorted(source.out.values(), key=lambda d: d.position)
        source.out.clear()
        for delivery in lost:
            delivery.lost = True
        source.queue.extendleft(reversed(lost))

    async with pumping(handle, source, workers=workers, ordered=True, prefetch=200) as rig:
        await eventually(lambda: rig.pump.crew.running == workers)
        source.on_reopen = cut
        source.fail_fetch(away())
        await eventually(lambda: rig.pump.counters.reopened)
        gate.set()
        await rig.all_ended(60)
        assert rig.pump.counters.lost == 60
        assert rig.pump.counters.acked == 60
    running_twice = {n for numbers in seen.values() for n in numbers if numbers.count(n) > 1}
    assert len(running_twice) <= workers, "only what ran at the cut is done again"
    for numbers in seen.values():
        once = list(dict.fromkeys(numbers))
        assert once == sorted(once)


@pytest.mark.parametrize("where", ["fetch", "settle", "reopen", "stopped"])
async def test_a_terminal_error_ends_the_pump_with_that_error(where: str) -> None:
    refused = BrokerRefused("wrong password")
    source = FakeSource(prepared(3))
    async with pumping(nothing, source) as rig:
        if where == "settle":
            source.settle_faults.append(refused)
        elif where == "fetch":
            source.fail_fetch(refused)
        elif where == "reopen":
            source.reopen_faults.append(refused)
            source.fail_fetch(away())
        else:
            await source.stop()
        await eventually(lambda: rig.failures)
        assert rig.pump.health() == rig.pump.health()
        assert not rig.pump.health().ok
        (error,) = rig.failures
        assert isinstance(error, BrokerClosed) if where == "stopped" else error is refused


async def test_a_settlement_that_fails_is_repeated_with_the_same_group() -> None:
    groups: list[list[int]] = []

    async def before(settlements: Sequence[Settlement]) -> None:
        groups.append([id(s) for s in settlements])
        await turns(1)

    source = FakeSource(prepared(20))
    source.before_settle = before
    source.settle_faults.extend([away(), away()])
    source.late_settle_faults.extend([away()])
    async with pumping(nothing, source, workers=2) as rig:
        await eventually(lambda: rig.pump.troubles)
        assert "settling: " in rig.pump.health().detail
        await eventually(lambda: rig.pump.in_flight == 0)
        assert rig.pump.health().ok
    assert groups[0] == groups[1] == groups[2] == groups[3]
    assert sorted(source.ended) == list(range(20))
    # The third attempt had worked before it failed: the fourth found nothing any more.
    assert rig.pump.counters.lost == source.settled_in[0]


async def test_troubles_of_fetch_and_settle_do_not_hide_each_other() -> None:
    source = FakeSource(prepared(5))
    source.settle_faults.extend(away("settle") for _ in range(1000))
    source.reopen_faults.append(away("again"))
    async with pumping(nothing, source) as rig:
        await eventually(lambda: len(rig.pump.troubles) == 1)
        source.fail_fetch(away("fetch"))
        await eventually(lambda: len(rig.pump.troubles) == 2)
        await eventually(lambda: len(rig.pump.troubles) == 1)
        assert "settling" in rig.pump.health().detail, "the fetch works again, the settlement does not"
        source.settle_faults.clear()
        await rig.all_ended(5)
        assert rig.pump.health().ok


async def test_an_exception_that_is_no_broker_error_ends_the_pump() -> None:
    bug = ZeroDivisionError("in a source")
    source = FakeSource([])
    async with pumping(nothing, source) as rig:
        source.fail_fetch(bug)
        await eventually(lambda: rig.failures)
    assert rig.failures == [bug]


# -- settling


async def test_an_idle_pump_settles_nothing_and_fetches_once() -> None:
    source = FakeSource(prepared(3))
    async with pumping(nothing, source, workers=4) as rig:
        await rig.all_ended(3)
        calls, fetches = len(source.settled_in), len(source.limits)
        await asyncio.sleep(1.2)  # longer than the pump's own tick
        assert (len(source.settled_in), len(source.limits)) == (calls, fetches)


@one_or_many
async def test_calls_per_thousand_messages(workers: int) -> None:
    """Full batches of 100: a fetch for each half or whole of the prefetch, and about as many settlements."""
    source = FakeSource(prepared(1000))
    async with pumping(nothing, source, workers=workers, prefetch=100) as rig:
        await rig.all_ended(1000)
    assert len(source.limits) <= 2 * 10 + 2
    assert len(source.settled_in) <= 2 * 10 + 2


async def test_a_busy_worker_settles_in_groups() -> None:
    """One worker that suspends, a source that takes its time: more goes into each settlement, not one a message."""

    async def handle(order: Order) -> None:
        await asyncio.sleep(0)

    async def slow(settlements: Sequence[Settlement]) -> None:
        await asyncio.sleep(0.001)

    source = FakeSource(prepared(1000))
    source.before_settle = slow
    async with pumping(handle, source, workers=1, prefetch=100) as rig:
        await rig.all_ended(1000)
    assert len(source.settled_in) < 200


# -- how much is fetched


async def test_a_fixed_prefetch_is_never_exceeded() -> None:
    most = 0

    async def handle(order: Order) -> None:
        nonlocal most
        most = max(most, len(source.out))
        await asyncio.sleep(0)

    source = FakeSource(prepared(300))
    async with pumping(handle, source, workers=4, prefetch=20) as rig:
        await rig.all_ended(300)
    assert most <= 20
    assert max(source.limits) == 20


async def test_slow_handlers_give_back_what_others_could_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "TICK", 0.06)
    gate = asyncio.Event()

    async def handle(order: Order) -> None:
        await gate.wait()

    source = FakeSource(prepared(400))
    async with pumping(handle, source, workers=2) as rig:
        await eventually(lambda: len(source.out) == 100)
        await eventually(lambda: len(source.out) <= 12, message="two workers that take nothing keep few")
        assert rig.pump.counters.released >= 88
        await eventually(lambda: rig.pump.prefetch.size == 4)
        gate.set()
        await rig.all_ended(400)
    assert source.outcomes(Ack) == list(range(400))


async def test_a_hot_key_does_not_make_the_prefetch_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parked behind one key was not taken by anybody."""
    monkeypatch.setattr(pump_module, "TICK", 0.06)
    gate = asyncio.Event()
    begun = 0

    async def handle(order: Order) -> None:
        nonlocal begun
        begun += 1
        await gate.wait()

    source = FakeSource(prepared(2000, lambda n: "hot"))
    async with pumping(handle, source, workers=8, ordered=True) as rig:
        looks = 0
        adapt = rig.pump._adapt

        def look() -> None:
            nonlocal looks
            looks += 1
            adapt()

        rig.pump._adapt = look  # type: ignore[method-assign]
        await eventually(lambda: looks >= 5)
        assert begun == 1
        assert len(source.out) == rig.pump.prefetch.size == 100
        gate.set()
        await rig.all_ended(2000)


async def test_fast_handlers_are_kept_busy() -> None:
    async def handle(order: Order) -> None:
        await asyncio.sleep(0.0005)

    source = FakeSource(prepared(3000))
    async with pumping(handle, source, workers=64) as rig:
        await rig.all_ended(3000)
    assert max(source.limits) > 100, "it grew beyond its start"


async def test_the_byte_budget() -> None:
    big = prepared(200)
    for message in big:
        message.body = b'{"id":%d,"pad":"%s"}' % (message.position, b"x" * 1000)
    most = 0

    async def handle(order: Order) -> None:
        nonlocal most
        most = max(most, sum(len(d.body) for d in source.out.values()))
        await asyncio.sleep(0)

    source = FakeSource(big)
    async with pumping(handle, source, workers=2, max_bytes=8000) as rig:
        await eventually(lambda: rig.pump.prefetch.average)
        await rig.all_ended(200)
    # The first fetch does not know yet how large they are; a source cuts it by bytes, this one does not.
    assert max(source.limits[1:]) <= 8
    assert source.limits[0] == 100


async def test_a_message_larger_than_the_budget_comes_alone() -> None:
    big = prepared(5)
    for message in big:
        message.body = b'{"id":%d,"pad":"%s"}' % (message.position, b"x" * 10_000)
    source = FakeSource(big)
    async with pumping(nothing, source, max_bytes=100, prefetch=1) as rig:
        await rig.all_ended(5)
    assert set(source.limits) == {1}


# -- the drain


async def test_drain_lets_finish_what_runs_and_leaves_the_rest() -> None:
    begun: list[int] = []
    done: list[int] = []
    cancelled: list[int] = []

    async def handle(order: Order) -> None:
        begun.append(order.id)
        try:
            await asyncio.sleep(0.05 if order.id % 2 else 30)
        except asyncio.CancelledError:
            cancelled.append(order.id)
            raise
        done.append(order.id)

    source = FakeSource(prepared(100))
    async with pumping(handle, source, workers=4, prefetch=50) as rig:
        await eventually(lambda: len(begun) == 4)
        await rig.drain(0.2)
        assert rig.pump.state == "stopped"
    assert (begun, sorted(done), sorted(cancelled)) == ([0, 1, 2, 3], [1, 3], [0, 2])
    assert source.outcomes(Ack) == [1, 3]
    assert [m.position for m in source.queue] == [0, 2, *range(4, 100)]
    assert {m.attempt for m in source.queue} == {1}, "a cancellation by the drain is no failure"
    assert source.calls == ["stop", "flush", "close"]


async def test_nothing_begins_while_the_source_stops() -> None:
    begun = 0
    stopping = False
    late: list[int] = []

    async def handle(order: Order) -> None:
        nonlocal begun
        begun += 1
        if stopping:
            late.append(order.id)
        await asyncio.sleep(0)

    source = FakeSource(prepared(5000))
    original = source.stop

    async def slow_stop() -> None:
        await original()
        await asyncio.sleep(0.05)

    source.stop = slow_stop  # type: ignore[method-assign]
    async with pumping(handle, source, workers=4) as rig:
        await eventually(lambda: begun > 50)
        stopping = True
        await rig.drain()
    assert late == []


@pytest.mark.parametrize("method", ["stop", "flush", "close"])
async def test_a_source_that_fails_while_it_is_closed_leaves_nothing_running(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(order: Order) -> None:
        await asyncio.sleep(30)

    source = FakeSource(prepared(10))
    original = getattr(source, method)

    async def fails(*arguments: Any) -> None:
        await original(*arguments)
        raise away(f"cut in {method}")

    setattr(source, method, fails)
    with caplog.at_level(logging.WARNING, "streamfw"):
        async with pumping(handle, source, workers=2) as rig:
            await eventually(lambda: rig.pump.crew.running == 2)
            await rig.drain(0.01)
    assert f"cut in {method}" in caplog.text
    assert source.calls == ["stop", "flush", "close"]


async def test_a_handler_that_turns_its_cancellation_into_an_error_is_unsettled() -> None:
    """Database drivers do that. The drain has cancelled it: no attempt is counted."""

    async def handle(order: Order) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ConnectionError("the query was cancelled") from None

    source = FakeSource(prepared(1))
    async with pumping(handle, source, policy=Policy(1)) as rig:
        await eventually(lambda: rig.pump.crew.running)
        await rig.drain(0.01)
    assert source.settlements == []
    assert source.queue[0].attempt == 1


async def test_a_timeout_during_the_drain_is_a_failure() -> None:
    async def handle(order: Order) -> None:
        await asyncio.sleep(30)

    source = FakeSource(prepared(1))
    async with pumping(handle, source, timeout=0.05, policy=Policy(1)) as rig:
        await eventually(lambda: rig.pump.crew.running)
        await rig.drain(10)
    assert source.outcomes(DeadLetter) == [0]


async def test_drain_tells_a_handler_again_that_swallows_its_cancellation() -> None:
    told = 0

    async def handle(order: Order) -> None:
        nonlocal told
        while told < 2:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                told += 1

    source = FakeSource(prepared(1))
    async with pumping(handle, source) as rig:
        await eventually(lambda: rig.pump.crew.running)
        await rig.drain(0.01)
    assert told == 2
    assert source.outcomes(Ack) == [0], "it finished after all"


async def test_drain_settles_what_is_done_although_the_source_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(prepared(5))
    source.settle_faults.extend([away(), away()])
    async with pumping(nothing, source) as rig:
        await eventually(lambda: rig.pump.troubles)
        await rig.drain(5)
    assert sorted(source.ended) == list(range(5))


async def test_drain_gives_up_on_a_source_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "GRACE", 0.2)
    source = FakeSource(prepared(5))
    source.settle_faults.extend(away() for _ in range(10_000))
    async with pumping(nothing, source) as rig:
        await eventually(lambda: rig.pump.troubles)
        await rig.drain(0.1)
    assert source.ended == {}
    assert len(source.queue) == 5
    assert source.calls == ["stop", "flush", "close"]


async def test_drain_cuts_off_a_settlement_that_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "GRACE", 0.1)

    async def hangs(settlements: Sequence[Settlement]) -> None:
        await asyncio.sleep(60)

    source = FakeSource(prepared(5))
    source.before_settle = hangs
    async with pumping(nothing, source) as rig:
        await eventually(lambda: source.settling)
        await rig.drain(0.1)
    assert source.calls == ["stop", "flush", "close"]


async def test_drain_while_reopening() -> None:
    """The pauses between attempts grow to half a minute; a drain does not wait for them."""
    source = FakeSource([])
    source.reopen_faults.extend(away() for _ in range(1000))
    async with pumping(nothing, source) as rig:
        source.fail_fetch(away())
        await eventually(lambda: source.calls.count("reopen") >= 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await rig.drain(30)
        assert loop.time() - began < 4


@pytest.mark.parametrize("started", [True, False])
async def test_drain_of_an_idle_pump(started: bool) -> None:
    source = FakeSource([])
    async with pumping(nothing, source, workers=4, timeout=1.0, ordered=True, start=started):
        await turns(3)
    assert source.calls == (["stop", "flush", "close"] if started else ["stop", "close"])


@pytest.mark.parametrize(("attempts", "outcome"), [(1, DeadLetter), (2, Retry)])
@pytest.mark.parametrize("ending", [SystemExit, GeneratorExit])
async def test_a_system_exit_in_a_handler_ends_the_app_and_is_a_failure(
    ending: type[BaseException], attempts: int, outcome: type[Outcome]
) -> None:
    """Given back uncounted it would end every process to come, and nothing behind it would be handled."""

    async def handle(order: Order) -> None:
        raise ending

    source = FakeSource(prepared(1))
    async with pumping(handle, source, workers=1, policy=Policy(attempts)) as rig:
        await eventually(lambda: source.settlements)
        assert [type(failure) for failure in rig.failures] == [ending]
        await rig.drain(1)
    assert [type(settlement.outcome) for settlement in source.settlements] == [outcome]


async def test_an_interrupt_in_a_handler_ends_the_app_and_is_no_failure() -> None:
    async def handle(order: Order) -> None:
        raise KeyboardInterrupt

    source = FakeSource(prepared(1))
    async with pumping(handle, source, workers=1, policy=Policy(1)) as rig:
        await eventually(lambda: rig.failures)
        await rig.drain(1)
    assert source.settlements == []
    assert source.queue[0].attempt == 1


async def test_counters() -> None:
    async def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        if order.id == 1 and attempt == 1:
            raise ValueError

    rig = await run_all(handle, prepared(4), policy=quick(3))
    counters = rig.pump.counters
    assert (counters.fetched, counters.settled, counters.acked, counters.retried) == (5, 5, 4, 1)
