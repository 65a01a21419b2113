"""What `App.build` finds: every mistake at once, each with where it stands and what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import msgspec
import pytest

from streamfw import (
    App,
    Attempt,
    Backoff,
    Batch,
    Broker,
    BuildError,
    Capabilities,
    ConfigError,
    Connection,
    DeliveryField,
    Drop,
    Header,
    Message,
    Publisher,
    RawCodec,
    Retry,
    State,
    UnitConnection,
    subscriber,
)
from streamfw.broker import Subscription
from streamfw.errors import NotRunning
from streamfw.memory import MemoryBroker


class Order(msgspec.Struct):
    id: int


class Pool: ...


class BareBroker(Broker):
    """Can do nothing by itself, and is never connected."""

    capabilities = Capabilities()

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        raise AssertionError("building does no I/O")


def mistakes(app: App) -> list[str]:
    """All that `build` finds wrong, as text."""
    with pytest.raises(ExceptionGroup) as caught:
        app.build()
    errors = caught.value.exceptions
    assert all(isinstance(error, BuildError | ConfigError) for error in errors)
    listing = str(caught.value.args[0])
    for number, error in enumerate(errors, 1):
        assert f"\n  {number}. {error}" in listing, "the group's own text lists them"
    return [str(error) for error in errors]


def mistake(app: App) -> str:
    (only,) = mistakes(app)
    return only


async def handle(order: Order) -> None: ...


def marked(handler: Any = None, source: object = "orders", **options: Any) -> Any:
    """A new handler with these options."""
    if handler is None:

        async def ship(order: Order) -> None: ...

        handler = ship
    return subscriber(source, **options)(handler)


def test_all_mistakes_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFW_DRAIN_TIMEOT", "3")
    monkeypatch.setenv("STREAMFW_WAIT", "soon")

    @subscriber("orders", wrkers=1, ordered_by="key")  # type: ignore[call-arg]
    async def misspelt(order: Order) -> None: ...

    @subscriber("orders", workers="8", timeout=-1)  # type: ignore[arg-type]
    async def wrong_type(order: Order, other: Order) -> None: ...

    @subscriber("a", broker="bare", ordered_by="key", transactional=True)
    async def not_honoured(order: Order) -> None: ...

    @subscriber("b", broker="nowhere")
    async def unknown_broker(order: Order, pool: Annotated[Pool, State], out: Publisher[Order]) -> None: ...

    @subscriber("c")
    async def stateful(order: Order, pool: Annotated[Pool, State]) -> None: ...

    @subscriber("d")
    def plain(order: Order, out: Annotated[Publisher[Order], "out"]) -> None: ...

    async def unmarked(order: Order) -> None: ...

    app = App(
        misspelt, wrong_type, not_honoured, unknown_broker, stateful, plain, unmarked,
        brokers={"bare": BareBroker("bare://"), "typo": "memry://user:hidden@host"},
    )  # fmt: skip
    found = mistakes(app)
    where = "test_all_mistakes_come_together.<locals>."
    expected = [
        "drain_timeot: unknown option; did you mean 'drain_timeout'? (set by STREAMFW_DRAIN_TIMEOT)",
        "wait: Expected `float | null`, got `str` (set by STREAMFW_WAIT)",
        "brokers.typo.url: 'memry://user@host' has no known scheme",
        f"{where}misspelt('orders'): wrkers: there is no such option; did you mean 'workers'?",
        f"{where}wrong_type('orders'): workers: '8' is not a whole number",
        f"{where}wrong_type('orders'): timeout: -1 is not a number of seconds above zero",
        f"{where}wrong_type('orders'): parameters 'order' and 'other' both look like the body",
        f"{where}wrong_type('orders'): {where}misspelt('orders') subscribes to the same name in the same group",
        f"{where}not_honoured('a'): ordered_by='key': the broker keeps no order over a group of processes",
        f"{where}not_honoured('a'): transactional=True: the broker has no transactions",
        f"{where}unknown_broker('b'): there is no broker 'nowhere'",
        f"{where}unknown_broker('b'): parameter 'out' is an unbound publisher: say where it publishes, "
        'out: Annotated[Publisher[...], "a name"]',
        f"{where}stateful('c'): parameter 'pool' takes Pool from the lifespan, and the app has none",
        f"{where}plain('d'): parameter 'out': a `def` handler cannot await a Publisher; take a SyncPublisher",
        f"{where}unmarked: is not marked with @subscriber, so nobody knows what it handles",
    ]
    missing = [one for one in expected if not any(found_one.startswith(one) for found_one in found)]
    assert missing == [], found
    assert len(found) == len(expected), found
    assert "hidden" not in "".join(found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers: 0 is below 1"),
        ({"workers": True}, "workers: True is not a whole number"),
        ({"workers": 1.5}, "workers: 1.5 is not a whole number"),
        ({"workers": None}, "workers: None is not a whole number"),
        ({"attempts": 0}, "attempts: 0 is below 1"),
        ({"prefetch": -1}, "prefetch: -1 is below 1"),
        ({"held": 0}, "held: 0 is below 1"),
        ({"max_bytes": "1 MB"}, "max_bytes: '1 MB' is not a whole number"),
        ({"timeout": float("nan")}, "timeout: nan is not a number of seconds above zero"),
        ({"timeout": float("inf")}, "timeout: inf is not a number of seconds above zero"),
        ({"timeout": "3"}, "timeout: '3' is not a number of seconds above zero"),
        ({"timeout": True}, "timeout: True is not a number of seconds above zero"),
        ({"ordered_by": "keys"}, 'ordered_by: \'keys\' is neither "key" nor "partition"'),
        ({"ordered_by": ["key"]}, "ordered_by: ['key'] is neither"),
        ({"group": ""}, "group: is an empty name"),
        ({"group": 5}, "group: 5 is not text"),
        ({"broker": 5}, "broker: 5 is not text"),
        ({"dead_letter": 5}, "dead_letter: 5 is not text"),
        ({"dead_letter": ""}, "dead_letter: is an empty name"),
        ({"dead_letter": "orders"}, "dead_letter: 'orders' is what it subscribes to"),
        ({"publishes": ""}, "publishes: is an empty name"),
        ({"transactional": "yes"}, "transactional: 'yes' is neither True nor False"),
        ({"task_per_message": 1}, "task_per_message: 1 is neither True nor False"),
        ({"backoff": 3}, "backoff: 3 is not a Backoff"),
        ({"on_error": [ValueError]}, "on_error: [<class 'ValueError'>] is not a mapping"),
        ({"on_error": {"ValueError": Drop}}, "on_error: 'ValueError' is not a type of exception"),
        ({"on_error": {ValueError: KeyError}}, "on_error: <class 'KeyError'> is no outcome"),
        ({"on_error": {ValueError: 3}}, "on_error: 3 is neither an outcome nor a function"),
        ({"middleware": handle}, "middleware: <function handle"),
        ({"middleware": ["log"]}, "middleware: 'log' is not a function"),
        ({"middleware": [handle]}, "middleware: handle does not take (message, call_next)"),
        ({"codec": RawCodec}, "codec: RawCodec is a class; give an instance, RawCodec()"),
        ({"codec": "json"}, "codec: 'json' is not a Codec"),
        ({"dead_leter": None}, "dead_leter: there is no such option; did you mean 'dead_letter'?"),
        ({"zzz": None}, "zzz: there is no such option; known are broker, group, workers"),
    ],
)
def test_each_option_is_checked(options: dict[str, Any], text: str) -> None:
    found = mistake(App(marked(**options)))
    assert f"ship('orders'): {text}" in found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 10}, "batch: 10 is not a Batch(size, wait)"),
        ({"batch": Batch(2.5)}, "batch: Batch(size=2.5, wait=0.0) is not a Batch"),  # type: ignore[arg-type]
        ({"batch": Batch(10), "prefetch": 5}, "prefetch: 5 never fills a batch of 10"),
        ({"batch": Batch(10), "publishes": "x"}, "publishes: a batch handler returns outcomes"),
    ],
)
def test_options_of_batches(options: dict[str, Any], text: str) -> None:
    async def many(orders: list[Order]) -> None: ...

    assert text in mistake(App(marked(many, **options)))


def test_values_that_make_no_sense_at_once() -> None:
    with pytest.raises(ValueError, match="size is at least 1"):
        Batch(0)
    with pytest.raises(ValueError, match="a factor of 1 or more"):
        Backoff(factor=0.5)


@pytest.mark.parametrize("source", ["", 5, object()])
def test_sources(source: object) -> None:
    assert "source: " in "".join(mistakes(App(marked(source=source))))


async def two_bodies(a: Order, b: Order) -> None: ...
async def no_body(tenant: Annotated[str, Header("tenant")]) -> None: ...
async def no_annotation(order) -> None: ...  # type: ignore[no-untyped-def]
async def splat(order: Order, *more: Order) -> None: ...
async def positional(order: Order, /) -> None: ...
async def unbound(order: Order, out: Publisher[Order]) -> None: ...
async def forgotten_marker(pool: Pool) -> None: ...
async def nested(pools: dict[str, list[Pool]]) -> None: ...
async def unnamed_header(order: Order, tenant: Annotated[str, Header]) -> None: ...
async def unnamed_field(order: Order, offset: Annotated[int, DeliveryField]) -> None: ...
async def odd_header(order: Order, tenant: Annotated[Pool, Header("tenant")]) -> None: ...
async def no_transaction(order: Order, connection: Annotated[object, UnitConnection()]) -> None: ...
async def generator(order: Order) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (two_bodies, "parameters 'a' and 'b' both look like the body: exactly one parameter is without a marker"),
        (no_body, "no parameter takes the body"),
        (no_annotation, "parameter 'order' has no annotation"),
        (splat, "parameter 'more': *args"),
        (positional, "parameter 'order': *args, **kwargs and positional-only"),
        (unbound, "parameter 'out' is an unbound publisher"),
        (
            forgotten_marker,
            "parameter 'pool': a body cannot be decoded as <class 'tests.unit.test_build.Pool'>: JSON has",
        ),
        (nested, "nothing that becomes Pool"),
        (unnamed_header, "parameter 'tenant': Header needs a name"),
        (unnamed_field, "parameter 'offset': DeliveryField needs a name"),
        (odd_header, "parameter 'tenant': the text of a header cannot become"),
        (no_transaction, "it takes the delivery's transaction, which needs transactional=True"),
        (generator, "a handler is an `async def` function"),
    ],
)
def test_signatures(handler: Any, text: str) -> None:
    vars(handler).clear()
    assert text in mistake(App(marked(handler)))


async def of_one(order: Order) -> None: ...
async def with_header(orders: list[Order], tenant: Annotated[str, Header("tenant")]) -> None: ...
async def with_attempt(orders: list[Order], attempt: Annotated[int, Attempt]) -> None: ...
async def with_message(orders: list[Order], message: Message) -> None: ...


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (of_one, "parameter 'order' takes a batch, so it is a list[...]"),
        (with_header, "is a header of one message, and this handler takes a batch"),
        (with_attempt, "belongs to one message, and this handler takes a batch"),
        (with_message, "belongs to one message, and this handler takes a batch"),
    ],
)
def test_signatures_of_batches(handler: Any, text: str) -> None:
    vars(handler).clear()
    assert text in mistake(App(marked(handler, batch=Batch(10))))


def test_annotations_that_cannot_be_evaluated() -> None:
    async def lost(order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert "annotations cannot be evaluated: NameError" in mistake(App(marked(lost)))


def test_a_raw_codec_takes_bytes_only() -> None:
    assert "a raw body is bytes" in mistake(App(marked(codec=RawCodec())))


async def test_every_way_to_ask_for_the_message_builds() -> None:
    async def of_message(message: Message) -> None: ...
    async def of_bytes(body: bytes) -> None: ...
    async def of_any(body: Any, *, attempt: Annotated[int, Attempt]) -> None: ...
    async def of_union(body: int | str | None) -> None: ...
    async def named_message(order: Order, message: Annotated[str, Header("message")], m: Message) -> None: ...

    app = App(*(marked(one, name) for name, one in list(locals().items())))
    assert len(app.build().subscribers) == 5


def test_twins() -> None:
    async def other(order: Order) -> None: ...
    async def audit(order: Order) -> None: ...

    found = mistake(App(marked(), marked(other)))
    assert "other('orders'):" in found
    assert "ship('orders') subscribes to the same name in the same group 'default'" in found
    assert "give one a group= of its own" in found
    App(marked(), marked(audit, group="audit")).build()


class Shared(msgspec.Struct, frozen=True):
    name: str

    def place(self, group: str) -> str:
        return self.name


def test_groups_that_take_from_one_queue_are_a_mistake() -> None:
    class Broker(MemoryBroker):
        def mistakes(self, subscription: Subscription) -> Iterable[str]:
            return ()

    def app(*groups: str, brokers: Sequence[str] = ("default", "default"), name: str = "billing") -> App:
        async def first(order: Order) -> None: ...
        async def second(order: Order) -> None: ...

        sources = (Shared("billing"), Shared(name))
        marks = [
            subscriber(source, group=group, broker=broker)(handler)
            for source, group, broker, handler in zip(sources, groups, brokers, (first, second), strict=True)
        ]
        return App(*marks, brokers={"default": Broker(), "other": Broker()})

    found = mistake(app("a", "b"))
    assert "second('billing'): " in found and "first('billing') of group 'a' takes from the same queue" in found
    assert "as this one of group 'b'" in found and "give each a queue of its own" in found
    assert "give one a queue of its own" in mistake(app("a", "a"))
    app("a", "b", name="other").build()
    app("a", "b", brokers=("default", "other")).build()


def test_twins_of_other_brokers_are_none() -> None:
    async def other(order: Order) -> None: ...

    App(marked(), marked(other, broker="second"), brokers={"second": "memory://"}).build()


class TestTheAppItself:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"brokers": "memory://"}, 'brokers: names and their URLs, {"default": ..}, not str'),
            ({"brokers": {"default": 5}}, "brokers.default: is a URL or a Broker, not int"),
            ({"brokers": {"default": "no scheme"}}, "brokers.default.url: 'no scheme' has no known scheme"),
            ({"brokers": {"default": "nowhere://h"}}, "installed brokers: "),
            ({"name": ""}, "name: the name of an app is not empty"),
            ({"codec": "json"}, "codec: 'json' is not a Codec"),
            ({"middleware": handle}, "middleware: <function handle"),
            ({"middleware": [handle]}, "middleware: handle does not take (message, call_next)"),
            ({"publishers": ["receipts"]}, "publishers: 'receipts' is not a Publisher"),
            ({"publishers": [Publisher("a", broker="b")]}, "Publisher('a', broker='b'): there is no broker 'b'"),
            ({"lifespan": 5}, "lifespan: 5 is not a function"),
            ({"lifespan": handle}, "lifespan: handle is not an async generator function"),
        ],
    )
    def test_options(self, options: dict[str, Any], text: str) -> None:
        assert any(text in found for found in mistakes(App(**options)))

    def test_a_broker_that_could_not_be_made_is_one_mistake(self) -> None:
        """Not another one for each handler and publisher that uses it."""

        @subscriber("orders")
        async def copy(order: Order, out: Annotated[Publisher[Order], "copies"]) -> None: ...

        for wrong in ({"default": {"url": "memory://", "max_bodyy": 1}}, {"default": "nowhere://h"}, {"default": 5}):
            app = App(copy, publishers=[Publisher("a")], brokers=wrong)  # type: ignore[arg-type]
            (found,) = mistakes(app)
            assert found.startswith("brokers.default")

    def test_what_is_no_handler(self) -> None:
        assert mistake(App("orders")).startswith("'orders': is not marked with @subscriber")  # type: ignore[arg-type]

    def test_a_subscriber_without_what_it_subscribes_to(self) -> None:
        with pytest.raises(TypeError, match="needs what it subscribes to"):
            subscriber(handle)

    @pytest.mark.parametrize("thing", [5, len, Pool])
    def test_what_cannot_be_marked(self, thing: Any) -> None:
        with pytest.raises(TypeError, match="marks a function"):
            subscriber("orders")(thing)

    def test_it_is_built_once(self) -> None:
        app = App(marked())
        assert app.build() is app.build()
        app.subscriber("more")(handle)
        assert len(app.build().subscribers) == 2

    def test_a_broker_of_the_configuration_that_is_wrong_is_told_once(self) -> None:
        found = mistakes(App(marked(), brokers={"default": "nowhere://host"}))
        assert len(found) == 1

    def test_the_same_function_in_an_app_and_alone(self) -> None:
        app = App()

        @app.subscriber("orders")
        async def ship(order: Order) -> None: ...

        assert [one.declaration.handler for one in app.build().subscribers] == [ship]

    def test_an_unknown_broker_is_told_with_those_there_are(self) -> None:
        with pytest.raises(NotRunning, match="known are default"):
            App().broker("second")


class TestState:
    @staticmethod
    def app(lifespan: Any) -> App:
        async def ship(order: Order, pool: Annotated[Pool, State]) -> None: ...

        return App(marked(ship), lifespan=lifespan)

    def test_the_lifespan_says_it_yields_something_else(self) -> None:
        async def lifespan() -> AsyncIterator[str]:
            yield "text"

        assert "takes Pool, and the lifespan yields <class 'str'>" in mistake(self.app(lifespan))

    def test_the_lifespan_yields_nothing(self) -> None:
        async def lifespan() -> AsyncIterator[None]:
            yield

        assert "takes Pool, and the lifespan yields" in mistake(self.app(lifespan))

    def test_one_of_several(self) -> None:
        async def lifespan() -> AsyncIterator[tuple[str, Pool]]:
            yield "text", Pool()

        self.app(lifespan).build()

    def test_a_union_is_looked_at_when_it_yields(self) -> None:
        async def lifespan() -> AsyncIterator[Pool | None]:
            yield None

        self.app(lifespan).build()

    def test_one_that_does_not_say(self) -> None:
        async def lifespan():  # type: ignore[no-untyped-def]
            yield Pool()

        self.app(lifespan).build()


def test_a_broker_that_cannot_is_asked_for_nothing_more() -> None:
    """What a broker says against a subscription is told with the rest."""

    class Fussy(BareBroker):
        def mistakes(self, subscription: Any) -> Sequence[str]:
            return ["not on a Monday"]

    found = mistakes(App(marked(ordered_by="key"), brokers={"default": Fussy("fussy://")}))
    assert len(found) == 2
    assert found[1].endswith("not on a Monday")


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({}, "backoff: a pause may be 300 s"),
        ({"attempts": 1}, None),
        ({"attempts": 7}, "attempts=7: their pauses are more than 60 s together"),
        ({"attempts": 6}, None),
        ({"attempts": 8}, "backoff: a pause may be 64 s"),
        ({"backoff": Backoff(max=60)}, None),
        ({"backoff": Backoff(first=0, factor=1)}, None),
        ({"backoff": Backoff(max=60), "on_error": {ValueError: Retry(after=61)}}, "on_error: Retry(after=61)"),
        ({"backoff": Backoff(max=60), "on_error": {ValueError: Retry(after=60), OSError: Retry}}, None),
    ],
)
def test_pauses_in_the_process_are_not_longer_than_the_broker_allows(
    options: dict[str, Any], mistake: str | None
) -> None:
    class Impatient(BareBroker):
        def capabilities_of(self, subscription: Any) -> Capabilities:
            return Capabilities(ordered_by=frozenset({"key"}), retry=subscription.name != "bare", longest_pause=60.0)

    def app(source: str, **more: Any) -> App:
        return App(marked(source=source, **options, **more), brokers={"default": Impatient("fussy://")})

    app("orders").build()  # the broker waits, for as long as one likes
    for waiting in (app("orders", ordered_by="key"), app("bare")):
        if mistake is None:
            waiting.build()
        else:
            (found,) = mistakes(waiting)
            assert mistake in found


def test_settings_of_a_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFW_SUBSCRIBERS__SHIP__WORKERS", "0")
    monkeypatch.setenv("STREAMFW_SUBSCRIBERS__SHIP__ATTEMPTS", "many")
    monkeypatch.setenv("STREAMFW_SUBSCRIBERS__SHOP__WORKERS", "3")
    found = mistakes(App(marked(workers=2)))
    assert found == [
        "subscribers.ship.attempts: Expected `int | null`, got `str` (set by STREAMFW_SUBSCRIBERS__SHIP__ATTEMPTS)",
        "subscribers.shop: no handler has this name; did you mean 'ship'?",
        "subscribers.ship.workers: 0 is below 1",
    ]


def test_settings_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value in {
        "workers": "8",
        "timeout": "2.5",
        "attempts": "4",
        "group": "audit",
        "prefetch": "50",
    }.items():
        monkeypatch.setenv(f"STREAMFW_SUBSCRIBERS__SHIP__{option.upper()}", value)
    (built,) = App(marked(workers=2)).build().subscribers
    subscription = built.subscription
    assert (subscription.workers, subscription.timeout, subscription.attempts) == (8, 2.5, 4)
    assert (subscription.group, subscription.prefetch) == ("audit", 50)


def test_a_subscriber_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFW_SUBSCRIBERS__SHIP__ENABLED", "false")

    async def other(order: Order) -> None: ...

    (built,) = App(marked(), marked(other)).build().subscribers
    assert built.declaration.handler is other
