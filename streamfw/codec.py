"""Bodies to values and back. A codec's decoders and encoders are built once, at build.

A codec of one's own is a class with a content type and two methods:

    class TomlCodec:
        content_type = "application/toml"

        def decoder(self, annotation):
            return lambda body: msgspec.toml.decode(body, type=annotation)

        def encode(self, value):
            return msgspec.toml.encode(value)

    app = App(ship, codec=TomlCodec())
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = ["Codec", "JsonCodec", "MsgpackCodec", "RawCodec"]


@runtime_checkable
class Codec(Protocol):
    """How bodies are encoded. `content_type` is None where the header would only repeat the default (JSON)."""

    @property
    def content_type(self) -> str | None:
        """The ``content-type`` that messages get; a plain attribute will do."""

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        """A function from a body to `annotation`. Raises `TypeError` at build when there can be none; what it
        raises for a body becomes a `DecodeError`."""

    def encode(self, value: Any) -> bytes:
        """The body of `value`. Raises `TypeError` or `ValueError` when it has none."""


class JsonCodec:
    """JSON by msgspec: Structs, dataclasses, TypedDicts, builtins; pydantic models where pydantic is in use.

    ``bytes`` is the body as it is, both ways.
    """

    content_type: str | None = None

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        if annotation is bytes:
            return bytes
        if _is_pydantic(annotation):
            validate: Callable[[bytes], Any] = annotation.model_validate_json
            return validate
        decode = msgspec.json.Decoder(annotation).decode
        _refuse_strangers(annotation, "JSON")
        return decode

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        return _encode(value)


class MsgpackCodec:
    """MessagePack by msgspec: what `JsonCodec` takes, in fewer bytes; messages say so in their ``content-type``.

    ``bytes`` is the body as it is, both ways. A pydantic model is validated from the decoded mapping.
    """

    content_type: str | None = "application/msgpack"

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        if annotation is bytes:
            return bytes
        if _is_pydantic(annotation):
            decode, validate = msgspec.msgpack.Decoder().decode, annotation.model_validate
            return lambda body: validate(decode(body))
        decoder = msgspec.msgpack.Decoder(annotation).decode
        _refuse_strangers(annotation, "MessagePack")
        return decoder

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        return _encode_msgpack(value)


class RawCodec:
    """Bodies are bytes and stay so."""

    content_type: str | None = "application/octet-stream"

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        if annotation not in (bytes, Any):
            raise TypeError(f"a raw body is bytes, not {annotation!r}")
        return bytes

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"a raw body is bytes, not {type(value).__name__}")
        return bytes(value)


def _is_pydantic(annotation: Any) -> bool:
    # A model's class exists only where pydantic is imported already, so this never imports it.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _refuse_strangers(annotation: Any, form: str) -> None:
    """Raise `TypeError` when `annotation` holds a type that no body can become."""
    if strangers := _strangers(annotation):
        names = ", ".join(getattr(kind, "__qualname__", repr(kind)) for kind in strangers)
        raise TypeError(f"{form} has nothing that becomes {names}")


def _strangers(annotation: Any) -> list[Any]:
    """The types in `annotation`, at any depth, that msgspec leaves to a hook. Without one it would refuse every body,
    so it is better said at build: most often a marker (State, ..) was forgotten."""
    from msgspec import inspect

    found: list[Any] = []
    ahead: list[Any] = [inspect.type_info(annotation)]
    seen: set[int] = set()
    while ahead:
        info = ahead.pop()
        if isinstance(info, inspect.CustomType):
            found.append(info.cls)
        if not isinstance(info, inspect.Type | inspect.Field) or id(info) in seen:
            continue
        seen.add(id(info))
        for name in info.__struct_fields__:
            value = getattr(info, name)
            ahead.extend(value if isinstance(value, tuple) else (value,))
    return found


def _enc_hook(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} has no encoding")


_encode = msgspec.json.Encoder(enc_hook=_enc_hook).encode
_encode_msgpack = msgspec.msgpack.Encoder(enc_hook=_enc_hook).encode
