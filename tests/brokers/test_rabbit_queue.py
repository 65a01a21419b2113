"""`RabbitQueue` and plain names: what they become on the server, and what is wrong with them at build."""

from __future__ import annotations

from typing import Any

import pytest

from streamfw import App, subscriber
from streamfw.broker import Broker, Order, Subscription
from streamfw.errors import BrokerRefused
from streamfw.testing._memory import StandIn
from streamfw_rabbit import Exchange, MemoryOffsets, RabbitBroker, RabbitQueue, Stream
from streamfw_rabbit.queue import Binding, Declare
from streamfw_rabbit.settings import parsed
from streamfw_rabbit.topology import group_queue, plan_of, retries
from streamfw_rabbit.versions import argument_mistakes, require, require_arguments

BROKER = RabbitBroker("amqp://h")
SETTINGS = parsed("amqp://h")
EVENTS = Exchange("events", "topic")
BASE = {"x-queue-type": "quorum", "x-delivery-limit": 20}
NET = {"x-dead-letter-exchange": "q.dead", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def mistakes(source: object, name: str = "q", **options: Any) -> list[str]:
    return list(BROKER.mistakes(Subscription(name, source=source, **options)))


def arguments(source: RabbitQueue, **options: Any) -> dict[str, Any]:
    return plan_of(Subscription(source.name, source=source, **options), SETTINGS).arguments


def test_two_groups_on_one_queue_are_a_mistake_on_the_server_and_in_memory() -> None:
    def app(*sources: tuple[object, str], broker: Broker = BROKER) -> App:
        async def first(body: str) -> None: ...
        async def second(body: str) -> None: ...

        marks = (
            subscriber(one, group=group)(take) for (one, group), take in zip(sources, (first, second), strict=True)
        )
        return App(*marks, brokers={"default": broker})

    def refused(*sources: tuple[object, str], broker: Broker = BROKER) -> None:
        with pytest.raises(ExceptionGroup, match=r"takes from the same queue.*give each a queue of its own"):
            app(*sources, broker=broker).build()

    refused((RabbitQueue("billing"), "a"), (RabbitQueue("billing", prefetch=5), "b"))
    refused((RabbitQueue("billing"), "a"), (RabbitQueue("billing"), "b"), broker=StandIn("default", None, None))
    refused(("orders", "a"), (RabbitQueue("orders.a"), "a"))
    app((RabbitQueue("billing-a", exchange=EVENTS, bind="#"), "a"), (RabbitQueue("billing-b"), "b")).build()
    app(("orders", "a"), ("orders", "b")).build()
    store = MemoryOffsets()
    app((Stream("log", store=store), "a"), (Stream("log", store=store), "b")).build()  # each reads all of it


# ---------------------------------------------------------------------- what it becomes


def test_a_plain_name_is_a_quorum_queue_of_its_group_bound_to_its_exchange() -> None:
    plan = plan_of(Subscription("orders", "shop", dead_letter="orders.dead"), SETTINGS)
    assert (plan.queue, plan.exchange, plan.dead_letter, plan.bindings) == ("orders.shop", "orders", "orders.dead", [])
    assert plan.arguments == BASE | NET | {"x-dead-letter-exchange": "orders.dead"}
    assert plan_of(Subscription("orders", "shop", ordered_by="key"), SETTINGS).arguments == BASE | {
        "x-single-active-consumer": True
    }


def test_a_priority_where_there_are_none_says_how_to_have_them() -> None:
    assert BROKER.capabilities.priorities_option == "priorities"
    assert RabbitBroker("amqp://h", priorities=10).capabilities.priorities


def test_groups_never_share_a_queue() -> None:
    pairs = [("a", "b.c"), ("a.b", "c"), ("a", "b+2Ec"), ("a", "b+c"), ("a.b+2Ec", "d"), ("a", "b"), ("a.b", "b")]
    assert len({group_queue(name, group) for name, group in pairs}) == len(pairs)
    assert group_queue("a", "b.c") == "a.b+2Ec"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (RabbitQueue("q"), BASE),
        (RabbitQueue("q", delivery_limit=100), BASE | {"x-delivery-limit": 100}),
        (RabbitQueue("q", single_active=True), BASE | {"x-single-active-consumer": True}),
        (
            RabbitQueue("q", max_length=5, max_bytes=6, overflow="reject-publish", message_ttl=1.5, expires=60),
            BASE
            | {"x-max-length": 5, "x-max-length-bytes": 6, "x-overflow": "reject-publish"}
            | {"x-message-ttl": 1500, "x-expires": 60_000},
        ),
        (RabbitQueue("q", type="classic", priorities=5), {"x-queue-type": "classic", "x-max-priority": 5}),
        (RabbitQueue("q", priorities=5), BASE),
        (RabbitQueue("q", arguments={"x-quorum-initial-group-size": 3}), BASE | {"x-quorum-initial-group-size": 3}),
    ],
)
def test_arguments(source: RabbitQueue, expected: dict[str, Any]) -> None:
    assert arguments(source) == expected
    assert mistakes(source) == []


