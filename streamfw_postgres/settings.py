"""A broker's options, checked."""

from __future__ import annotations

from typing import get_args
from urllib.parse import urlsplit

import msgspec

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
        checked_schema(self.schema)
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r}: one of {', '.join(get_args(Form))} is needed")
        for wrong in lease_mistakes(self.lease, "(lease="):
            raise ValueError(wrong.replace("(", "", 1).replace(")", "", 1))
        _between("pool_size", self.pool_size, 1, 1000, whole=True)
        # A value of Postgres holds 1 GiB at most, and a packet with one as text is twice that.
        _between("max_body", self.max_body, 1, 512 * 1024 * 1024, whole=True)
        _between("poll", self.poll, 0.05, 60)
        _between("command_timeout", self.command_timeout, 0.1, 3600)
        _between("connect_timeout", self.connect_timeout, 0.1, 3600)
        if self.isolation not in get_args(Isolation):
            raise ValueError(f"isolation={self.isolation!r}: one of {', '.join(get_args(Isolation))} is needed")


def _between(name: str, value: float, low: float, high: float, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(
            f"{name}={value!r}: {'a whole number' if whole else 'a number'} from {low:g} to {high:g} is needed"
        )


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
