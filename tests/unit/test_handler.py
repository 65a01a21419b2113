"""From a signature to a call: what each parameter gets."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Optional, TypedDict

import msgspec
import pytest

from streamfw import Attempt, DeliveryField, Header, Headers, JsonCodec, Message, Publisher, RawCodec, State
from streamfw.errors import ArgumentError, DecodeError
from streamfw.handler import compile_call

from .rig import FakeDelivery


class Order(msgspec.Struct):
    id: int


class Table(TypedDict):
    id: int


class Colour(enum.Enum):
    RED = "red"


def delivery(body: bytes = b'{"id":1}', headers: Any = (), **fields: Any) -> FakeDelivery:
    return FakeDelivery(name="orders", body=body, raw_headers=Headers(headers), position=4, **fields)


async def called(handler: Callable[..., Any], message: FakeDelivery | None = None, **bound: object) -> Any:
    """What the handler got, as it returns it."""
    compiled = compile_call(handler, JsonCodec(), "handler")
    for name, value in bound.items():
        compiled.bind(name, value)
    return await compiled.call(message or delivery())


async def test_bodies() -> None:
    async def struct(body: Order) -> object:
        return body

    async def table(body: Table) -> object:
        return body

    async def union(body: Order | None) -> object:
        return body

    async def raw(body: bytes) -> object:
        return body

    async def anything(body: Any) -> object:
        return body

    async def message(body: Message) -> object:
        return body.body

    results = [await called(handler) for handler in (struct, table, union, raw, anything, message)]
    assert results == [Order(1), {"id": 1}, Order(1), b'{"id":1}', {"id": 1}, b'{"id":1}']


async def test_the_order_of_parameters_is_free() -> None:
    async def handle(
        attempt: Annotated[int, Attempt],
        tenant: Annotated[str, Header("tenant")],
        order: Order,
        *,
        place: Annotated[int, DeliveryField("position")],
        pool: Annotated[dict[str, int], State],
        message: Message,
    ) -> object:
        return attempt, tenant, order, place, pool, message.attempt

    message = delivery(headers={"tenant": "acme"}, attempt=3)
    assert await called(handle, message, pool={"x": 1}) == (3, "acme", Order(1), 4, {"x": 1}, 3)


async def test_names_that_the_generated_code_uses_itself() -> None:
    async def handle(
        _body: Order,
        message: Annotated[str, Header("message")],
        error: Annotated[str, Header("error")],
        _handler: Annotated[str, Header("handler")],
        _headers: Annotated[str, Header("headers")],
        call: Annotated[str, Header("call")],
        m: Message,
    ) -> object:
        return [_body.id, message, error, _handler, _headers, call, m.name]

    names = ("message", "error", "handler", "headers", "call")
    message = delivery(headers={name: name.upper() for name in names})
    assert await called(handle, message) == [1, *(name.upper() for name in names), "orders"]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (str, b"text", "text"),
        (str | None, b"null", "null"),
        (Optional[str], b"x", "x"),  # noqa: UP045 - spelled in the other order as well
        (bytes, b"\xff\x00", b"\xff\x00"),
        (bytes | None, b"aGk=", b"aGk="),
        (int, b"17", 17),
        (float, b"1.5", 1.5),
        (bool, b"true", True),
        (int | None, b"17", 17),
        (Colour, b"red", Colour.RED),
    ],
)
async def test_headers(kind: Any, value: bytes, expected: object) -> None:
    async def handle(order: Order, header: Any) -> object:
        return header

    handle.__annotations__["header"] = Annotated[kind, Header("h")]
    assert await called(handle, delivery(headers={"h": value})) == expected


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (int, b"many", "header 'h': Expected `int`"),
        (str, b"\xff", "header 'h' is not UTF-8"),
        (int, b"\xff", "header 'h' is not UTF-8"),
        (Colour, b"blue", "header 'h': Invalid enum value 'blue'"),
        (str, None, "header 'h' is missing"),
    ],
)
async def test_headers_that_cannot_be_taken(kind: Any, value: bytes | None, text: str) -> None:
    async def handle(order: Order, header: Any) -> object:
        raise AssertionError("not called")

    handle.__annotations__["header"] = Annotated[kind, Header("h")]
    with pytest.raises(ArgumentError) as caught:
        await called(handle, delivery(headers={} if value is None else {"h": value}))
    assert text in str(caught.value)


async def test_a_default_is_for_a_missing_header_and_not_for_a_bad_one() -> None:
    async def handle(order: Order, number: Annotated[int, Header("n")] = 7) -> int:
        return number

    assert await called(handle) == 7
    with pytest.raises(ArgumentError):
        await called(handle, delivery(headers={"n": "x"}))


@pytest.mark.parametrize("body", [b"", b"{", b'{"id":"x"}', b"\xff", b"[" * 100_000])
async def test_bodies_that_cannot_be_decoded(body: bytes) -> None:
    async def handle(order: Order) -> None:
        raise AssertionError("not called")

    with pytest.raises(DecodeError) as caught:
        await called(handle, delivery(body))
    assert len(str(caught.value)) <= 1024


async def test_an_error_of_the_handler_is_its_own() -> None:
    """Not mistaken for a bad body, and readable: the generated line is in the traceback."""

    async def handle(order: Order) -> None:
        msgspec.json.decode(b"{")

    with pytest.raises(msgspec.DecodeError):
        await called(handle)

    async def missing(order: Order, *, more: Annotated[int, DeliveryField("nowhere")]) -> None: ...

    with pytest.raises(AttributeError) as caught:
        await called(missing)
    assert "return _handler(_body, more=message.nowhere)" in "".join(traceback.format_exception(caught.value))


async def test_pydantic_models() -> None:
    from pydantic import BaseModel

    class Model(BaseModel):
        id: int

    async def handle(body: Any) -> object:
        return body

    handle.__annotations__["body"] = Model
    assert await called(handle) == Model(id=1)
    with pytest.raises(DecodeError):
        await called(handle, delivery(b'{"id":"x"}'))
    assert JsonCodec().encode(Model(id=1)) == b'{"id":1}'
    assert JsonCodec().encode({"in": [Model(id=1)]}) == b'{"in":[{"id":1}]}'


def test_a_recursive_type_is_fine() -> None:
    assert JsonCodec().decoder(Tree)(b'{"below":[{"below":[]}]}') == Tree([Tree([])])


class Tree(msgspec.Struct):
    below: list[Tree]


def test_raw_bodies() -> None:
    codec = RawCodec()
    assert codec.decoder(bytes)(b"x") == b"x"
    assert codec.encode(memoryview(b"x")) == b"x"
    with pytest.raises(TypeError, match="a raw body is bytes, not str"):
        codec.encode("x")


async def test_what_has_to_be_bound_is_named() -> None:
    async def handle(
        order: Order, pool: Annotated[Tree, State], out: Annotated[Publisher[Order], "receipts"]
    ) -> object:
        return pool, out

    compiled = compile_call(handle, JsonCodec(), "handler")
    assert compiled.states == {"pool": Tree}
    assert compiled.publishers == {"out": ("receipts", Order)}


async def test_a_field_that_a_delivery_has_not_takes_the_default() -> None:
    async def handle(
        message: Message, offset: Annotated[int, DeliveryField("offset")] = -1, *, attempt: Annotated[int, Attempt] = 7
    ) -> object:
        return offset, attempt

    assert await compile_call(handle, JsonCodec(), "handle").call(Message(name="x", body=b"", attempt=2)) == (-1, 2)