def test_the_servers_own_dead_letters_go_where_ours_do() -> None:
    assert arguments(RabbitQueue("q"), dead_letter="q.dead") == BASE | NET
    at_most = RabbitQueue("q", dead_letter_strategy="at-most-once", overflow="drop-head")
    assert arguments(at_most, dead_letter="q.dead") == BASE | NET | {
        "x-dead-letter-strategy": "at-most-once",
        "x-overflow": "drop-head",
    }
    classic = arguments(RabbitQueue("q", type="classic"), dead_letter="q.dead")
    assert classic == {"x-queue-type": "classic", "x-dead-letter-exchange": "q.dead"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (RabbitQueue("q"), []),
        (RabbitQueue("q", exchange=EVENTS, bind="orders.*"), [Binding(EVENTS, "orders.*")]),
        (RabbitQueue("q", exchange=EVENTS, bind=["a", "b"]), [Binding(EVENTS, "a"), Binding(EVENTS, "b")]),
        (RabbitQueue("q", exchange=Exchange("all", "fanout")), [Binding(Exchange("all", "fanout"))]),
        (RabbitQueue("q", bind=[(EVENTS, "a"), ("amq.topic", "b")]), None),
        (RabbitQueue("q", bind=[(Exchange("h", "headers"), "", {"x-match": "any", "a": 1})]), None),
    ],
)
def test_bindings(source: RabbitQueue, expected: list[Binding] | None) -> None:
    assert mistakes(source) == []
    if expected is not None:
        assert source.bindings() == expected
    else:
        assert len(source.bindings()) == len(source.bind)


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (RabbitQueue(""), "RabbitQueue(''): the name is empty"),
        (RabbitQueue("q" * 256), "has 256 characters, and 255 is the most"),
        (RabbitQueue("q!"), "letters, digits, spaces and"),
        (RabbitQueue("amq.mine"), "names that begin with 'amq.' are the server's own"),
        (RabbitQueue("q", type="mirrored"), "type='mirrored'): one of quorum, classic is needed"),  # type: ignore[arg-type]
        (RabbitQueue("q", durable=False), "a quorum queue is durable"),
        (RabbitQueue("q", exclusive=True), "not exclusive"),
        (RabbitQueue("q", auto_delete=True), "not auto_delete"),
        (RabbitQueue("q", priorities=32), "priorities=32): the highest of a quorum queue is 31"),
        (RabbitQueue("q", type="classic", priorities=256), "priorities=256): a whole number from 1 to 255"),
        (RabbitQueue("q", delivery_limit=5), "delivery_limit=5): 20 at least"),
        (RabbitQueue("q", type="classic", delivery_limit=20), "only a quorum queue has one"),
        (RabbitQueue("q", type="classic", dead_letter_strategy="at-least-once"), "only a quorum queue has one"),
        (RabbitQueue("q", type="classic", single_active=True, consumer_priority=1), "only a quorum queue heeds it"),
        (RabbitQueue("q", overflow="reject-publish-dlx"), "a quorum queue ignores it"),
        (RabbitQueue("q", overflow="drop"), "overflow='drop'): one of drop-head"),  # type: ignore[arg-type]
        (RabbitQueue("q", overflow="drop-head"), "at most once, in silence"),
        (RabbitQueue("q", prefetch=0), "prefetch=0): a whole number from 1"),
        (RabbitQueue("q", message_ttl=-1), "message_ttl=-1): seconds"),
        (RabbitQueue("q", expires=0), "expires=0): seconds"),
        (RabbitQueue("q", declare="no"), "declare='no'): one of declare, passive, off"),  # type: ignore[arg-type]
        (RabbitQueue("q", key="body"), "key='body'): one of header, routing_key"),  # type: ignore[arg-type]
        (RabbitQueue("q", bind="a"), "'a' is a key: say of which exchange="),
        (RabbitQueue("q", exchange=EVENTS), "exchange='events' without bind="),
        (RabbitQueue("q", bind=[(1, "a")]), "1 is no Exchange"),
        (RabbitQueue("q", bind=[("a",)]), "is neither a key nor (exchange, key)"),
        (RabbitQueue("q", exchange=EVENTS, bind="k" * 256), "is longer than 255 bytes"),
        (RabbitQueue("q", exchange=Exchange("e!"), bind="a"), "Exchange('e!'): a name has letters"),
        (RabbitQueue("q", exchange=Exchange("e", declare="x"), bind="a"), "Exchange(declare='x')"),  # type: ignore[arg-type]
        (
            RabbitQueue("q", exchange=Exchange("e", "topics"), bind="a"),
            "Exchange('e', type='topics'): there is no such type",
        ),
        (RabbitQueue("q", exchange=Exchange("e", "topics"), bind="a"), "did you mean 'topic'?"),
        (RabbitQueue("q", exchange=Exchange("e", ""), bind="a"), "known are direct, fanout, topic, headers"),
        (RabbitQueue("q", exchange=Exchange("e", durable=0), bind="a"), "Exchange(durable=0)"),  # type: ignore[arg-type]
        (RabbitQueue("q", bind={"a": 1}), "bind={'a': 1}): a key, or a list of keys"),  # type: ignore[arg-type]
        (RabbitQueue("q", exchange=EVENTS, bind=[{}]), "{} is neither a key nor"),  # type: ignore[list-item]
        (RabbitQueue("q", arguments=[1]), "arguments=[1]): a mapping of names"),  # type: ignore[arg-type]
        (RabbitQueue("q", retry="no"), "retry='no'): True or False"),  # type: ignore[arg-type]
        (RabbitQueue(5), "name=5): text is needed"),  # type: ignore[arg-type]
        (RabbitQueue("q", arguments={"x-max-lenght": 5}), "x-max-lenght is no argument of a quorum queue"),
        (RabbitQueue("q", arguments={"x-max-lenght": 5}), "did you mean 'x-max-length'?"),
        (RabbitQueue("q", arguments={"x-max-priority": 5}), "x-max-priority is for a classic queue"),
        (RabbitQueue("q", arguments={"x-max-length": 5}), "x-max-length is said by max_length="),
        (RabbitQueue("q", arguments={"x-queue-type": "stream"}), "x-queue-type is said by type="),
    ],
)
def test_a_wrong_queue_is_told_at_build(source: RabbitQueue, said: str) -> None:
    found = mistakes(source, dead_letter="elsewhere")
    assert any(said in one for one in found), found


