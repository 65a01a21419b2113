"""Headers and properties both ways, without a server: what goes into AMQP's properties comes out of them."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, Headers, Outgoing
from streamfw_rabbit import _content
from streamfw_rabbit.channel import FieldValue, Properties
from streamfw_rabbit.delivery import maker_of
from streamfw_rabbit.headers import (
    ATTEMPT,
    FROM,
    KEY,
    copied,
    is_reserved,
    key_of,
    properties_of,
    put_aside_by,
    told_by_server,
    visible_headers,
)

Pairs = tuple[tuple[str, bytes | None], ...]
NATIVE = ("content-type", "correlation-id", "reply-to")
names = st.one_of(st.sampled_from(NATIVE), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
values = st.one_of(st.none(), st.binary(max_size=40), st.text(max_size=30).map(lambda t: t.encode(errors="replace")))
pairs = st.lists(st.tuples(names, values), unique_by=lambda pair: pair[0], max_size=8).map(tuple)
keys = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))


def sent(headers: Pairs, **fields: Any) -> Properties:
    message = Outgoing(name="orders", body=b"", message_id="m", headers=Headers.of(headers), **fields)
    return properties_of(message, 1_700_000_000, None)


def over_the_wire(properties: Properties, server_sorts: bool = False) -> Properties:
    came = _content.decode(_content.encode(properties, 7))
    if server_sorts:  # as it does when it adds a header
        came.raw_headers = {**dict(sorted(came.headers.items())), "x-delivery-count": 1}
    return came


@given(pairs, keys, st.booleans())
def test_headers_come_out_as_they_went_in(headers: Pairs, key: str | None, server_sorts: bool) -> None:
    if any(is_reserved(name) for name, _ in headers):
        with pytest.raises(ValueError, match="not carried for others"):
            sent(headers)
        return
    came = over_the_wire(sent(headers, key=key), server_sorts)
    assert visible_headers(came).pairs == headers
    assert key_of(came.headers) == key
    assert (came.message_id, came.timestamp, came.delivery_mode) == ("m", 1_700_000_000, 2)


def test_native_headers_stand_in_their_properties_where_they_fit() -> None:
    came = over_the_wire(sent((("content-type", b"text/plain"), ("correlation-id", b"c"), ("reply-to", b"q"))))
    assert (came.content_type, came.correlation_id, came.reply_to, came.headers) == ("text/plain", "c", "q", {})
    odd: Pairs = (("content-type", b"\xff"), ("correlation-id", b""), ("reply-to", b"x" * 256))
    came = over_the_wire(sent(odd))
    assert (came.content_type, came.correlation_id, came.reply_to) == (None, None, None)
    assert visible_headers(came).pairs == odd


def test_a_message_without_headers_has_no_table() -> None:
    assert sent(()).raw_headers is None
    assert over_the_wire(sent(())).headers == {}


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ((("a", b"1"), ("b", b""), ("a", b"2")), "header 'a' comes twice"),
        (((KEY, b"forged"),), "header 'x-streamfw-key': this name is the server's or ours"),
        ((("x-death", b"1"),), "x-death"),
        ((("x-first-death-queue", b"1"),), "x-first-death-queue"),
        ((("CC", b"elsewhere"),), "'CC'"),
        ((("BCC", b"elsewhere"),), "'BCC'"),
    ],
)
def test_what_cannot_travel_is_named(headers: Pairs, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        sent(headers)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["x-tenant", "x-request-id", "X-DEATH", "ACC", "CCC", "cc", "Content", "x", "x-"])
def test_names_that_only_look_like_ours_are_carried(name: str) -> None:
    assert not is_reserved(name)
    assert visible_headers(over_the_wire(sent(((name, b"1"),)))).pairs == ((name, b"1"),)


def test_what_other_publishers_write_is_read_as_text() -> None:
    table: dict[str, FieldValue] = {
        "int": 42,
        "negative": -1,
        "true": True,
        "false": False,
        "float": 1.5,
        "decimal": Decimal("12.50"),
        "time": datetime(2026, 11, 30, 10, 0, tzinfo=UTC),
        "bytes": bytearray(b"\x00\xff"),
        "void": None,
        "raw": b"\xff",
        "list": [1, "two", None, [3]],
        "table": {"a": {"b": 1}, "t": datetime(2026, 1, 1, tzinfo=UTC)},
    }
    came = over_the_wire(Properties(raw_headers=dict(table), correlation_id="c"))
    assert dict(visible_headers(came).pairs) == {
        "int": b"42",
        "negative": b"-1",
        "true": b"true",
        "false": b"false",
        "float": b"1.5",
        "decimal": b"12.50",
        "time": b"2026-11-30T10:00:00+00:00",
        "bytes": b"\x00\xff",
        "void": None,
        "raw": b"\xff",
        "list": b'[1,"two",null,[3]]',
        "table": b'{"a":{"b":1},"t":"2026-01-01T00:00:00Z"}',
        "correlation-id": b"c",
    }


scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), values)
trees: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
short = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))


@given(st.dictionaries(names, trees, max_size=6), short, short, short)
def test_whatever_others_write_can_be_put_aside(
    table: dict[str, Any], content_type: str | None, correlation_id: str | None, reply_to: str | None
) -> None:
    """A dead letter is published with the headers that a handler saw; it must not fail for what somebody else wrote."""
    theirs = Properties(raw_headers=table, content_type=content_type, correlation_id=correlation_id, reply_to=reply_to)
    shown = visible_headers(over_the_wire(theirs))
    assert visible_headers(over_the_wire(sent(shown.pairs))).pairs == shown.pairs


def test_what_the_server_adds_is_not_shown() -> None:
    deaths: list[FieldValue] = [{"reason": "expired", "queue": "q"}]
    table: dict[str, FieldValue] = {"tenant": "acme", "x-death": deaths, "x-first-death-queue": "q", "CC": ["other"]}
    came = Properties(raw_headers=table | {"x-delivery-count": 3})
    assert visible_headers(came).pairs == (("tenant", b"acme"),)


def test_a_table_that_cannot_be_read_is_said_to_be() -> None:
    came = Properties(raw_headers=b"\x05abc", correlation_id="c")
    ((name, told),) = visible_headers(came).pairs
    assert name == "malformed-properties"
    assert b"malformed header table" in (told or b"")
    assert copied(came, {ATTEMPT: 2}).raw_headers == {ATTEMPT: 2}


class Malformed:
    """A delivery of which nothing but the body can be read."""

    tag, body, consumer_tag, redelivered = 7, b"body", "", False

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"{name} is not UTF-8")


@pytest.mark.parametrize("key", ["header", "routing_key"])
def test_properties_that_cannot_be_read_cost_no_message(key: Any) -> None:
    delivery = maker_of("orders", "key", "orders.shop", key, None)(Malformed(), 3)
    assert (delivery.body, delivery.tag, delivery.epoch) == (b"body", 7, 3)
    assert (delivery.message_id, delivery.key, delivery.attempt, delivery.timestamp) == ("", None, 1, 0.0)
    assert delivery.headers.pairs == (("malformed-properties", b"properties is not UTF-8"),)
    assert (delivery.exchange, delivery.routing_key) == ("", "")


def test_a_dead_letter_of_the_server_tells_why() -> None:
    deaths: list[FieldValue] = [{"reason": "delivery_limit", "queue": "orders.shop"}, {"reason": "expired"}]
    came = Properties(raw_headers={"tenant": "acme", "x-death": deaths})
    assert put_aside_by(came.headers) == ("orders.shop", "delivery_limit")
    shown = dict(visible_headers(came).pairs)
    assert shown["tenant"] == b"acme"
    assert b"'orders.shop'" in (shown[ERROR] or b"")
    assert shown[ERROR_TYPE] == b"DeliveryLimit"
    assert dict(visible_headers(copied(came, {})).pairs) == shown, "also after it has been moved"


@pytest.mark.parametrize(
    ("reason", "kind"), [("expired", b"Expired"), ("maxlen", b"Maxlen"), ("rejected", b"Rejected"), ("new", b"New")]
)
def test_what_the_server_puts_aside_is_a_dead_letter_only_where_one_looks_for_them(reason: str, kind: bytes) -> None:
    """Retry queues, ours and those of others, put aside what has waited; their consumers get that as it is."""
    table: dict[str, FieldValue] = {"x-death": [{"reason": reason, "queue": "q"}]}
    told = dict(told_by_server(table))
    assert (told[ORIGIN], told[ERROR_TYPE]) == (b"q", kind)
    assert b"queue 'q'" in told[ERROR]
    assert not visible_headers(Properties(raw_headers=table)).pairs
    assert copied(Properties(raw_headers=table), {}).raw_headers == {}


@pytest.mark.parametrize("deaths", ["forged", [], ["x"], [{"reason": "expired"}], [{"reason": 1, "queue": 2}]])
def test_deaths_that_are_none(deaths: Any) -> None:
    assert put_aside_by({"x-death": deaths}) is None
    assert told_by_server({"x-death": deaths}) == []


def test_a_copy_keeps_all_that_is_the_senders() -> None:
    came = Properties(
        raw_headers={"n": 42, "x-tenant": "a", KEY: "k", "x-death": [], "x-delivery-count": 1, "CC": ["q"], ATTEMPT: 9},
        content_type="text/plain",
        content_encoding="gzip",
        priority=3,
        correlation_id="c",
        reply_to="r",
        expiration="1000",
        message_id="m",
        timestamp=1.0,
        message_type="order",
        user_id="guest",
        app_id="shop",
        delivery_mode=1,
    )
    again = copied(came, {ATTEMPT: 2, FROM: ["", "q"]})
    assert again.headers == {"n": 42, "x-tenant": "a", KEY: "k", ATTEMPT: 2, FROM: ["", "q"]}
    assert (again.content_type, again.content_encoding, again.priority) == ("text/plain", "gzip", 3)
    assert (again.correlation_id, again.reply_to, again.message_id) == ("c", "r", "m")
    assert (again.timestamp, again.message_type, again.app_id) == (1.0, "order", "shop")
    assert (again.expiration, again.user_id, again.delivery_mode) == (None, None, 2)
