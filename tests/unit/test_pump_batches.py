"""Handlers that take lists, and handlers inside transactions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Annotated, Any

import pytest

from streamfw import Message, MessageBatch, PartialFailure
from streamfw.errors import BrokerRefused, LeaseLost, SettleError
from streamfw.handler import UnitConnection
from streamfw.middleware import Next
from streamfw.outcome import Ack, Backoff, DeadLetter, Drop, Outcome, Policy, Retry
from streamfw.runtime.batches import BatchCrew
from streamfw.subscriber import Batch
from tests.helpers import eventually

from .rig import BARE, NATIVE, FakeDelivery, FakeSource, Order, away, prepared, pumping, quick, run_all, turns
from .test_pump import leak

either_way = pytest.mark.parametrize("capabilities", [NATIVE, BARE], ids=["native", "bare"])
one_or_many = pytest.mark.parametrize("workers", [1, 8])


# -- batches


@one_or_many
async def test_sizes(workers: int) -> None:
    sizes: list[int] = []
    seen: list[int] = []

    async def handle(orders: list[Order]) -> None:
        sizes.append(len(orders))
        seen.extend(order.id for order in orders)
        await asyncio.sleep(0)

    await run_all(handle, prepared(1000), batch=Batch(30), workers=workers)
    assert sorted(seen) == list(range(1000))
    assert max(sizes) == 30
    assert len(sizes) < 60


async def test_a_batch_waits_for_more_and_not_for_ever() -> None:
    sizes: list[int] = []

    async def handle(orders: list[Order]) -> None:
        sizes.append(len(orders))

    source = FakeSource(prepared(3))
    async with pumping(handle, source, batch=Batch(10, wait=5.0)) as rig:
        await eventually(lambda: any(len(slot.holds) == 3 for slot in rig.pump.crew.slots))
        source.add(*prepared(4, start=3))
        await eventually(lambda: any(len(slot.holds) == 7 for slot in rig.pump.crew.slots))
        source.add(*prepared(5, start=7))
        await eventually(lambda: len(source.ended) == 10, message="a full batch does not wait")
        assert sizes == [10]
    assert len(source.queue) == 2, "what lingers is given back by the drain"
    rig = await run_all(handle, prepared(2), batch=Batch(10, wait=0.02))
    assert sizes == [10, 2]


@pytest.mark.parametrize("how", ["hold", "hold and drop", "cancel", "lose"])
async def test_what_lingers(how: str) -> None:
    batches: list[list[int]] = []

    async def handle(orders: list[Order]) -> None:
        batches.append([order.id for order in orders])

    source = FakeSource(prepared(3, lambda n: f"k{n}"))
    async with pumping(handle, source, batch=Batch(10, wait=0.3), ordered=True) as rig:
        pump = rig.pump
        await eventually(lambda: any(len(slot.holds) == 3 for slot in pump.crew.slots))
        delivery = next(d for d in source.out.values() if d.position == 1)
        if how == "lose":
            source.lose(delivery)
        elif how == "cancel":
            (slot,) = pump.crew.slots
            slot.task.cancel()
        else:
            pump.hold()
            assert pump.crew.running == 0
            assert await pump.quiesce(1)
            if how == "hold and drop":
                source.lose(delivery)
                pump.release(lambda one: one is delivery)
            else:
                pump.release()
        await rig.all_ended(3)
    numbers = [n for batch in batches for n in batch]
    assert sorted(numbers) == [0, 1, 2]
    assert rig.pump.counters.lost == (how in ("lose", "hold and drop"))


async def test_an_arrival_and_a_cancellation_at_once_lose_no_wake() -> None:
    done: list[int] = []

    async def handle(orders: list[Order]) -> None:
        done.extend(order.id for order in orders)

    source = FakeSource(prepared(1))
    async with pumping(handle, source, batch=Batch(4, wait=0.2), workers=3) as rig:
        await eventually(lambda: any(slot.holds for slot in rig.pump.crew.slots))
        (lingering,) = [slot for slot in rig.pump.crew.slots if slot.holds]
        for message in prepared(1, start=1):
            rig.pump.in_flight += 1
            rig.pump.crew.arrive([source._deliver(message)])
        assert rig.pump.crew._spare, "the one that lingers is woken"
        lingering.task.cancel()
        await rig.all_ended(2)
    assert sorted(done) == [0, 1]


@either_way
async def test_bad_elements_leave_the_batch(capabilities: Any) -> None:
    batches: list[list[int]] = []

    async def handle(orders: list[Order]) -> None:
        batches.append([order.id for order in orders])

    messages = prepared(10)
    for number in (0, 4, 9):
        messages[number].body = b"not json"
    rig = await run_all(handle, messages, batch=Batch(10), capabilities=capabilities)
    assert batches == [[1, 2, 3, 5, 6, 7, 8]]
    assert rig.pump.counters.dead == 3
    assert rig.pump.counters.acked == 7


async def test_a_batch_of_nothing_but_bad_elements_calls_nobody() -> None:
    called = False

    async def handle(orders: list[Order]) -> None:
        nonlocal called
        called = True

    messages = prepared(3)
    for message in messages:
        message.body = b"{"
    rig = await run_all(handle, messages, batch=Batch(3))
    assert not called
    assert rig.source.outcomes(DeadLetter) == [0, 1, 2]


@pytest.mark.parametrize("raised", [True, False])
async def test_partial_failure(raised: bool) -> None:
    async def handle(orders: list[Order]) -> object:
        partial = PartialFailure({1: ValueError("one"), 3: Drop(), 4: KeyError("four")})
        if raised:
            raise partial
        return partial

    rig = await run_all(handle, prepared(5), batch=Batch(5), policy=Policy(1, on_error={KeyError: Drop}))
    assert rig.source.outcomes(Ack) == [0, 2]
    assert rig.source.outcomes(DeadLetter) == [1]
    assert rig.source.outcomes(Drop) == [3, 4]


async def test_outcomes_by_element() -> None:
    async def handle(orders: list[Order]) -> list[object]:
        return [None, Ack(), Drop(), DeadLetter("x"), ValueError("failed"), Retry(0)]

    rig = await run_all(handle, prepared(6), batch=Batch(6), policy=Policy(1))
    assert rig.source.outcomes(Ack) == [0, 1]
    assert rig.source.outcomes(Drop) == [2]
    assert rig.source.outcomes(DeadLetter) == [3, 4, 5]


@pytest.mark.parametrize(
    "result",
    [
        [None],
        [None, None, None],
        [True, False],
        "no",
        {0: None},
        PartialFailure({2: ValueError()}),
        PartialFailure({-1: ValueError()}),
        PartialFailure({0: "not an exception"}),  # type: ignore[dict-item]
        PartialFailure({"a": ValueError()}),  # type: ignore[dict-item]
    ],
)
async def test_a_wrong_result_acknowledges_nothing(result: object) -> None:
    async def handle(orders: list[Order]) -> object:
        return result

    rig = await run_all(handle, prepared(2), batch=Batch(2, wait=1), policy=Policy(1))
    assert rig.source.outcomes(DeadLetter) == [0, 1]


@pytest.mark.parametrize("error", [ValueError("all"), Drop(), DeadLetter("all")])
async def test_raising_settles_all(error: Exception) -> None:
    async def handle(orders: list[Order]) -> None:
        raise error

    rig = await run_all(handle, prepared(4), batch=Batch(4, wait=1), policy=quick(2))
    kind = type(error) if isinstance(error, Outcome) else DeadLetter
    assert rig.source.outcomes(kind) == [0, 1, 2, 3]


async def test_a_handler_may_do_what_it_likes_with_its_list() -> None:
    async def handle(messages: list[Message]) -> None:
        while messages:
            messages.pop()

    rig = await run_all(handle, prepared(20), batch=Batch(7))
    assert rig.source.outcomes(Ack) == list(range(20))


@either_way
async def test_a_timeout_fails_the_batch(capabilities: Any) -> None:
    async def handle(orders: list[Order]) -> None:
        await asyncio.sleep(10)

    rig = await run_all(
        handle, prepared(3), batch=Batch(3, wait=1), timeout=0.02, policy=quick(1), capabilities=capabilities
    )
    assert rig.pump.counters.dead == 3
    assert rig.pump.crew.timeouts == 1


@either_way
async def test_a_batch_that_cancels_itself_has_failed(capabilities: Any) -> None:
    attempts: list[set[int]] = []
    errors: list[BaseException | None] = []

    async def handle(messages: list[Message]) -> None:
        attempts.append({message.attempt for message in messages})
        if len(attempts) == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)

    rig = await run_all(
        handle,
        prepared(4, lambda n: f"k{n % 2}"),
        batch=Batch(4, wait=0.5),
        ordered=True,
        capabilities=capabilities,
        policy=quick(2, told=lambda message, error, outcome, by_rule: errors.append(error)),
    )
    assert rig.source.outcomes(Ack) == [0, 1, 2, 3]
    assert rig.pump.counters.released == 0
    assert attempts[0] == {1}
    assert set().union(*attempts[1:]) == {1, 2}, "of the two lanes, the heads have failed; the others came with them"
    assert {type(error) for error in errors} == {asyncio.CancelledError}, "nobody had a timeout"


async def test_middleware_sees_the_batch_and_contexts_are_kept_apart() -> None:
    seen: list[int] = []

    async def around(batch: MessageBatch, call_next: Next) -> object:
        seen.append(len(batch.messages))
        return await call_next(batch)

    async def handle(orders: list[Order]) -> None:
        assert leak.get() is None
        leak.set(1)

    rig = await run_all(handle, prepared(40), batch=Batch(10), middleware=[around])
    assert sum(seen) == 40
    assert rig.pump.crew.replaced == 1


@either_way
@one_or_many
@pytest.mark.parametrize("wait", [0.0, 0.002])
async def test_keyed_batches_with_failing_elements_keep_their_order(
    workers: int, wait: float, capabilities: Any
) -> None:
    dice = random.Random(7)
    done: dict[str | None, list[int]] = {}
    running: set[str | None] = set()

    async def handle(messages: list[Message]) -> object:
        keys = {message.key for message in messages}
        assert not keys & running
        running.update(keys)
        try:
            await asyncio.sleep(dice.choice([0, 0.001]))
            results: list[object] = []
            failed: set[str | None] = set()
            for message in messages:
                if dice.random() < 0.1:
                    failed.add(message.key)
                    results.append(Retry(after=dice.choice([0, 0.002])))
                    continue
                if message.key not in failed:
                    assert isinstance(message, FakeDelivery)
                    done.setdefault(message.key, []).append(message.position)
                results.append(None)
            return results
        finally:
            running.difference_update(keys)

    rig = await run_all(
        handle, prepared(400, lambda n: f"k{n * 31 % 13}"), batch=Batch(16, wait), workers=workers, ordered=True,
        capabilities=capabilities,
    )  # fmt: skip
    assert sum(map(len, done.values())) == 400
    assert all(numbers == sorted(numbers) for numbers in done.values())
    assert rig.pump.counters.retried > 10


async def test_what_arrives_goes_to_the_batch_that_lingers_for_it() -> None:
    batches: list[list[int]] = []

    async def handle(orders: list[Order]) -> None:
        batches.append([order.id for order in orders])

    source = FakeSource(prepared(1, lambda n: "one"))
    async with pumping(handle, source, batch=Batch(5, wait=1), workers=2, ordered=True) as rig:
        crew = rig.pump.crew
        assert isinstance(crew, BatchCrew)
        for start in (1, 3):
            await eventually(lambda: len(crew.lingering) == 1 and len(crew.idle) == 1 and not crew.ready)
            source.add(*prepared(2, lambda n: "one", start=start))
        await rig.all_ended(5)
    assert batches == [[0, 1, 2, 3, 4]]


def bundled(count: int, bundles: int, start: int = 0) -> list[FakeDelivery]:
    messages = prepared(count, lambda n: f"key of {n % bundles}", start=start)
    for message in messages:
        message.bundle = message.position % bundles
    return messages


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("wait", [0.0, 0.05])
async def test_a_batch_is_of_one_bundle(workers: int, wait: float, ordered: bool) -> None:
    batches: list[list[int]] = []

    async def handle(orders: list[Order]) -> None:
        batches.append([order.id for order in orders])

    source = FakeSource(bundled(300, 3))
    async with pumping(handle, source, batch=Batch(20, wait), workers=workers, ordered=ordered) as rig:
        await rig.all_ended(300)
        source.add(*bundled(4, 3, start=300))  # and few, that come one by one
        await rig.all_ended(304)
    assert all(len({order % 3 for order in batch}) == 1 for batch in batches)
    assert sorted(order for batch in batches for order in batch) == list(range(304))
    assert len(batches) < 304 / 10  # full ones, although neighbours are of different bundles
    if ordered:
        for bundle in range(3):
            of_it = [order for batch in batches for order in batch if order % 3 == bundle]
            assert of_it == sorted(of_it)


async def test_batches_of_several_bundles_linger_side_by_side() -> None:
    batches: list[list[int]] = []

    async def handle(orders: list[Order]) -> None:
        batches.append([order.id for order in orders])

    source = FakeSource(bundled(2, 2))
    async with pumping(handle, source, batch=Batch(3, wait=5), workers=2, ordered=True) as rig:
        crew = rig.pump.crew
        assert isinstance(crew, BatchCrew)
        await eventually(lambda: len(crew.lingering) == 2)
        source.add(*bundled(3, 2, start=2))  # 2, 3, 4: whoever wakes first parks, or leaves, what is the other's
        await eventually(lambda: len(batches) == 1)
        source.add(*bundled(1, 2, start=5))
        await rig.all_ended(6)
    assert sorted(batches) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("moved", [0, 2])
async def test_what_a_batch_parks_while_the_pump_is_held_is_not_forgotten(moved: int) -> None:
    """The head of a lane waits for a retry with the rest of its batch behind it, and then one of them is dropped."""
    gate = asyncio.Event()
    failing = True
    done: list[int] = []

    async def handle(orders: list[Order]) -> None:
        await gate.wait()
        if failing:
            raise Retry(after=30 if moved == 0 else 0.05)
        done.extend(order.id for order in orders)

    source = FakeSource(prepared(4, lambda n: "one"))
    async with pumping(handle, source, batch=Batch(4, wait=1), ordered=True) as rig:
        await eventually(lambda: rig.pump.crew.running and len(source.out) == 4)
        rig.pump.hold()
        gate.set()
        assert await rig.pump.quiesce(5)
        failing = False
        one = next(d for d in source.out.values() if d.position == moved)
        source.lose(one)
        one.lost = False  # what is dropped is what the source names, marked or not
        rig.pump.release(lambda delivery: delivery is one)
        await rig.all_ended(4)
        assert rig.pump.counters.lost == 1
    assert done == [*(n for n in range(4) if n != moved), moved]


# -- transactions


async def test_a_handler_writes_and_its_message_ends_in_one() -> None:
    async def handle(order: Order, connection: Annotated[list[object], UnitConnection()]) -> object:
        connection.append(order.id)
        match order.id:
            case 1:
                return Drop()
            case 2:
                raise DeadLetter("no")
            case 3:
                raise ValueError
            case 4:
                raise Ack()
            case 5:
                return Ack()
            case _:
                return None

    rig = await run_all(handle, prepared(7), in_transaction=True, policy=Policy(1), workers=2)
    assert sorted(map(str, rig.source.committed)) == ["0", "4", "5", "6"], "committed with an acknowledgement only"
    assert rig.source.outcomes(Ack) == [0, 4, 5, 6]
    assert rig.source.outcomes(DeadLetter) == [2, 3]
    counters = rig.pump.counters
    assert (counters.acked, counters.settled, counters.dead, counters.dropped) == (4, 7, 2, 1)


@one_or_many
async def test_a_lost_lease_rolls_back(workers: int) -> None:
    async def handle(order: Order, message: Message, connection: Annotated[list[object], UnitConnection()]) -> None:
        connection.append(order.id)
        if order.id == 1 and message not in seen:
            seen.append(message)
            if len(seen) == 1:
                source.lose(message)  # type: ignore[arg-type]
                message.lost = False  # type: ignore[attr-defined]

    seen: list[Message] = []
    source = FakeSource(prepared(3))
    async with pumping(handle, source, in_transaction=True, workers=workers) as rig:
        await rig.all_ended(3)
        assert rig.pump.counters.lost == 1
    assert sorted(map(str, source.committed)) == ["0", "1", "2"]


@pytest.mark.parametrize("where", ["enter", "finish"])
async def test_a_broken_transaction_counts_for_nothing(where: str) -> None:
    attempts: list[int] = []

    async def handle(order: Order, message: Message) -> None:
        attempts.append(message.attempt)

    source = FakeSource(prepared(3))
    if where == "enter":
        source.transaction_faults.extend([away(), away()])
    else:
        source.finish_faults.extend([lambda deliveries: away("broken while it committed")] * 2)
    async with pumping(handle, source, in_transaction=True, policy=Policy(1)) as rig:
        await rig.all_ended(3)
    assert set(attempts) == {1}
    assert source.outcomes(Ack) == [0, 1, 2]
    assert len(attempts) == (3 if where == "enter" else 5)


async def test_a_terminal_error_in_a_transaction_is_a_failure_of_the_message() -> None:
    async def handle(order: Order) -> None: ...

    source = FakeSource(prepared(1))
    source.finish_faults.append(lambda deliveries: BrokerRefused("permission denied"))
    async with pumping(handle, source, in_transaction=True, policy=Policy(1)) as rig:
        await rig.all_ended(1)
    assert source.outcomes(DeadLetter) == [0]


async def test_a_broker_error_of_the_handler_is_its_failure() -> None:
    """It published somewhere else, say, and that was away: an attempt like any other."""
    attempts: list[int] = []

    async def handle(order: Order, message: Message) -> None:
        attempts.append(message.attempt)
        raise away("the other broker")

    rig = await run_all(handle, prepared(1), in_transaction=True, policy=quick(3))
    assert attempts == [1, 2, 3]
    assert rig.source.outcomes(DeadLetter) == [0]


async def test_a_transactional_handler_that_times_out_rolls_back() -> None:
    async def handle(order: Order, connection: Annotated[list[object], UnitConnection()]) -> None:
        connection.append(order.id)
        await asyncio.sleep(10)

    rig = await run_all(handle, prepared(2), in_transaction=True, timeout=0.02, policy=Policy(1), workers=2)
    assert rig.source.committed == []
    assert rig.source.outcomes(DeadLetter) == [0, 1]


@pytest.mark.parametrize("result", ["nothing", "ack", "raise ack"])
async def test_a_transactional_batch_commits_as_one(result: str) -> None:
    async def handle(orders: list[Order], connection: Annotated[list[object], UnitConnection()]) -> object:
        connection.extend(order.id for order in orders)
        if result == "raise ack":
            raise Ack()
        return Ack() if result == "ack" else None

    rig = await run_all(handle, prepared(6), in_transaction=True, batch=Batch(3))
    assert sorted(map(str, rig.source.committed)) == list("012345")
    assert rig.source.outcomes(Ack) == list(range(6))
    assert rig.source.settlements == []


@pytest.mark.parametrize("kind", ["partial", "list", "drop"])
async def test_a_transactional_batch_has_one_outcome(kind: str) -> None:
    async def handle(orders: list[Order], connection: Annotated[list[object], UnitConnection()]) -> object:
        connection.extend(order.id for order in orders)
        if kind == "partial":
            raise PartialFailure({1: KeyError("one of them")})
        return Drop() if kind == "drop" else [None] * len(orders)

    rig = await run_all(handle, prepared(3), in_transaction=True, batch=Batch(3, wait=1), policy=Policy(1))
    assert rig.source.committed == []
    assert rig.source.outcomes(Ack) == []
    assert len(rig.source.ended) == 3
    if kind == "partial":
        assert {s.outcome.args[0][:8] for s in rig.source.settlements} == {"KeyError"}


async def test_one_lost_lease_of_a_batch_leaves_the_others_ours() -> None:
    def lost(deliveries: Sequence[FakeDelivery]) -> SettleError:
        one = next(d for d in deliveries if d.position == 1)
        source.lose(one)
        one.lost = False
        return LeaseLost(one, "somebody else has it")

    async def handle(orders: list[Order], connection: Annotated[list[object], UnitConnection()]) -> None:
        connection.extend(order.id for order in orders)

    source = FakeSource(prepared(3))
    source.finish_faults.append(lost)
    async with pumping(handle, source, in_transaction=True, batch=Batch(3, wait=0.1)) as rig:
        await rig.all_ended(3)
        assert rig.pump.counters.lost == 1
    assert sorted(map(str, source.committed)) == ["0", "1", "2"]
    await turns(1)


@pytest.mark.parametrize("raised", [False, True])
async def test_the_outcome_of_a_transactional_handler_is_told_once(raised: bool) -> None:
    told: list[Outcome] = []
    policy = Policy(None, Backoff(), {}, True, lambda message, error, outcome, by_rule: told.append(outcome))

    async def handle(order: Order, connection: Annotated[object, UnitConnection()]) -> DeadLetter:
        if raised:
            raise DeadLetter("no")
        return DeadLetter("no")

    await run_all(handle, prepared(1), in_transaction=True, policy=policy)
    assert [type(outcome) for outcome in told] == [DeadLetter]
