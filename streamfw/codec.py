"""Bodies to values and back. A codec's decoders and encoders are built once, at build."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = ["Codec", "JsonCodec", "RawCodec"]


@runtime_checkable
class Codec(Protocol):
    """How bodies are encoded. `content_type` is None where the header would only repeat the default (JSON)."""

    content_type: str | None

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
        return msgspec.json.Decoder(annotation).decode

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        return _encode(value)


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


def _enc_hook(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot encode {type(value).__name__} as JSON")


_encode = msgspec.json.Encoder(enc_hook=_enc_hook).encode
