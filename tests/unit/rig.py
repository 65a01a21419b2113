"""A source whose messages are prepared and whose faults come on demand, and a pump that feeds on it.

`FakeSource` keeps a model of what becomes of each message: `queue` (with the source), `out` (with us), `ended` (every
final settlement, by position). What a pump must never do is an assertion here: two fetches at once, a settlement that
the capabilities do not have, a call after `close`, a cancelled fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from streamfw.broker import Capabilities, Connection, Delivery, Health, Settlement, Source, Subscription, UnitOfWork
from streamfw.calls import dead_letter_of
from streamfw.codec import JsonCodec
from streamfw.errors import BrokerUnavailable, LeaseLost, PublishError, SettleError
from streamfw.handler import compile_call
from streamfw.message import Headers, Outgoing
from streamfw.middleware import Middleware, compose
from streamfw.outcome import ACK, RELEASE, SETTLED, Ack, Backoff, DeadLetter, Drop, Outcome, Policy, Retry
from streamfw.runtime.context import one_turn
from streamfw.runtime.plan import Plan
from streamfw.runtime.pump import Pump
from streamfw.runtime.transaction import transactional
from streamfw.subscriber import Batch
from tests.helpers import eventually

__all__ = [
    "BARE",
    "NATIVE",
    "FakeConnection",
    "FakeDelivery",
    "FakeSource",
    "Order",
    "Rig",
    "away",
    "prepared",
    "pumping",
    "quick",
    "run_all",
    "turns",
]

NATIVE = Capabilities(
    retry=True, release=True, dead_letter=True, transactions=True, ordered_by=frozenset({"key"}), prefetch=100
)
BARE = Capabilities(ordered_by=frozenset({"key"}), prefetch=100)
"""Nothing native: retries in place, dead letters published by the runtime, given back only by closing."""


class Order(msgspec.Struct):
    id: int


class FakeDelivery(Delivery, gc=False, kw_only=True):
    position: int
    tag: int = 0


class FakeUnit(UnitOfWork):
    def __init__(self, source: FakeSource, deliveries: Sequence[FakeDelivery]) -> None:
        self.source, self.deliveries, self.finished = source, deliveries, False
        self.connection: list[object] = []  # what the handler wrote

    async def finish(self, outcome: Outcome) -> None:
        await one_turn()
        if self.source.finish_faults:
            raise self.source.finish_faults.popleft()(self.deliveries)
        for delivery in self.deliveries:
            if self.source.out.get(delivery.tag) is not delivery:
                raise LeaseLost(delivery, "not ours any more")
        assert outcome is ACK, "the runtime finishes a unit for an acknowledgement only"
        self.finished = True
        for delivery in self.deliveries:
            self.source.end(delivery, outcome)
        self.source.committed += self.connection


class FakeSource(Source):
    def __init__(self, messages: Sequence[FakeDelivery], capabilities: Capabilities = NATIVE) -> None:
        self.capabilities = capabilities
        self.queue: deque[FakeDelivery] = deque(messages)
        self.out: dict[int, FakeDelivery] = {}
        self.ended: dict[int, list[Outcome]] = {}
        self.settlements: list[Settlement] = []
        self.committed: list[object] = []
        self.calls: list[str] = []  # stop, flush, close, reopen
        self.limits: list[int] = []
        self.settled_in: list[int] = []  # sizes of groups
        self.closed = self.fetching = self.settling = False
        # On demand: an exception for the next call (None: let that one pass), and hooks.
        self.fetch_faults: deque[BaseException | None] = deque()
        self.settle_faults: deque[BaseException | None] = deque()
        self.late_settle_faults: deque[BaseException | None] = deque()  # raised after it has worked
        self.reopen_faults: deque[BaseException | None] = deque()
        self.finish_faults: deque[Callable[[Sequence[FakeDelivery]], BaseException]] = deque()
        self.transaction_faults: deque[BaseException] = deque()
        self.before_settle: Callable[[Sequence[Settlement]], Awaitable[None]] | None = None
        self.on_reopen: Callable[[], None] | None = None
        self._tag = 0
        self._stopped = False
        self._arrived = asyncio.Event()

    def add(self, *messages: FakeDelivery) -> None:
        self.queue.extend(messages)
        self._arrived.set()

    def fail_fetch(self, *errors: BaseException) -> None:
        """Raise these, in turn, from the fetch that is pending and from those that follow."""
        self.fetch_faults.extend(errors)
        self._arrived.set()

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        assert not self.closed, "fetch after close"
        assert not self.fetching, "two fetches at once"
        assert limit >= 1
        assert max_bytes >= 1
        self.fetching = True
        self.limits.append(limit)
        try:
            await one_turn()
            while True:
                self._arrived.clear()
                if self.fetch_faults and (error := self.fetch_faults.popleft()) is not None:
                    raise error
                if self._stopped:
                    return ()
                if self.queue:
                    return [self._deliver(self.queue.popleft()) for _ in range(min(limit, len(self.queue)))]
                await self._arrived.wait()
        except asyncio.CancelledError:
            self.calls.append("fetch cancelled")
            raise
        finally:
            self.fetching = False

    def _deliver(self, message: FakeDelivery) -> FakeDelivery:
        self._tag += 1
        message = msgspec.structs.replace(message, tag=self._tag, lost=False, unit=None)
        self.out[self._tag] = message
        return message

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        assert not self.closed, "settle after close"
        assert not self.settling, "two settle calls at once"
        assert settlements, "an empty group"
        self.settling = True
        try:
            await (self.before_settle(settlements) if self.before_settle else one_turn())
            if self.settle_faults and (error := self.settle_faults.popleft()) is not None:
                raise error
            self.settled_in.append(len(settlements))
            answers = [answer for one in settlements if (answer := self._settle_one(one)) is not None]
            if self.late_settle_faults and (error := self.late_settle_faults.popleft()) is not None:
                raise error
            return answers
        finally:
            self.settling = False

    def _settle_one(self, settlement: Settlement) -> SettleError | None:
        delivery, outcome = settlement.delivery, settlement.outcome
        assert isinstance(delivery, FakeDelivery)
        assert outcome is not SETTLED
        if self.out.get(delivery.tag) is not delivery:
            return LeaseLost(delivery, "not ours any more")
        self.settlements.append(settlement)
        if isinstance(outcome, Retry):
            assert self.capabilities.retry, "this source cannot take a message back"
            assert outcome.after is not None
            del self.out[delivery.tag]
            again = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
            asyncio.get_running_loop().call_later(outcome.after, self.add, again)
        elif outcome is RELEASE:
            assert self.capabilities.release, "this source cannot take a message back"
            del self.out[delivery.tag]
            self.queue.appendleft(delivery)
            self._arrived.set()
        else:
            assert isinstance(outcome, Ack | Drop | DeadLetter)
            assert self.capabilities.dead_letter or not isinstance(outcome, DeadLetter)
            self.end(delivery, outcome)
        return None

    def end(self, delivery: FakeDelivery, outcome: Outcome) -> None:
        del self.out[delivery.tag]
        self.ended.setdefault(delivery.position, []).append(outcome)

    def lose_lane(self, lane: object) -> None:
        """All that is out of a lane moves elsewhere, here to the front of the queue, in order."""
        gone = sorted((d for d in self.out.values() if d.lane == lane), key=lambda d: d.position)
        for delivery in gone:
            delivery.lost = True
            del self.out[delivery.tag]
        self.queue.extendleft(reversed(gone))
        self._arrived.set()

    def lose(self, delivery: Delivery) -> None:
        """This delivery is not ours any more: somebody else gets it, here the queue."""
        assert isinstance(delivery, FakeDelivery)
        delivery.lost = True
        if self.out.pop(delivery.tag, None) is not None:
            self.add(delivery)

    async def reopen(self) -> None:
        assert not self.fetching, "reopened while a fetch is pending"
        self.calls.append("reopen")
        await one_turn()
        if self.reopen_faults and (error := self.reopen_faults.popleft()) is not None:
            raise error
        if self.on_reopen is not None:
            self.on_reopen()

    async def stop(self) -> None:
        self.calls.append("stop")
        self._stopped = True
        self._arrived.set()

    async def flush(self, deadline: float) -> None:
        self.calls.append("flush")

    async def close(self) -> None:
        self.calls.append("close")
        self.closed = True
        self.queue.extendleft(sorted(self.out.values(), key=lambda d: d.position, reverse=True))
        self.out.clear()

    @asynccontextmanager
    async def transaction(self, deliveries: Sequence[Delivery]) -> AsyncIterator[UnitOfWork]:
        if self.transaction_faults:
            raise self.transaction_faults.popleft()
        await one_turn()
        yield FakeUnit(self, [d for d in deliveries if isinstance(d, FakeDelivery)])

    def outcomes(self, kind: type[Outcome]) -> list[int]:
        """The positions that ended with an outcome of this kind."""
        return sorted(p for p, outcomes in self.ended.items() for one in outcomes if isinstance(one, kind))


class FakeConnection(Connection):
    def __init__(self, source: FakeSource) -> None:
        self.source = source
        self.published: list[Outgoing] = []
        self.publish_faults: deque[BaseException] = deque()

    async def open(self, subscription: Subscription) -> Source:
        return self.source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        await one_turn()
        if self.publish_faults:
            raise self.publish_faults.popleft()
        self.published += messages
        return ()

    async def check(self) -> Health:
        return Health(True)


def prepared(count: int, key: Callable[[int], str | None] | None = None, start: int = 0) -> list[FakeDelivery]:
    """`count` messages ``{"id": n}`` with a header ``tenant``; with `key`, each in a lane of it."""
    made = []
    for number in range(start, start + count):
        own = key(number) if key is not None else None
        headers = Headers({"tenant": f"t{number % 3}"})
        made.append(
            FakeDelivery(
                name="orders", body=b'{"id":%d}' % number, message_id=f"m{number}", key=own, lane=own,
                raw_headers=headers, position=number,
            )
        )  # fmt: skip
    return made


class Rig:
    """A running pump, its source, and what went wrong."""

    def __init__(self, pump: Pump, source: FakeSource, connection: FakeConnection) -> None:
        self.pump, self.source, self.connection = pump, source, connection
        self.failures: list[BaseException] = []
        self.drained = False

    async def all_ended(self, count: int, deadline: float = 15.0) -> None:
        """Until `count` messages have ended, and the pump knows it."""
        source, pump = self.source, self.pump
        await eventually(
            lambda: self.failures or (len(source.ended) >= count and not source.out and pump.in_flight == 0),
            deadline,
            f"{count} messages end",
        )
        assert not self.failures, self.failures
        self.at_rest()

    def at_rest(self) -> None:
        """Nothing is left behind in the pump."""
        pump = self.pump
        assert (pump.in_flight, pump.lanes.held, pump.lanes.parked) == (0, 0, 0)
        assert (pump.lanes.table, pump.lanes.waiting, list(pump.crew.ready)) == ({}, set(), [])
        assert pump.crew.running == 0

    async def drain(self, seconds: float = 5.0) -> None:
        if not self.drained:
            self.drained = True
            await self.pump.drain(asyncio.get_running_loop().time() + seconds)


@asynccontextmanager
async def pumping(
    handler: Callable[..., Any],
    source: FakeSource,
    *,
    policy: Policy | None = None,
    middleware: Sequence[Middleware] = (),
    state: dict[str, object] | None = None,
    batch: Batch | None = None,
    in_transaction: bool = False,
    wrap: Callable[[Any], Any] | None = None,
    ordered: bool = False,
    start: bool = True,
    alone: bool = True,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A pump over `source` for the life of the context; drained at its end. Fails if tasks are left over, where it is
    alone."""
    before = asyncio.all_tasks()
    connection = FakeConnection(source)
    compiled = compile_call(handler, JsonCodec(), "handler('orders')", batch=batch is not None)
    for name, value in (state or {}).items():
        compiled.bind(name, value)
    policy = policy or Policy()
    call = compose(compiled.call, middleware)
    if wrap is not None:
        call = wrap(call)
    if in_transaction:
        call = transactional(call, lambda: source, batch is not None)
    subscription = Subscription(
        "orders",
        ordered_by="key" if ordered else None,
        prefetch=options.get("prefetch") or 1000,
        attempts=policy.attempts,
    )

    async def put_aside(delivery: Delivery, outcome: DeadLetter) -> None:
        await connection.publish([dead_letter_of(delivery, outcome, "orders.dead", "default")])

    plan = Plan(
        where="handler('orders')", subscription=subscription, capabilities=source.capabilities, call=call,
        policy=policy, batch=batch, decode=compiled.decode, dead_letter=put_aside, **options,
    )  # fmt: skip
    failures: list[BaseException] = []
    rig = Rig(Pump(plan, failures.append), source, connection)
    rig.failures = failures
    await rig.pump.open(connection)
    if start:
        rig.pump.start()
    try:
        yield rig
    finally:
        await rig.drain()
    assert source.calls.count("close") == 1
    assert source.calls[-1] == "close"
    assert "fetch cancelled" not in source.calls, "nobody cancels a fetch"
    await turns(3)
    assert not alone or asyncio.all_tasks() <= before, "tasks are left over"


async def run_all(handler: Callable[..., Any], messages: Sequence[FakeDelivery], **options: Any) -> Rig:
    """Handle `messages` until each has ended; return the rig, drained."""
    source = FakeSource(messages, options.pop("capabilities", NATIVE))
    async with pumping(handler, source, **options) as rig:
        await rig.all_ended(len({m.position for m in messages}))
    return rig


def quick(attempts: int | None = None, **options: Any) -> Policy:
    """A policy whose pauses are over at once."""
    return Policy(attempts, Backoff(first=0.001, factor=1, max=0.001, jitter=False), **options)


def away(text: str = "the server is away") -> BrokerUnavailable:
    return BrokerUnavailable(text)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