@pytest.mark.parametrize(
    ("name", "group", "dead_letter", "said"),
    [
        ("orders", "", None, "group='' is none"),
        ("orders!", "g", None, "name 'orders!'"),
        ("x" * 130, "g", None, "characters, and 122 is the most"),
        ("x" * 100, "g" * 20, None, "group "),
        ("amq.topic", "g", None, "names that begin with 'amq.' are the server's own"),
        ("orders", "g", "dead!", "dead_letter='dead!'"),
        ("orders", "g", "orders.g", "this is the group's own queue"),
    ],
)
def test_a_wrong_name_is_told_at_build(name: str, group: str, dead_letter: str | None, said: str) -> None:
    found = mistakes(None, name, group=group, dead_letter=dead_letter)
    assert any(said in one for one in found), found


def test_a_queue_that_is_its_own_dead_letter() -> None:
    (found,) = mistakes(RabbitQueue("q"), dead_letter="q")
    assert "come back for ever" in found


def test_a_source_of_another_kind() -> None:
    assert mistakes(Exchange("e")) == ["Exchange is not a source of RabbitBroker"]


@pytest.mark.parametrize("mode", ["passive", "off"])
@pytest.mark.parametrize("order", ["key", "partition"])
def test_an_order_needs_a_queue_that_is_known_to_have_one_consumer(mode: Declare, order: Order) -> None:
    (found,) = mistakes(RabbitQueue("q", declare=mode), ordered_by=order)
    assert f"declare={mode!r}" in found
    assert mistakes(RabbitQueue("q", declare=mode, single_active=True), ordered_by=order) == []
    assert mistakes(RabbitQueue("q"), ordered_by=order) == []
    there = RabbitBroker("amqp://h", declare=mode)
    assert there.capabilities_of(Subscription("orders")).ordered_by == frozenset()
    assert BROKER.capabilities_of(Subscription("q", source=RabbitQueue("q", declare=mode))).ordered_by == frozenset()
    sure = RabbitQueue("q", declare=mode, single_active=True)
    assert there.capabilities_of(Subscription("q", source=sure)).ordered_by == {"key", "partition"}

    @subscriber(RabbitQueue("q", declare=mode), ordered_by=order)
    async def handle(body: str) -> None: ...

    with pytest.raises(ExceptionGroup) as caught:
        App(handle, brokers={"default": BROKER}).build()
    assert len(caught.value.exceptions) == 1 and f"declare={mode!r}" in str(caught.value)
    assert len(list(there.mistakes(Subscription("orders", ordered_by=order)))) == 1


