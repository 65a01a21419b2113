"""What a child process is told about a handler."""

from __future__ import annotations

import msgspec

from streamfw.codec import Codec

__all__ = ["Target"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A function to run: where it is found, and (where `body` names the parameter that takes it) how its body is
    decoded. `position` is the parameter's place, or None where it goes by keyword."""

    where: str
    module: str
    name: str
    codec: Codec | None = None
    body: str | None = None
    position: int | None = None
