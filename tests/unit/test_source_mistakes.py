"""Source objects of the brokers with values that make no sense: mistakes in the list of `App.build`, never an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamfw import App, subscriber
from streamfw.broker import Broker
from streamfw.testing._memory import StandIn
from streamfw_kafka import KafkaBroker, Topic
from streamfw_postgres import PostgresBroker, Queue
from streamfw_rabbit import Exchange, MemoryOffsets, RabbitBroker, RabbitQueue, Stream

ODD: tuple[object, ...] = (
    None, 5, -1, True, 1.5, float("nan"), "x", "", b"x", "x" * 300, "\ud800", object(), set(), {}, {"a": 1}, {5: 5}, [],
    ["a"], [5], [None], [{}], [object()], ("a", "b"), [("a",)], [("a", "b")], [("a", 5)], [("a", "b", "c")],
    [("a", "b", {"x": object()})], [("a", "b", {5: 5})],
)  # fmt: skip
RABBIT, KAFKA, POSTGRES = RabbitBroker("amqp://h"), KafkaBroker("kafka://h"), PostgresBroker("postgres://h/shop")
STORE = MemoryOffsets()
EVENTS = Exchange("events")


def built(broker: Broker, source: object, **options: Any) -> bool:
    async def take(body: str) -> None: ...

    try:
        App(subscriber(source, **options)(take), brokers={"default": broker}).build()
    except ExceptionGroup:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # of a pattern that is no text
@pytest.mark.parametrize(
    ("broker", "source"),
    [
        (RABBIT, RabbitQueue("q")),
        (RABBIT, RabbitQueue("q", exchange=EVENTS, bind="k")),
        (RABBIT, RabbitQueue("q", type="classic")),
        (RABBIT, Stream("q", store=STORE)),
        (RABBIT, Stream("q", store=STORE, exchange=EVENTS, bind="k")),
        (KAFKA, Topic("q")),
        (KAFKA, Topic("q", retry_topic=True)),
        (POSTGRES, Queue("q")),
    ],
)
@pytest.mark.parametrize("options", [{}, {"ordered_by": "key", "dead_letter": None}])
def test_no_value_of_a_source_object_breaks_the_build(broker: Broker, source: msgspec.Struct, options: Any) -> None:
    given = [
        built(broker, source, **options),
        *(
            built(broker, msgspec.structs.replace(source, **{field: value}), **options)
            for field in source.__struct_fields__
            for value in ODD
        ),
    ]
    assert False in given and (True in given or "retry_topic" in repr(source))
    in_memory = StandIn("default", None, None)
    for field in source.__struct_fields__:
        for value in ODD:
            built(in_memory, msgspec.structs.replace(source, **{field: value}), **options)


@pytest.mark.parametrize("field", Exchange.__struct_fields__)
def test_no_value_of_an_exchange_breaks_the_build(field: str) -> None:
    exchanges = [msgspec.structs.replace(EVENTS, **{field: value}) for value in ODD]
    given = [built(RABBIT, RabbitQueue("q", exchange=one, bind="k")) for one in exchanges]
    given += [built(RABBIT, Stream("q", store=STORE, bind=[(one, "k")])) for one in exchanges]
    assert False in given
    for one in exchanges:
        built(StandIn("default", None, None), RabbitQueue("q", exchange=one, bind="k"))
