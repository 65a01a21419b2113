"""A broker's options, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, get_args
from urllib.parse import urlsplit

import msgspec

from streamfw.config import refuse
from streamfw.urls import range_mistakes

from .pool import Isolation
from .queue import Form, lease_mistakes
from .schema import checked_schema

__all__ = ["EMBEDDED", "Settings", "checked_url"]

EMBEDDED = "postgres+embedded"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """See `PostgresBroker`."""

    schema: str
    form: Form
    lease: float
    pool_size: int
    max_body: int
    poll: float
    isolation: Isolation
    command_timeout: float
    connect_timeout: float

    def __post_init__(self) -> None:
        refuse(_mistakes(self))


_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "pool_size": (1, 1000),
    # A value of Postgres holds 1 GiB at most, and a packet with one as text is twice that.
    "max_body": (1, 512 * 1024 * 1024),
    "poll": (0.05, 60),
    "command_timeout": (0.1, 3600),
    "connect_timeout": (0.1, 3600),
}
_WHOLE: Final = frozenset({"pool_size", "max_body"})


def _mistakes(s: Settings) -> Iterable[str]:
    try:
        checked_schema(s.schema)
    except ValueError as error:
        yield str(error)
    for name, choices in (("form", Form), ("isolation", Isolation)):
        if (given := getattr(s, name)) not in get_args(choices):
            yield f"{name}={given!r}: one of {', '.join(get_args(choices))} is needed"
    for wrong in lease_mistakes(s.lease, "(lease="):
        yield wrong.replace("(", "", 1).replace(")", "", 1)
    yield from range_mistakes(s, _RANGES, _WHOLE)


def checked_url(url: str) -> str:
    """The URL, when it can be one of ours. Raises `ValueError`, without what may be a password."""
    scheme = url.partition("://")[0]
    rest = url.partition("://")[2].partition("?")[0]
    if scheme not in ("postgres", "postgresql", EMBEDDED) or "://" not in url or (scheme == EMBEDDED and not rest):
        raise ValueError("url: postgres://user:password@host:port/database or postgres+embedded://PATH is needed")
    try:
        urlsplit(url).port  # noqa: B018 - it raises, with a piece of the URL in its message
    except ValueError:
        if scheme != EMBEDDED:
            raise ValueError(
                "url: malformed; special characters in user and password are percent-encoded ('/' is %2F)"
            ) from None
    return url