def test_the_app_names_all_mistakes_at_once() -> None:
    @subscriber(RabbitQueue("q", durable=False, arguments={"x-typo": 1}))
    @subscriber(RabbitQueue("keyless", exchange=EVENTS))
    @subscriber(RabbitQueue("homeless", bind=["a"]))
    @subscriber(RabbitQueue("mapped", exchange=EVENTS, bind=[{"key": "a"}]))  # type: ignore[list-item]
    async def handle(number: int) -> None: ...

    with pytest.raises(ExceptionGroup) as caught:
        App(handle, brokers={"default": BROKER}).build()
    told = [str(error).partition("('")[2] for error in caught.value.exceptions]
    assert [one.partition(": ")[2].partition(":")[0] for one in told if one.startswith("q'")] == [
        "RabbitQueue(..)",
        "RabbitQueue(arguments=..)",
    ]
    assert sorted(one.partition("'")[0] for one in told) == ["homeless", "keyless", "mapped", "q", "q"]


# ---------------------------------------------------------------------- pauses


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, True),
        (RabbitQueue("q"), True),
        (RabbitQueue("q", retry=False), False),
        (RabbitQueue("q", declare="passive"), False),
        (RabbitQueue("q", declare="off"), False),
        (RabbitQueue("q", type="classic"), True),
        (RabbitQueue("q", type="classic", exclusive=True), False),
        (RabbitQueue("q", type="classic", auto_delete=True), False),
        (RabbitQueue("q", type="classic", durable=False), False),
        (RabbitQueue("q", expires=60), False),
        (RabbitQueue("q" * 200), False),
    ],
)
def test_who_has_retry_queues(source: RabbitQueue | None, expected: bool) -> None:
    subscription = Subscription("q", source=source)
    assert retries(subscription, SETTINGS) is expected
    assert BROKER.capabilities_of(subscription).retry is expected


def test_priorities_are_the_queues() -> None:
    assert not BROKER.capabilities_of(Subscription("q")).priorities
    for source in (RabbitQueue("q", type="classic", priorities=5), RabbitQueue("q", priorities=5)):
        assert BROKER.capabilities_of(Subscription("q", source=source)).priorities


# ---------------------------------------------------------------------- versions


def test_what_a_server_lacks_is_refused_with_its_version() -> None:
    with pytest.raises(BrokerRefused, match=r"this needs RabbitMQ 3\.12 or later; the server is 3\.10\.8"):
        require((3, 10, 8), (3, 12), "this")
    require((3, 12, 0), (3, 12), "this")
    require((4,), (3, 12), "this")
    with pytest.raises(BrokerRefused, match="does not tell"):
        require((), (3, 12), "this")
    require((), (3, 10), "this")


def test_arguments_are_gated() -> None:
    with pytest.raises(BrokerRefused, match=r"here: the argument x-consumer-timeout needs RabbitMQ 3\.12"):
        require_arguments((3, 10, 8), "quorum", ["x-max-length", "x-consumer-timeout"], "here")
    require_arguments((3, 12, 1), "quorum", ["x-max-length", "x-consumer-timeout"], "here")
    assert list(argument_mistakes("stream", ["x-max-age", "mine"])) == []


def test_a_source_shows_what_was_said_of_it_and_no_default() -> None:
    assert repr(Exchange("events")) == "Exchange(name='events')"
    assert repr(Binding(Exchange("events", "fanout"))) == ("Binding(exchange=Exchange(name='events', type='fanout'))")
    source = RabbitQueue("emails", bind="mail.*", exchange=Exchange("events"))
    assert repr(source) == "RabbitQueue(name='emails', exchange=Exchange(name='events'), bind='mail.*')"
    assert repr(Stream("events", max_age=60)) == "Stream(name='events', max_age=60)"
