"""Codecs: what comes out is what went in, for every kind of annotation, and messages say how they are encoded."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from streamfw import App, Codec, JsonCodec, Message, MsgpackCodec, RawCodec, Rejected, subscriber
from streamfw.memory import MemoryBroker
from tests.helpers import eventually

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


class Order(msgspec.Struct):
    id: int
    at: datetime


@dataclasses.dataclass
class Plain:
    id: int
    at: datetime


class Typed(TypedDict):
    id: int
    name: str


class Model(pydantic.BaseModel):
    id: int = pydantic.Field(gt=0)
    at: datetime


VALUES: list[tuple[Any, Any]] = [
    (Order, Order(1, NOW)),
    (Plain, Plain(1, NOW)),
    (Typed, {"id": 1, "name": "tea"}),
    (Model, Model(id=1, at=NOW)),
    (list[Order], [Order(1, NOW), Order(2, NOW)]),
    (dict[str, int], {"a": 1}),
    (int | None, None),
    (str, "text"),
    (bytes, b"\xff\x00raw"),
]


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
@pytest.mark.parametrize(("annotation", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_values_survive(codec: Codec, annotation: Any, value: Any) -> None:
    assert codec.decoder(annotation)(codec.encode(value)) == value


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
def test_what_is_not_the_annotation_is_refused(codec: Codec) -> None:
    for annotation in (Order, Plain, Typed, Model):
        with pytest.raises(ValueError):
            codec.decoder(annotation)(codec.encode({"id": "text"}))
    with pytest.raises(ValueError):
        codec.decoder(Model)(codec.encode({"id": -1, "at": NOW}))


class Pool:
    pass


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
def test_what_no_body_becomes_is_told_at_build(codec: Codec) -> None:
    for annotation in (Pool, list[Pool], dict[str, Pool | None]):
        with pytest.raises(TypeError, match="has nothing that becomes Pool"):
            codec.decoder(annotation)


def test_a_raw_body_is_bytes() -> None:
    codec = RawCodec()
    assert codec.decoder(bytes)(b"x") == b"x"
    assert codec.encode(bytearray(b"x")) == b"x"
    with pytest.raises(TypeError, match="bytes"):
        codec.decoder(int)
    with pytest.raises(TypeError, match="bytes"):
        codec.encode("x")


class TomlCodec:
    """A codec of one's own."""

    content_type = "application/toml"

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        return lambda body: msgspec.convert(tomllib.loads(body.decode()), annotation)

    def encode(self, value: Any) -> bytes:
        return "".join(f"{name} = {item!r}\n" for name, item in msgspec.to_builtins(value).items()).encode()


class Pair(msgspec.Struct):
    a: int
    b: str


async def received(app: App, name: str, payload: object, seen: list[Any]) -> Any:
    async with app.running():
        await app.publish(name, payload)
        await eventually(lambda: seen)
    return seen[0]


async def test_an_apps_codec_encodes_and_decodes_and_is_named() -> None:
    seen: list[tuple[Pair, str | None]] = []

    @subscriber("pairs")
    async def handle(pair: Pair, message: Message) -> None:
        seen.append((pair, message.content_type))

    app = App(handle, brokers={"default": MemoryBroker()}, codec=TomlCodec())
    assert await received(app, "pairs", Pair(1, "x"), seen) == (Pair(1, "x"), "application/toml")


async def test_a_subscriber_may_have_a_codec_of_its_own() -> None:
    seen: list[Pair] = []

    @subscriber("pairs", codec=MsgpackCodec())
    async def handle(pair: Pair) -> None:
        seen.append(pair)

    app = App(handle, brokers={"default": MemoryBroker()})
    assert await received(app, "pairs", msgspec.msgpack.encode(Pair(1, "x")), seen) == Pair(1, "x")


async def test_a_payload_without_an_encoding_is_refused_with_its_name() -> None:
    async with App(brokers={"default": MemoryBroker()}).running() as app:
        with pytest.raises(Rejected, match="object"):
            await app.publish("pairs", object())
