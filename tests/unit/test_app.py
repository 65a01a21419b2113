"""The life of an app: lifespans, starting, publishing, health, failing, ending."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, NamedTuple, Protocol

import pytest

from streamfw import (
    App,
    Broker,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    Connection,
    Health,
    Message,
    NotRunning,
    Outgoing,
    Publisher,
    PublishError,
    Rejected,
    Source,
    State,
    Subscription,
    subscriber,
)
from streamfw.middleware import Next
from tests.helpers import eventually

from .rig import NATIVE, FakeSource, Order, away, prepared


class FakeBroker(Broker):
    """Connects when `faults` are used up; `hang`: an attempt that never answers. Each subscription has a source."""

    capabilities = NATIVE

    def __init__(self, *faults: BaseException, hang: bool = False) -> None:
        super().__init__("fake://user:hidden@host")
        self.faults = deque(faults)
        self.open_faults: deque[BaseException] = deque()
        self.hang = hang
        self.attempts = 0
        self.sources: dict[str, FakeSource] = {}
        self.log: list[str] = []

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        self.attempts += 1
        if self.faults:
            raise self.faults.popleft()
        if self.hang:
            await asyncio.sleep(60)
        self.log.append("connected")
        try:
            yield FakeBrokerConnection(self)
        finally:
            self.log.append("closed")


class FakeBrokerConnection(Connection):
    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker

    async def open(self, subscription: Subscription) -> Source:
        if self.broker.open_faults:
            raise self.broker.open_faults.popleft()
        source = self.broker.sources[subscription.name] = FakeSource([])
        return source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        return ()

    async def check(self) -> Health:
        return Health(True)


class Pool:
    closed = False


class Both(NamedTuple):
    pool: Pool
    text: str


class Closing(Protocol):
    def close(self) -> None: ...


def ordering(name: str = "orders", **options: Any) -> Callable[..., Any]:
    @subscriber(name, **options)
    async def ship(order: Order) -> None: ...

    return ship


# -- lifespans


async def test_forms_of_a_lifespan() -> None:
    log: list[object] = []

    async def generator() -> AsyncIterator[Pool]:
        log.append("begin")
        yield Pool()
        log.append("end")

    async def with_app(app: App) -> AsyncIterator[Pool]:
        assert app.publish is not None
        await app.publish("started", 1)
        yield Pool()
        await app.publish("ended", 1)

    @asynccontextmanager
    async def manager() -> AsyncIterator[Pool]:
        yield Pool()

    @asynccontextmanager
    async def manager_with_app(app: App) -> AsyncIterator[Pool]:
        assert isinstance(app, App)
        yield Pool()

    async def with_default(size: int = 7) -> AsyncIterator[Pool]:
        assert size == 7, "it is not the app that it asks for"
        yield Pool()

    class Manager:
        async def __aenter__(self) -> Pool:
            return Pool()

        async def __aexit__(self, *error: object) -> None:
            log.append("class end")

    seen: list[object] = []
    for lifespan in (generator, with_app, manager, manager_with_app, with_default, Manager):

        @subscriber("orders")
        async def ship(order: Order, pool: Annotated[Pool, State]) -> None:
            seen.append(pool)

        app = App(ship, lifespan=lifespan)
        async with app.running():
            await app.publish("orders", Order(1))
            await eventually(lambda: seen)
            assert seen.pop() is app.state[0]
        assert app.state == ()
    assert log == ["begin", "end", "class end"]


async def test_several_values() -> None:
    async def of_tuple() -> AsyncIterator[tuple[Pool, str, Both]]:
        yield Pool(), "text", Both(Pool(), "both")

    async def of_named_tuple() -> AsyncIterator[Both]:
        yield Both(Pool(), "text")

    seen: list[object] = []

    @subscriber("orders")
    async def ship(order: Order, text: Annotated[str, State], both: Annotated[Both, State]) -> None:
        seen.append((text, both.text))

    @subscriber("orders")
    async def ship_named(order: Order, both: Annotated[Both, State]) -> None:
        seen.append(both.text)

    for handler, lifespan in ((ship, of_tuple), (ship_named, of_named_tuple)):
        app = App(handler, lifespan=lifespan)
        async with app.running():
            await app.publish("orders", Order(1))
            await eventually(lambda: seen)
        if handler is ship:
            assert seen.pop() == ("text", "both")
    assert seen == ["text"]


async def test_a_subclass_is_found_by_its_base_and_two_of_a_kind_are_not_guessed() -> None:
    class Special(Pool): ...

    @subscriber("orders")
    async def ship(order: Order, pool: Annotated[Pool, State]) -> None: ...

    async def one() -> AsyncIterator[Any]:
        yield Special()

    async def exact() -> AsyncIterator[Any]:
        yield Special(), Pool()

    async def two() -> AsyncIterator[Any]:
        yield Pool(), Pool()

    async def none() -> AsyncIterator[Any]:
        yield "text"

    for lifespan in (one, exact):
        async with App(ship, lifespan=lifespan).running():
            pass
    with pytest.raises(ExceptionGroup) as caught:
        async with App(ship, lifespan=two).running():
            pass
    assert "yielded 2 of" in str(caught.value.exceptions[0])
    with pytest.raises(ExceptionGroup) as caught:
        async with App(ship, lifespan=none).running():
            pass
    assert "yielded no" in str(caught.value.exceptions[0])


async def test_a_protocol_that_cannot_be_looked_for_is_a_clear_error() -> None:
    @subscriber("orders")
    async def ship(order: Order, pool: Annotated[Closing, State]) -> None: ...

    async def lifespan() -> AsyncIterator[Any]:
        yield Pool()

    with pytest.raises(ExceptionGroup) as caught:
        async with App(ship, lifespan=lifespan).running():
            pass
    assert "runtime_checkable" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("when", ["start", "end"])
async def test_a_lifespan_that_raises(when: str) -> None:
    async def lifespan() -> AsyncIterator[None]:
        if when == "start":
            raise LookupError("no such table")
        yield
        raise LookupError("cannot close")

    broker = FakeBroker()
    app = App(ordering(), lifespan=lifespan, brokers={"default": broker})
    entered = False
    with pytest.raises(LookupError):
        async with app.running():
            entered = True
    assert entered == (when == "end")
    assert broker.log == ["connected", "closed"]
    assert not app.health().ok
    if when == "end":
        assert broker.sources["orders"].calls[-1] == "close", "the pumps had drained before"
    with pytest.raises(NotRunning):
        await app.publish("orders", 1)


async def test_what_a_lifespan_gives_is_checked() -> None:
    with pytest.raises(TypeError, match="neither an async generator nor an async context manager"):
        async with App(lifespan=lambda: 5).running():  # type: ignore[arg-type,return-value]
            pass


async def test_state_outlives_the_handlers() -> None:
    """The drain comes before the end of the lifespan, and that before the brokers close."""
    log: list[str] = []
    begun = asyncio.Event()

    async def lifespan() -> AsyncIterator[Pool]:
        pool = Pool()
        yield pool
        log.append("lifespan ends")
        pool.closed = True

    @subscriber("orders")
    async def ship(order: Order, pool: Annotated[Pool, State]) -> None:
        begun.set()
        await asyncio.sleep(0.02)
        assert not pool.closed
        log.append("handled")

    broker = FakeBroker()
    app = App(ship, lifespan=lifespan, brokers={"default": broker})
    async with app.running():
        broker.sources["orders"].add(*prepared(1))
        await begun.wait()
    assert log == ["handled", "lifespan ends"]
    assert broker.log == ["connected", "closed"]


# -- running and publishing


async def test_running_twice() -> None:
    app = App(ordering())
    async with app.running():
        with pytest.raises(NotRunning, match="runs already"):
            async with app.running():
                pass
        assert app.health().ok
    async with app.running():
        assert app.health().ok, "one after the other it may"


async def test_publishing_only_while_it_runs() -> None:
    receipts = Publisher[Order]("receipts")
    app = App(publishers=[receipts])
    for _ in range(2):
        with pytest.raises(NotRunning):
            await app.publish("orders", Order(1))
        with pytest.raises(NotRunning):
            await receipts.publish(Order(1))
        async with app.running():
            assert await app.publish("orders", Order(1))
            assert await receipts.publish(Order(1), message_id="m1") == "m1"
    with pytest.raises(NotRunning, match="belongs to no app"):
        await Publisher[Order]("alone").publish(Order(1))


async def test_publishing_to_a_broker_that_there_is_not() -> None:
    app = App()
    async with app.running():
        with pytest.raises(
            ConfigError, match=r"brokers\.defualt: there is no broker 'defualt'; did you mean 'default'"
        ):
            await app.publish("orders", 1, broker="defualt")
        with pytest.raises(ConfigError):
            app.connection("second")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"key": 5}, ValueError, "key=5: text"),
        ({"message_id": 5}, ValueError, "message_id=5: text"),
        ({"delay": -1}, ValueError, "delay=-1: seconds"),
        ({"delay": float("nan")}, ValueError, "delay=nan: seconds"),
        ({"delay": "3"}, ValueError, "delay='3': seconds"),
        ({"priority": 0.5}, ValueError, "priority=0.5: a whole number"),
        ({"headers": {"a": 5}}, TypeError, "header 'a': a value is text or bytes, not int"),
        ({"headers": {"": "x"}}, TypeError, "a header's name is text and not empty"),
        ({"kee": "x"}, TypeError, "a publish has no option 'kee'; did you mean 'key'?"),
        ({"name": ""}, ValueError, "the name to publish to is text and not empty"),
        ({"payload": object()}, Rejected, "the payload cannot be encoded"),
        ({"payload": "\ud800"}, Rejected, "the payload cannot be encoded"),
    ],
)
async def test_malformed_publishes(options: dict[str, Any], error: type[Exception], text: str) -> None:
    app = App()
    async with app.running():
        with pytest.raises(error) as caught:
            await app.publish(options.pop("name", "orders"), options.pop("payload", 1), **options)
    assert text in str(caught.value)


async def test_a_payload_that_holds_itself_is_rejected() -> None:
    circle: list[object] = []
    circle.append(circle)
    app = App()
    async with app.running():
        with pytest.raises(Rejected):
            await app.publish("orders", circle)


async def test_return_values_are_published_and_seen_by_middleware() -> None:
    seen: list[object] = []
    receipts: list[object] = []

    async def around(message: Message, call_next: Next) -> object:
        result = await call_next(message)
        seen.append(result)
        return result

    @subscriber("orders", publishes="receipts", middleware=[around])
    async def ship(order: Order) -> dict[str, int] | None:
        return {"shipped": order.id} if order.id else None

    @subscriber("receipts")
    async def receive(message: Message) -> None:
        receipts.append((message.body, message.key))

    app = App(ship, receive)
    async with app.running():
        await app.publish("orders", Order(0))
        await app.publish("orders", Order(5), key="five")
        await eventually(lambda: receipts and len(seen) == 2)
    assert receipts == [(b'{"shipped":5}', "five")]
    assert seen == [None, {"shipped": 5}]


async def test_a_publisher_as_a_parameter() -> None:
    receipts: list[bytes] = []

    @subscriber("orders")
    async def ship(order: Order, out: Annotated[Publisher[Order], "receipts"]) -> None:
        await out.publish(order, key="k", headers={"a": "b"})

    @subscriber("receipts")
    async def receive(message: Message) -> None:
        receipts.append(message.body + message.headers["a"].encode())

    app = App(ship, receive)
    async with app.running():
        await app.publish("orders", Order(5))
        await eventually(lambda: receipts)
    assert receipts == [b'{"id":5}b']


# -- health and failures


async def test_health_in_all_states() -> None:
    broker = FakeBroker()
    app = App(ordering(), brokers={"default": broker})
    states: list[bool] = []

    async def lifespan() -> AsyncIterator[None]:
        states.append(app.health().ok)
        yield
        states.append(app.health().ok)

    app = App(ordering(), brokers={"default": broker}, lifespan=lifespan)
    assert not app.health().ok
    async with app.running():
        health = app.health()
        assert health.ok
        (where,) = health.subscribers
        assert where.endswith("ship('orders')")
        source = broker.sources["orders"]
        source.reopen_faults.extend([away(), away()])
        source.fail_fetch(away("cut"))
        await eventually(lambda: not app.health().ok)
        assert "cut" in app.health().subscribers[where].detail
        await eventually(lambda: app.health().ok)
    assert not app.health().ok
    assert states == [False, False], "not while it starts, and not when it has drained"


async def test_a_source_may_know_better() -> None:
    broker = FakeBroker()
    app = App(ordering(), brokers={"default": broker})
    async with app.running():
        broker.sources["orders"].health = lambda: Health(False, "standing by")  # type: ignore[method-assign]
        assert not app.health().ok


@pytest.mark.parametrize("body", ["waits", "swallows", "has ended", "raises"])
async def test_a_failed_subscriber_ends_the_body_with_its_error(body: str) -> None:
    refused = BrokerRefused("the table was dropped")
    broker = FakeBroker()
    app = App(ordering(), ordering("others"), brokers={"default": broker})
    cancelled = False

    async def live() -> None:
        nonlocal cancelled
        async with app.running():
            broker.sources["orders"].fail_fetch(refused)
            if body == "has ended":
                return
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled = True
                if body == "raises":
                    raise ValueError("of the body") from None
                if body == "waits":
                    raise

    with pytest.raises(ValueError if body == "raises" else BrokerRefused) as caught:
        await live()
    if body != "raises":
        assert caught.value is refused
    assert cancelled == (body != "has ended")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the cancellation was ours, and is taken back"
    await asyncio.sleep(0)
    assert [source.calls[-1] for source in broker.sources.values()] == ["close", "close"]
    assert broker.log == ["connected", "closed"]


async def test_a_failure_during_the_drain_is_raised_and_everything_closed() -> None:
    refused = BrokerRefused("the table was dropped")
    broker = FakeBroker()
    app = App(ordering(), ordering("others"), brokers={"default": broker})

    async def live() -> None:
        gate = asyncio.Event()

        async def wait(settlements: object) -> None:
            await gate.wait()

        async with app.running():
            source = broker.sources["orders"]
            source.settle_faults.append(refused)
            source.before_settle = wait
            source.add(*prepared(1))
            await eventually(lambda: source.settling)
            asyncio.get_running_loop().call_later(0.02, gate.set)

    with pytest.raises(BrokerRefused):
        await live()
    assert [source.calls[-1] for source in broker.sources.values()] == ["close", "close"]


async def test_a_cancellation_from_outside_drains_and_goes_on() -> None:
    broker = FakeBroker()
    app = App(ordering(), brokers={"default": broker})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), app.running():
            await asyncio.sleep(10)
    assert broker.sources["orders"].calls == ["stop", "flush", "close"]


# -- starting while a server is away


async def test_a_server_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker(away(), away())
    broker.open_faults.append(away("not yet"))
    app = App(ordering(), brokers={"default": broker})
    async with app.running():
        assert app.health().ok
    assert broker.attempts == 3
    assert "the server is away; trying again" in caplog.text
    assert "not yet; trying again" in caplog.text
    assert "hidden" not in caplog.text


async def test_waiting_is_bounded() -> None:
    broker = FakeBroker(*[away() for _ in range(1000)])
    app = App(ordering(), brokers={"default": broker})
    app.settings.wait = 0.2
    with pytest.raises(BrokerUnavailable, match="the server is away"):
        async with app.running():
            pass
    assert broker.attempts >= 2


async def test_an_attempt_that_never_answers_is_bounded_too() -> None:
    broker = FakeBroker(hang=True)
    app = App(ordering(), brokers={"default": broker})
    app.settings.wait = 0.05
    with pytest.raises(BrokerUnavailable, match=r"broker 'default' \(fake://user@host\): no answer within wait=0.05 s"):
        async with app.running():
            pass


async def test_the_last_reason_is_told_when_the_time_is_over() -> None:
    broker = FakeBroker(away("no such host"), hang=True)
    app = App(ordering(), brokers={"default": broker})
    app.settings.wait = 0.5
    with pytest.raises(BrokerUnavailable, match=r"no answer within wait=0.5 s; before that: no such host"):
        async with app.running():
            pass


async def test_one_bound_for_the_whole_start() -> None:
    """Not one for each broker and subscriber."""
    broker = FakeBroker(away(), away())
    broker.open_faults.extend(away() for _ in range(1000))
    app = App(ordering(), ordering("others"), brokers={"default": broker})
    app.settings.wait = 0.5
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(BrokerUnavailable):
        async with app.running():
            pass
    assert loop.time() - began < 5


async def test_a_terminal_error_is_not_waited_for() -> None:
    broker = FakeBroker(BrokerRefused("wrong password"))
    with pytest.raises(BrokerRefused):
        async with App(ordering(), brokers={"default": broker}).running():
            pass
    assert broker.attempts == 1


async def test_a_subscriber_that_cannot_be_opened_closes_those_before_it() -> None:
    broker = FakeBroker()
    app = App(ordering(), ordering("others"), brokers={"default": broker})

    class Second(FakeBroker):
        pass

    second = Second()
    second.open_faults.append(BrokerRefused("no such table"))
    app = App(ordering(), ordering("others", broker="second"), brokers={"default": broker, "second": second})
    with pytest.raises(BrokerRefused):
        async with app.running():
            pass
    assert broker.sources["orders"].calls == ["stop", "close"]
    assert (broker.log, second.log) == (["connected", "closed"], ["connected", "closed"])


def test_the_contract_has_no_more_abstract_methods_than_the_fake() -> None:
    assert isinstance(FakeBroker().connect(), AbstractAsyncContextManager)
