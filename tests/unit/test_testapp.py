"""TestApp on memory: what is run, what is seen, what is raised, and what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, assert_type

import msgspec
import pytest

from streamfw import (
    Ack,
    App,
    Attempt,
    Backoff,
    Batch,
    BuildError,
    DeadLetter,
    DecodeError,
    DeliveryField,
    Drop,
    Header,
    Message,
    NotRunning,
    PartialFailure,
    Publisher,
    Retry,
    State,
    UnitConnection,
    subscriber,
)
from streamfw.memory import MemoryBroker
from streamfw.message import Headers
from streamfw.testing import NotSettled, Published, Received, TestApp
from streamfw_kafka import Topic
from tests.helpers import eventually


class Order(msgspec.Struct):
    id: int
    item: str = "tea"


class Receipt(msgspec.Struct):
    order: int


class Boom(Exception):
    pass


Transaction = Annotated[object, UnitConnection]
Offset = Annotated[int, DeliveryField("offset")]


# ------------------------------------------------------------------ running, and what is seen


async def test_publishes_drive_the_whole_cascade() -> None:
    @subscriber("orders", publishes="receipts")
    async def ship(order: Order) -> Receipt:
        return Receipt(order.id)

    @subscriber("receipts")
    async def archive(receipt: Receipt, archive: Annotated[Publisher[dict[str, int]], "archive"]) -> None:
        for number in range(3):
            await archive.publish({"order": receipt.order, "copy": number}, key="k", headers={"h": "1"})

    @subscriber("archive", workers=2)
    async def keep(copy: dict[str, int]) -> None:
        await asyncio.sleep(0.01)

    async with TestApp(App(ship, archive, keep)) as tb:
        message_id = await tb.publish("orders", Order(7), key="k7", headers={"tenant": "t"})
        await tb.settle()
        [shipped] = tb.assert_acked(ship, times=1)
        assert shipped.value == Order(7) and shipped.error is None and isinstance(shipped.outcome, Ack)
        assert shipped.message.message_id == message_id and shipped.message.attempt == 1
        assert shipped.message.key == "k7" and shipped.message.headers["tenant"] == "t"
        [receipt] = tb.published("receipts", Receipt)
        assert receipt.value == Receipt(7) and receipt.message.key == "k7" and receipt.broker == "default"
        tb.assert_acked(keep, times=3)
        copies = tb.published("archive")
        assert [one.value for one in copies] == [{"order": 7, "copy": n} for n in range(3)]
        assert copies[0].message.headers["h"] == "1" and copies[0].message.delay == 0


async def test_subscribers_are_found_by_handler_name_and_source() -> None:
    @subscriber("orders")
    async def ship(order: Order) -> None: ...

    @subscriber("orders", group="billing")
    async def bill(order: Order) -> None: ...

    async with TestApp(App(ship, bill)) as tb:
        await tb.publish("orders", Order(1))
        await tb.settle()
        assert len(tb.received(ship)) == len(tb.received("ship")) == len(tb.received("bill")) == 1
        assert [one.subscriber.rpartition(".")[2] for one in tb.received("orders")] == [
            "ship('orders')",
            "bill('orders')",
        ]
        assert tb.received(ship, dict[str, Any])[0].value == {"id": 1, "item": "tea"}
        with pytest.raises(LookupError, match="did you mean 'ship'"):
            tb.received("shipp")
        with pytest.raises(LookupError, match="known are ship, bill, orders"):
            tb.received(test_subscribers_are_found_by_handler_name_and_source)
        assert tb.published("nothing") == []
    tb.assert_acked(ship, times=1)  # looking is possible afterwards


@pytest.mark.parametrize("how", ["return", "raise"])
async def test_outcomes_are_no_errors(how: str) -> None:
    outcomes = {1: Ack(), 2: Drop(), 3: DeadLetter("broken tea"), 4: Retry(after=60)}

    @subscriber("orders")
    async def ship(order: Order) -> object:
        if how == "raise":
            raise outcomes[order.id]
        return outcomes[order.id]

    async with TestApp(App(ship)) as tb:
        for number in outcomes:
            await tb.publish("orders", Order(number))
        await tb.settle()
        tb.assert_acked(ship, times=1)
        tb.assert_dropped(ship, times=1)
        [retried] = tb.assert_retried(ship, times=1)
        assert isinstance(retried.outcome, Retry) and retried.outcome.after == 60 and retried.error is None
        [dead] = tb.assert_dead_lettered(ship, reason="broken")
        assert dead.value == Order(3) and tb.dead_letters("orders") == [dead]
        assert tb.dead_letters(ship, Order)[0].value.id == 3


async def test_what_a_value_is_when_nothing_decodes_it() -> None:
    @subscriber("orders")
    async def ship(order: Order) -> None: ...

    @subscriber("raw")
    async def look(message: Message) -> None: ...

    async with TestApp(App(ship, look)) as tb:
        await tb.publish("raw", {"a": 1})
        with tb.expect(DecodeError):
            await tb.publish("orders", b"{")
            await tb.settle()
        [bad] = tb.dead_letters(ship)
        assert bad.value == b"{" and isinstance(bad.error, DecodeError)
        [seen] = tb.received(look)
        assert isinstance(seen.value, Message) and seen.value.body == b'{"a":1}'


async def test_batches_come_at_once_and_each_element_by_itself() -> None:
    sizes: list[int] = []

    @subscriber("orders", batch=Batch(100, wait=60), attempts=1)
    async def ship(orders: list[Order]) -> None:
        sizes.append(len(orders))
        raise PartialFailure({1: Boom("the second")})

    @subscriber("lists", batch=Batch(2))
    async def each(orders: list[Order]) -> list[Drop | None]:
        return [None, Drop()]

    async with TestApp(App(ship, each)) as tb:
        with tb.expect(Boom, match="second") as errors, tb.expect(DecodeError):
            for order in (Order(1), Order(2), "no order", Order(3)):
                await tb.publish("orders", order)
            await tb.settle()
        assert sizes == [3] and len(errors) == 1
        assert [one.value.id for one in tb.assert_acked(ship, times=2)] == [1, 3]
        assert [one.value for one in tb.dead_letters(ship)] == [b'"no order"', Order(2)] or [
            one.value for one in tb.dead_letters(ship)
        ] == [Order(2), b'"no order"']
        await tb.publish("lists", Order(1))
        await tb.publish("lists", Order(2))
        await tb.settle()
        assert tb.assert_acked(each, times=1)[0].value == Order(1)
        assert tb.assert_dropped(each, times=1)[0].value == Order(2)


async def test_middleware_runs_and_its_errors_are_the_handlers() -> None:
    seen: list[str] = []

    async def outer(message: Message, call_next: Callable[[Message], Awaitable[object]]) -> object:
        seen.append(message.message_id)
        if message.headers.get("refused"):
            raise Boom("refused")
        return await call_next(message)

    @subscriber("orders", attempts=1)
    async def ship(order: Order, tenant: Annotated[str, Header("tenant")] = "none") -> None: ...

    async with TestApp(App(ship, middleware=[outer])) as tb:
        await tb.publish("orders", Order(1))
        await tb.settle()
        assert len(seen) == 1
        await tb.publish("orders", Order(2), headers={"refused": "yes"})
        with pytest.raises(Boom):
            await tb.settle()
        tb.assert_dead_lettered(ship, times=1, reason="Boom")


async def test_handlers_in_threads_are_waited_for() -> None:
    @subscriber("orders", publishes="receipts")
    def ship(order: Order) -> Receipt:
        time.sleep(0.01)
        return Receipt(order.id)

    async with TestApp(App(ship)) as tb:
        await tb.publish("orders", Order(1))
        await tb.settle()
        tb.assert_acked(ship, times=1)
        tb.assert_published("receipts", Receipt(1), times=1)


async def test_what_the_lifespan_publishes_is_seen() -> None:
    @subscriber("orders")
    async def ship(order: Order) -> None: ...

    async def lifespan(app: App) -> AsyncIterator[None]:
        await app.publish("orders", Order(1))
        yield

    async with TestApp(App(ship, lifespan=lifespan)) as tb:
        await tb.settle()
        tb.assert_published("orders", Order(1), times=1)
        tb.assert_acked(ship, times=1)


async def test_what_type_checkers_see() -> None:
    @subscriber("orders")
    async def ship(order: Order) -> None: ...

    async with TestApp(App(ship)) as tb:
        assert_type(tb, TestApp)
        assert_type(tb.received(ship), list[Received[Any]])
        assert_type(tb.received(ship, Order), list[Received[Order]])
        assert_type(tb.dead_letters("orders", Order), list[Received[Order]])
        assert_type(tb.published("orders", Order), list[Published[Order]])


async def test_a_request_is_answered() -> None:
    @subscriber("double")
    async def double(number: int) -> int:
        return 2 * number

    app = App(double)
    async with TestApp(app) as tb:
        assert await asyncio.gather(*(app.request("double", n, int) for n in range(20))) == [2 * n for n in range(20)]
        await tb.settle()
        tb.assert_acked(double, times=20)


# ------------------------------------------------------------------ errors


async def test_an_error_surfaces_as_it_was_raised() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    async with TestApp(App(ship)) as tb:
        message_id = await tb.publish("orders", Order(1))
        with pytest.raises(Boom, match="order 1") as caught:
            await tb.settle()
        assert caught.traceback[-1].name == "copy" and str(caught.traceback[-1].path) == __file__
        [note] = caught.value.__notes__
        assert "('orders')" in note and message_id in note and "attempt 1" in note and "DeadLetter" in note
        assert tb.received(ship)[0].error is caught.value
        await tb.settle()  # it was seen


def failing_copy() -> Callable[[Order], Awaitable[None]]:
    async def copy(order: Order) -> None:
        raise Boom(f"order {order.id}")

    return copy


async def test_several_errors_come_as_a_group() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    async with TestApp(App(ship)) as tb:
        for number in range(3):
            await tb.publish("orders", Order(number))
        with pytest.raises(ExceptionGroup, match="3 handlers raised") as caught:
            await tb.settle()
        assert [str(error) for error in caught.value.exceptions] == ["order 0", "order 1", "order 2"]


async def test_expected_errors_pass_and_others_do_not() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    async with TestApp(App(ship)) as tb:
        with tb.expect((Boom, KeyError), match="order [12]") as errors:
            for number in (1, 2, 3):
                await tb.publish("orders", Order(number))
            with pytest.raises(Boom, match="order 3"):
                await tb.settle()
        assert [str(error) for error in errors] == ["order 1", "order 2"]
        nothing = "no handler raised KeyError matching 'x'; was there an"
        with pytest.raises(AssertionError, match=nothing), tb.expect(KeyError, match="x"):
            await tb.settle()
        other = r"no handler raised KeyError, but Boom\('order 4'\)"
        with pytest.raises(AssertionError, match=other), tb.expect(KeyError):  # noqa: PT012
            await tb.publish("orders", Order(4))
            await eventually(lambda: len(tb.dead_letters(ship)) == 4)
        with pytest.raises(Boom, match="order 4"):
            await tb.settle()


async def test_errors_are_not_raised_when_nobody_wants_them() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    async with TestApp(App(ship), raise_errors=False) as tb:
        await tb.publish("orders", Order(1))
        await tb.settle()
        assert isinstance(tb.dead_letters(ship)[0].error, Boom)


async def test_leaving_raises_what_the_test_has_not_seen() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    with pytest.raises(Boom, match="order 1"):  # noqa: PT012
        async with TestApp(App(ship)) as tb:
            await tb.publish("orders", Order(1))
            await eventually(lambda: tb.dead_letters(ship))


async def test_a_failing_test_is_told_what_handlers_raised() -> None:
    ship = subscriber("orders", attempts=1)(failing_copy())
    with pytest.raises(AssertionError, match="mine") as caught:  # noqa: PT012
        async with TestApp(App(ship)) as tb:
            await tb.publish("orders", Order(1))
            await eventually(lambda: tb.dead_letters(ship))
            raise AssertionError("mine")
    assert "meanwhile: Boom('order 1')" in caught.value.__notes__[0]


async def test_not_settling_says_what_still_runs() -> None:
    release = asyncio.Event()

    @subscriber("orders", workers=2)
    async def ship(order: Order) -> None:
        await release.wait()

    @subscriber("stuck", batch=Batch(10, wait=60))
    async def pile(orders: list[Order]) -> None:
        await release.wait()

    async with TestApp(App(ship, pile)) as tb:
        ids = [await tb.publish("orders", Order(number)) for number in range(3)]
        piled = await tb.publish("stuck", Order(9))
        with pytest.raises(NotSettled) as caught:
            await tb.settle(timeout=0.05)
        text = str(caught.value)
        assert text.startswith("not settled within 0.05 s:")
        assert ids[0] in text and ids[1] in text and ids[2] not in text and piled in text
        assert "ship('orders') has 1 more messages at hand" in text
        assert f"{__file__}:" in text and " in ship" in text
        release.set()
        await tb.settle()


async def test_an_endless_cascade_is_not_settled() -> None:
    @subscriber("orders", publishes="orders")
    async def again(order: Order) -> Order:
        return order

    async with TestApp(App(again)) as tb:
        await tb.publish("orders", Order(1))
        with pytest.raises(NotSettled, match="again"):
            await tb.settle(timeout=0.05)


async def test_the_end_of_the_app_is_raised() -> None:
    @subscriber("orders")
    async def ship(order: Order) -> None: ...

    async with TestApp(App(ship)) as tb:
        tb.app.pumps[0].fail(Boom("the source broke"))
        with pytest.raises(Boom, match="the source broke"):
            await tb.settle()
        with pytest.raises(Boom, match="the source broke"):
            await tb.publish("orders", Order(1))
    with pytest.raises(Boom, match="unseen"):
        async with TestApp(App(ship)) as tb:
            tb.app.pumps[0].fail(Boom("unseen"))


# ------------------------------------------------------------------ assertions say what there was


async def test_a_failing_assertion_lists_what_there_was() -> None:
    @subscriber("orders", publishes="receipts")
    async def ship(order: Order, attempt: Annotated[int, Attempt]) -> Receipt:
        if order.id == 2:
            raise Retry(after=30)
        return Receipt(order.id)

    async with TestApp(App(ship)) as tb:
        with pytest.raises(AssertionError, match="received nothing; was there an"):
            tb.assert_acked(ship)
        await tb.publish("orders", Order(1), key="k")
        await tb.publish("orders", Order(2))
        await tb.settle()
        with pytest.raises(AssertionError) as caught:
            tb.assert_acked(ship, times=2)
        text = str(caught.value)
        assert "1 deliveries to" in text and "were acknowledged, not 2:" in text
        assert "attempt 1 key='k': Order(id=1, item='tea') -> Ack()" in text and "-> Retry(30)" in text
        with pytest.raises(AssertionError, match="put to the dead letter with 'late' in the reason, not at least one"):
            tb.assert_dead_lettered(ship, reason="late")
        tb.assert_published("receipts", Receipt(1), times=1)
        tb.assert_published("receipts", {"order": 1})
        tb.assert_published("receipts", Receipt(3), times=0)
        with pytest.raises(
            AssertionError, match=r"0 messages equal to Receipt\(order=3\).*'receipts', not at least one:"
        ):
            tb.assert_published("receipts", Receipt(3))
        with pytest.raises(AssertionError, match="published to were: 'orders', 'receipts'"):
            tb.assert_published("receits")


# ------------------------------------------------------------------ the app, before and after


async def test_the_app_is_left_as_it_was() -> None:
    receipts = Publisher[Receipt]("receipts")
    broker = MemoryBroker()

    @subscriber("orders")
    async def ship(order: Order) -> None:
        await receipts.publish(Receipt(order.id))

    app = App(ship, brokers={"default": broker, "second": "memory://"}, publishers=[receipts])
    settings = ("_handlers", "_brokers", "_built", "_lifespan", "_settings", "_on_connect", "_publishers", "_life")
    untouched = {name: vars(app)[name] for name in settings}
    with pytest.raises(Boom):  # noqa: PT012
        async with TestApp(app) as tb:
            assert app.broker() is not broker and app.broker("second").describe().startswith("memory://")
            raise Boom
    assert {name: vars(app)[name] for name in settings} == untouched
    assert app.state == () and not app.pumps
    with pytest.raises(NotRunning, match="belongs to no app"):
        await receipts.publish(Receipt(1))
    built = app.build()
    for _ in range(3):
        async with TestApp(app) as tb:
            await tb.publish("orders", Order(1))
            await tb.settle()
            tb.assert_published("receipts", times=1)
            tb.assert_acked(ship, times=1)
    assert app.build() is built and app.broker() is broker
    async with app.running():
        await app.publish("orders", Order(1))
    assert len(tb.received(ship)) == 1


async def test_a_source_of_another_broker_runs_by_its_name() -> None:
    class Queue(msgspec.Struct, frozen=True):
        name: str

    @subscriber(Queue("orders"), broker="shop", ordered_by="partition", workers=4)
    async def ship(order: Order) -> None:
        order_of.append(order.id)
        await asyncio.sleep(0.002 * (3 - order.id))

    order_of: list[int] = []
    app = App(ship, brokers={"shop": "postgres://nobody@nowhere.invalid/shop"})
    async with TestApp(app) as tb:
        for number in range(4):
            await tb.publish("orders", Order(number), broker="shop", key=str(number))
        await tb.settle()
        assert order_of == [0, 1, 2, 3] and [one.value.id for one in tb.received(ship)] == [0, 1, 2, 3]


class Bound(msgspec.Struct, frozen=True):
    """A source object that takes what was published to `via` with a key in `keys`, and what has the header `tenant`."""

    name: str
    via: str = "events"
    keys: tuple[str | None, ...] = ()
    tenant: str = ""
    wrong: str = ""

    def route(self, name: str) -> Callable[[str | None, Headers], bool] | None:
        if self.wrong:
            raise ValueError(self.wrong)
        return {self.via: self._takes, "all": lambda key, headers: True}.get(name)

    def _takes(self, key: str | None, headers: Headers) -> bool:
        return key in self.keys or (bool(self.tenant) and headers.get("tenant") == self.tenant)


async def test_a_source_that_says_by_which_names_messages_reach_it() -> None:
    async def take(order: Order) -> None:
        if order.id == 9:
            raise Boom

    def taking(name: str, source: object, **options: Any) -> Any:
        async def taking(order: Order) -> None:
            await take(order)

        taking.__name__ = name
        return subscriber(source, **options)(taking)

    app = App(
        taking("one", Bound("one", keys=("a", "b")), attempts=1),
        taking("two", Bound("two", keys=("b", None), tenant="tea"), group="others"),
        taking("same", Bound("events", via="elsewhere")),
        taking("plain", "elsewhere"),
        taking("dead", Bound("dead", via="one.dead", keys=("a",))),
        brokers={"default": "postgres://nobody@nowhere.invalid/shop"},
    )
    async with TestApp(app) as tb:
        options: list[dict[str, Any]] = [{"key": "a"}, {"key": "b"}, {}, {"key": "c"}, {"headers": {"tenant": "tea"}}]
        for number, given in enumerate(options):
            await tb.publish("events", Order(number), **given)
        for number, name in enumerate(("one", "elsewhere", "all"), 5):
            await tb.publish(name, Order(number))
        await tb.publish("events", Order(9), key="a")
        with tb.expect(Boom):
            await tb.settle()

        def ids(who: str) -> list[int]:
            return [one.value.id for one in tb.received(who)]

        assert {who: ids(who) for who in ("one", "two", "same", "plain", "dead")} == {
            "one": [0, 1, 5, 7, 9],
            "two": [1, 2, 4, 7],
            "same": [7],  # its own name leads elsewhere
            "plain": [6],
            "dead": [7, 9],
        }
        assert {one.message.name for one in tb.received("one")} == {"one"}


async def test_a_topic_by_a_pattern_takes_from_all_that_match_it() -> None:
    async def each(order: Order) -> None:
        if order.id == 5:
            raise Boom

    async def europe(order: Order) -> None: ...

    app = App(
        subscriber(Topic("each", pattern="orders.*|other"), dead_letter="orders.dead", attempts=1)(each),
        subscriber(Topic("orders.eu"))(europe),
        brokers={"default": "kafka://nowhere"},
    )
    async with TestApp(app) as tb:
        for number, name in enumerate(("orders.eu", "orders", "my.orders", "other", "others", "orders.us")):
            await tb.publish(name, Order(number))
        with tb.expect(Boom):
            await tb.settle()
        assert [one.value.id for one in tb.received(each)] == [0, 1, 3, 5]
        assert [one.value.id for one in tb.received(europe)] == [0]


async def test_a_source_that_cannot_say_it_is_a_mistake() -> None:
    async def take(order: Order) -> None: ...

    with pytest.raises(ExceptionGroup, match="no such thing"):
        async with TestApp(App(subscriber(Bound("one", wrong="no such thing"))(take))):
            pass


async def test_what_memory_cannot_honour_is_refused() -> None:
    @subscriber("orders", transactional=True)
    async def ship(order: Order, transaction: Transaction) -> None: ...

    @subscriber("log")
    async def follow(order: Order, offset: Offset) -> None: ...

    with pytest.raises(ExceptionGroup, match=r"transactional=True: memory has no transactions.*live=True"):
        async with TestApp(App(ship)):
            pass
    with pytest.raises(ExceptionGroup) as caught:
        async with TestApp(App(follow)):
            pass
    assert isinstance(caught.value.exceptions[0], BuildError) and "'offset'" in str(caught.value.exceptions[0])
    with pytest.raises(ValueError, match="live=True"):
        TestApp(App(ship), live=True, transaction=lambda: asynccontextmanager(_nothing)())


async def _nothing() -> AsyncIterator[object]:
    yield None


@pytest.mark.parametrize("batch", [None, Batch(2, wait=60)])
async def test_a_transaction_of_the_tests_own(batch: Batch | None) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def transaction() -> AsyncIterator[list[str]]:
        writes: list[str] = []
        try:
            yield writes
        except BaseException:
            log.append(f"rolled back {writes}")
            raise
        log.append(f"committed {writes}")

    async def write(order: Order, transaction: Transaction) -> object:
        assert isinstance(transaction, list)
        transaction.append(order.item)
        if order.item == "bad":
            raise Boom
        return {"ack": Ack(), "later": Retry(after=5), "drop": Drop()}.get(order.item)

    @subscriber("orders", transactional=True, attempts=1, batch=batch)
    async def many(orders: list[Order], transaction: Transaction) -> object:
        return await write(orders[0], transaction)

    one = subscriber("orders", transactional=True, attempts=2)(write)
    ship: Any = one if batch is None else many
    async with TestApp(App(ship), transaction=transaction) as tb:
        for item in ("tea", "ack"):
            await tb.publish("orders", Order(1, item))
            await tb.settle()
        tb.assert_acked(ship, times=2)
        assert log == ["committed ['tea']", "committed ['ack']"]
        await tb.publish("orders", Order(1, "drop"))
        await tb.settle()
        tb.assert_dropped(ship, times=1)
        with tb.expect(Boom):
            await tb.publish("orders", Order(1, "bad"))
            await tb.settle()
        assert log[2:] == ["rolled back ['drop']", "rolled back ['bad']"]


async def test_a_transaction_that_cannot_commit_or_swallows_errors() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[str]:
        try:
            yield "connection"
        except Boom:
            return  # swallowed
        raise ConnectionError("no commit")

    @subscriber("orders", transactional=True)
    async def ship(order: Order, transaction: Transaction) -> None:
        if order.id == 2:
            raise Boom

    async with TestApp(App(ship), transaction=broken) as tb:
        for number, error in ((1, ConnectionError), (2, Boom)):
            with tb.expect(error):
                await tb.publish("orders", Order(number))
                await tb.settle()
        tb.assert_retried(ship, times=2)


class Pool:
    def name(self) -> str:
        return "real"


class FakePool(Pool):
    def name(self) -> str:
        return "fake"


class Duck:
    def name(self) -> str:
        return "duck"


@pytest.mark.parametrize(
    ("state", "name"), [(None, "real"), ((FakePool(),), "fake"), ({Pool: Duck()}, "duck"), ([3, FakePool()], "fake")]
)
async def test_state_takes_the_place_of_the_lifespan(state: Any, name: str) -> None:
    opened: list[str] = []
    names: list[str] = []

    async def lifespan() -> AsyncIterator[Pool]:
        opened.append("open")
        yield Pool()
        opened.append("close")

    @subscriber("orders")
    async def ship(order: Order, pool: Annotated[Pool, State]) -> None:
        names.append(pool.name())

    app = App(ship, lifespan=lifespan)
    async with TestApp(app, state=state) as tb:
        await tb.publish("orders", Order(1))
        await tb.settle()
    assert names == [name]
    assert opened == (["open", "close"] if state is None else [])


@pytest.mark.parametrize("state", [(), (Duck(),), {Duck: Duck()}])
async def test_state_that_is_missing(state: Any) -> None:
    @subscriber("orders")
    async def ship(order: Order, pool: Annotated[Pool, State]) -> None: ...

    app = App(ship)
    with pytest.raises(ExceptionGroup) as caught:
        async with TestApp(app, state=state):
            pass
    assert "state=" in str(caught.value.exceptions[0]) and "'pool'" in str(caught.value.exceptions[0])
    async with TestApp(app, state={Pool: Duck()}):
        pass


async def test_a_lifespan_that_fails_leaves_the_app_as_it_was() -> None:
    async def lifespan() -> AsyncIterator[int]:
        if app.broker():
            raise Boom("no database")
        yield 1

    app = App(lifespan=lifespan)
    with pytest.raises(Boom, match="no database"):
        async with TestApp(app):
            pass
    assert app.broker().describe() == "memory://"
    async with TestApp(app, state=()):
        pass


async def test_one_app_is_in_one_testapp_and_a_testapp_is_entered_once() -> None:
    app = App()
    with pytest.raises(NotRunning, match="was not entered"):
        TestApp(app).published("x")
    with pytest.raises(NotRunning, match="not entered"):
        await TestApp(app).settle()
    async with TestApp(app) as tb:
        with pytest.raises(NotRunning, match="in a TestApp"):
            async with TestApp(app):
                pass
        await tb.settle()
    with pytest.raises(NotRunning, match="nothing runs any more"):
        await tb.settle()
    with pytest.raises(NotRunning, match="entered once"):
        async with tb:
            pass
    async with app.running():
        with pytest.raises(NotRunning, match="runs already"):
            async with TestApp(app):
                pass


async def test_the_applications_mistakes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    @subscriber("orders", workers=0)
    async def ship(order: Order) -> None: ...

    with pytest.raises(ExceptionGroup, match="the app cannot be built"):
        async with TestApp(App(ship)):
            pass
    monkeypatch.setenv("STREAMFW_NONSENSE", "1")
    with pytest.raises(ExceptionGroup, match="nonsense: unknown option"):
        async with TestApp(App()):
            pass


def test_outside_of_asyncio_it_says_so() -> None:
    from streamfw import Unsupported

    with pytest.raises(Unsupported, match="runs on asyncio"):
        TestApp(App()).__aenter__().send(None)


def test_the_public_names_are_there() -> None:
    from streamfw import testing

    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'TestBroker'"):
        testing.TestBroker  # noqa: B018


async def test_a_handler_that_hangs_is_cancelled_at_the_end() -> None:
    ended: list[str] = []

    @subscriber("orders", backoff=Backoff(first=1))
    async def ship(order: Order) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with TestApp(App(ship, drain_timeout=0.01)) as tb:
        await tb.publish("orders", Order(1))
        await eventually(lambda: tb.received(ship))
    assert ended == ["cancelled"]
    assert tb.received(ship)[0].outcome is None
