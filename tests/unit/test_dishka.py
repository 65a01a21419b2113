"""Dependencies by dishka: a scope a message, closed however the handler ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, NewType

import pytest
from dishka import (
    AsyncContainer,
    FromComponent,
    Provider,
    Scope,
    make_async_container,
    make_container,
    provide,
)

from streamfw import App, Attempt, Backoff, Batch, Header, Message, MessageBatch, Outcome, Retry, State, subscriber
from streamfw.codec import JsonCodec
from streamfw.handler import compile_call
from streamfw.integrations.dishka import FromDishka, MessageProvider, setup_dishka
from tests.helpers import eventually

from .rig import FakeUnit, prepared
from .test_app import FakeBroker

QUICK = Backoff(first=0.001, jitter=False)
Tenant = NewType("Tenant", str)


class Stock:
    """Of the whole app."""


class Session:
    """Of one message."""

    def __init__(self, stock: Stock, of: str) -> None:
        self.stock, self.of = stock, of


class Shop(Provider):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, str | None]] = []
        self.faults: list[BaseException] = []  # raised by the sessions to come
        self.closing_fault: BaseException | None = None

    @provide(scope=Scope.APP)
    def stock(self) -> Stock:
        return Stock()

    @provide(scope=Scope.REQUEST)
    async def session(self, stock: Stock, message: Message) -> AsyncIterator[Session]:
        if self.faults:
            raise self.faults.pop()
        self.log.append(("open", message.message_id, None))
        error = yield Session(stock, message.message_id)
        await asyncio.sleep(0)
        self.log.append(("close", message.message_id, None if error is None else type(error).__name__))
        if self.closing_fault is not None:
            raise self.closing_fault


class Batches(Provider):
    @provide(scope=Scope.REQUEST)
    def tenant(self, batch: MessageBatch) -> Tenant:
        return Tenant(f"batch of {len(batch.messages)}")


def with_shop(*handlers: Any, **options: Any) -> tuple[App, Shop]:
    shop = Shop()
    app = App(*handlers, **options)
    setup_dishka(make_async_container(shop, MessageProvider()), app)
    return app, shop


async def test_a_scope_for_each_message_and_one_for_the_app() -> None:
    found: list[tuple[int, Session, Session, Stock, str]] = []

    @subscriber("orders", workers=4)
    async def ship(
        session: FromDishka[Session],
        order: int,
        again: FromDishka[Session],
        tenant: Annotated[str, Header("tenant")],
        *,
        stock: FromDishka[Stock],
    ) -> None:
        found.append((order, session, again, stock, tenant))
        await asyncio.sleep(0)

    app, shop = with_shop(ship)
    async with app.running():
        for order in range(3):
            await app.publish("orders", order, message_id=f"m{order}", headers={"tenant": "t"})
        await eventually(lambda: len(shop.log) == 6)
    assert [order for order, *_ in found] == [0, 1, 2]
    assert all(one is again for _, one, again, _, _ in found), "one scope, one session"
    assert len({id(session) for _, session, *_ in found}) == 3
    assert {session.of for _, session, *_ in found} == {"m0", "m1", "m2"}
    assert len({id(stock) for *_, stock, _ in found} | {id(session.stock) for _, session, *_ in found}) == 1
    assert sorted(shop.log) == [(what, f"m{n}", None) for what in ("close", "open") for n in range(3)]


async def test_it_is_closed_after_an_error_which_it_learns_of() -> None:
    @subscriber("orders", attempts=2, backoff=QUICK)
    async def ship(order: int, message: Message, session: FromDishka[Session]) -> None:
        raise Retry(after=0) if message.attempt == 1 else ValueError

    app, shop = with_shop(ship)
    async with app.running():
        await app.publish("orders", 1, message_id="m")
        await eventually(lambda: app.pumps[0].counters.dead == 1)
    assert shop.log == [("open", "m", None), ("close", "m", "Retry"), ("open", "m", None), ("close", "m", "ValueError")]


async def test_it_is_closed_when_the_handler_is_cancelled() -> None:
    """By its timeout; and by the drain, where the message stays unsettled."""

    @subscriber("late", timeout=0.01, attempts=1)
    async def late(order: int, session: FromDishka[Session]) -> None:
        await asyncio.sleep(60)

    @subscriber("endless")
    async def endless(order: int, session: FromDishka[Session]) -> None:
        await asyncio.sleep(60)

    app, shop = with_shop(late, endless, drain_timeout=0.01)
    async with app.running():
        await app.publish("late", 1, message_id="late")
        await app.publish("endless", 1, message_id="endless")
        await eventually(lambda: ("open", "endless", None) in shop.log)
        await eventually(lambda: app.pumps[0].counters.dead == 1)
        counters = app.pumps[1].counters
    assert ("close", "late", "CancelledError") in shop.log
    assert ("close", "endless", "CancelledError") in shop.log
    assert counters.acked == 0


async def test_what_a_provider_raises_is_a_failure_of_the_message() -> None:
    handled = []

    @subscriber("orders", attempts=2, backoff=QUICK)
    async def ship(order: int, session: FromDishka[Session]) -> None:
        handled.append(order)

    app, shop = with_shop(ship)
    shop.faults = [ConnectionError("no database")]
    async with app.running():
        await app.publish("orders", 1)
        await eventually(lambda: handled == [1])
        assert app.pumps[0].counters.retried == 1
        shop.closing_fault = ConnectionError("no commit")
        await app.publish("orders", 2)
        await eventually(lambda: app.pumps[0].counters.dead == 1)
        assert app.pumps[0].counters.acked == 1, "its scope could not be closed: it has failed"


async def test_a_scope_for_a_batch() -> None:
    found = []

    @subscriber("orders", batch=Batch(3, wait=5))
    async def ship(orders: list[int], tenant: FromDishka[Tenant]) -> None:
        found.append((orders, tenant))

    app = App(ship)
    setup_dishka(make_async_container(Batches(), MessageProvider()), app)
    async with app.running():
        for order in range(3):
            await app.publish("orders", order)
        await eventually(lambda: found)
    assert found == [([0, 1, 2], "batch of 3")]


async def test_a_bad_body_opens_no_scope() -> None:
    @subscriber("orders")
    async def ship(order: dict[str, int], session: FromDishka[Session]) -> None: ...

    app, shop = with_shop(ship)
    async with app.running():
        await app.publish("orders", "text")
        await eventually(lambda: app.pumps[0].counters.dead == 1)
    assert shop.log == []


async def test_def_handlers_take_them_into_their_thread() -> None:
    found = []

    @subscriber("orders")
    def ship(order: int, session: FromDishka[Session]) -> None:
        found.append((order, session.of))

    app, shop = with_shop(ship)
    async with app.running():
        await app.publish("orders", 7, message_id="m")
        await eventually(lambda: len(shop.log) == 2)
    assert found == [(7, "m")]


async def test_within_the_transaction_and_beside_state_and_components() -> None:
    class Unit(Provider):
        component = "db"

        @provide(scope=Scope.REQUEST)
        def unit(self, message: Annotated[Message, FromComponent("")]) -> FakeUnit:
            return message.unit  # type: ignore[attr-defined, no-any-return]

    async def lifespan() -> AsyncIterator[Stock]:
        yield Stock()

    found: list[tuple[object, object, int]] = []
    ends: list[str] = []

    @subscriber("orders", transactional=True)
    async def ship(
        order: int,
        unit: Annotated[FakeUnit, FromComponent("db")],
        stock: Annotated[Stock, State],
        attempt: Annotated[int, Attempt],
    ) -> None:
        found.append((unit, stock, attempt))
        ends.append("finished" if unit.finished else "open")

    broker = FakeBroker()
    app = App(ship, brokers={"default": broker}, lifespan=lifespan)
    setup_dishka(make_async_container(Unit(), MessageProvider()), app)
    async with app.running():
        (message,) = prepared(1)
        message.body = b"1"
        broker.sources["orders"].add(message)
        await eventually(lambda: found and isinstance(found[0][0], FakeUnit) and found[0][0].finished)
    ((unit, stock, attempt),) = found
    assert (type(unit), type(stock), attempt, ends) == (FakeUnit, Stock, 1, ["open"])


# -- at build


def mistakes(app: App) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        app.build()
    return "\n".join(str(error) for error in caught.value.exceptions)


class Other: ...


def test_what_the_container_does_not_have_is_found_at_build() -> None:
    @subscriber("orders")
    async def ship(order: int, other: FromDishka[Other], session: Annotated[Session, FromComponent("x")]) -> None: ...

    app, _ = with_shop(ship)
    told = mistakes(app)
    assert "parameter 'other': the container provides no" in told
    assert "Other" in told
    assert "parameter 'session': the container provides no" in told
    assert "in component 'x'" in told


def test_what_is_below_a_message_is_found_too() -> None:
    class Step(Provider):
        @provide(scope=Scope.STEP)
        def stock(self) -> Stock:
            return Stock()

    @subscriber("orders")
    async def ship(order: int, stock: FromDishka[Stock]) -> None: ...

    app = App(ship)
    setup_dishka(make_async_container(Step()), app)
    assert "up to its REQUEST scope" in mistakes(app)


def test_the_container_itself_can_be_taken_and_containers_above_count() -> None:
    @subscriber("orders")
    async def ship(order: int, container: FromDishka[AsyncContainer], stock: FromDishka[Stock]) -> None: ...

    app, _ = with_shop(ship)
    app.build()


def test_without_setup_it_is_a_second_body() -> None:
    @subscriber("orders")
    async def ship(order: int, stock: FromDishka[Stock]) -> None: ...

    assert "both look like the body" in mistakes(App(ship))


def test_a_process_cannot_take_them() -> None:
    app, _ = with_shop(in_a_process)
    assert "parameter 'stock': what is injected stays in the app's own process" in mistakes(app)


@subscriber("orders", run_in="process")
def in_a_process(order: int, stock: FromDishka[Stock]) -> None: ...


def test_a_container_that_is_not_async() -> None:
    with pytest.raises(TypeError, match="make_async_container"):
        setup_dishka(make_container(), App())  # type: ignore[arg-type]


def test_a_handler_without_them_is_compiled_as_ever() -> None:
    @subscriber("orders")
    async def ship(order: int, message: Message) -> None: ...

    app, _ = with_shop(ship)
    (built,) = app.build().subscribers
    without = compile_call(ship, JsonCodec(), "ship")
    code = [getattr(one.call, "__code__").co_code for one in (built.compiled, without)]  # noqa: B009
    assert code[0] == code[1]
    assert "_inject" not in built.compiled.names


async def test_an_injector_of_ones_own_beside_it() -> None:
    """The seam that dishka uses is anybody's, and several may be there."""

    class Clock:
        def key(self, parameter: Any, hint: Any) -> object | None:
            return "now" if hint is Clock else None

        async def call(self, message: Message, keys: Any, handler: Any) -> Any:
            return await handler([self for _ in keys])

    found: list[object] = []

    @subscriber("orders")
    async def ship(clock: Clock, order: int, session: FromDishka[Session]) -> Outcome | None:
        found.append((type(clock), order, session.of))
        return None

    ship.__annotations__["clock"] = Clock
    app, _ = with_shop(ship)
    app.inject(Clock())
    async with app.running():
        await app.publish("orders", 1, message_id="m")
        await eventually(lambda: found)
    assert found == [(Clock, 1, "m")]
