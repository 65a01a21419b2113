"""Headers as the column `headers` holds them: JSON that an operator can read, and every byte survives.

- null: none.
- ``{"tenant": "a", ...}``: the common case: values that are UTF-8, each name once.
- ``[["tag", "a"], ["tag", "b"], ["raw", {"base64": "/w=="}], ["gone", null]]``: everything else.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from streamfw.errors import ArgumentError
from streamfw.message import NO_HEADERS, Headers

__all__ = ["decode", "encode"]

_encode = msgspec.json.encode
_decode = msgspec.json.decode


def encode(headers: Headers) -> bytes | None:
    """The column's value. Raises `UnicodeEncodeError` for a name that is not text (a lone surrogate)."""
    pairs = headers.pairs
    if not pairs:
        return None
    try:
        plain = {name: value.decode() for name, value in pairs}  # type: ignore[union-attr]
    except (UnicodeDecodeError, AttributeError):  # bytes that are no text, or a null
        plain = {}
    if len(plain) == len(pairs):
        return _encode(plain)
    return _encode([(name, _value(value)) for name, value in pairs])


def _value(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def decode(raw: bytes | None) -> Headers:
    """`Headers` of the column's value. Raises `ArgumentError` for what nobody here wrote."""
    if raw is None:
        return NO_HEADERS
    try:
        read = _decode(raw)
        if isinstance(read, dict):
            return Headers.of(tuple([(name, _bytes(value)) for name, value in read.items()]))
        return Headers.of(tuple([(str(name), _bytes(value)) for name, value in read]))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError, KeyError, binascii.Error) as error:
        raise ArgumentError(f"the column headers is not as streamfw writes it: {raw[:60]!r} ({error})") from None


def _bytes(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return None
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    raise ValueError(f"a value is text, null or base64, not {value!r}")
