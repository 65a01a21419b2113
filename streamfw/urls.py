"""What the URLs and options of brokers on a network have in common; for packages of brokers.

A broker's settings are one frozen struct of options. They come as arguments, or as text in the URL's query; both ways
they are checked by the struct's own annotations. Everything here raises `ValueError`, naming the option, and without
what may be a password.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import msgspec

from .config import choices_of, near, refuse

__all__ = ["OptionReader", "Options", "host_and_port", "number", "range_mistakes", "tls_context", "tls_mistakes"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's settings. What is shown of them has no `password`, and not what is None."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "***" if name == "password" else value) for name, value in given if value is not None]


class OptionReader:
    """Reads options of `settings`. `places` are the fields that only the URL's own parts give; `secure` is its scheme
    over TLS."""

    def __init__(self, settings: type[Options], *, places: Collection[str], secure: str) -> None:
        fields = msgspec.structs.fields(settings)
        self._names = tuple(field.name for field in fields if field.name not in (*places, "tls"))
        self._types = {field.name: field.type for field in fields}
        self._secure = secure

    def query(self, text: str) -> dict[str, Any]:
        """The options in a URL's query."""
        found: dict[str, Any] = {}
        mistakes = []
        for part in text.split("&") if text else ():
            name, _, value = part.partition("=")
            if name in found:
                mistakes.append(f"url: option {name!r} stands in it twice")
            try:
                found[name] = self._converted(name, unquote(value), strict=False)
            except ValueError as error:
                mistakes.append(str(error))
        refuse(mistakes)
        return found

    def given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options among these arguments: one that is None counts as not given."""
        return {
            name: self._converted(name, os.fspath(value) if isinstance(value, os.PathLike) else value, strict=True)
            for name, value in options.items()
            if value is not None
        }

    def _converted(self, name: str, value: object, strict: bool) -> Any:
        if name == "tls":
            raise ValueError(f"tls: write {self._secure} in the URL")
        if name not in self._names:
            raise ValueError(f"unknown option {name!r}{near(name, self._names)}")
        try:
            return msgspec.convert(value, self._types[name], strict=strict)
        except msgspec.ValidationError as error:
            shown = "" if name == "password" else f"={value!r}"
            named = choices_of(self._types[name])
            needed = f"one of {', '.join(named)} is needed" if named else str(error)
            raise ValueError(f"{name}{shown}: {needed}") from None


_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::(\d{1,5}))?")


def host_and_port(text: str, default: int, advice: str) -> tuple[str, int]:
    """One host of a URL, as it stands there (an IPv6 address in its brackets), and its port. `advice` says what a URL
    looks like."""
    match = _HOST.fullmatch(text)
    # The text itself may be a piece of a password.
    if match is None:
        raise ValueError(f"url: malformed host or port; {advice}, IPv6 addresses stand in brackets")
    port = int(match[2] or default)
    if not 0 < port < 65_536:
        raise ValueError("url: a port is a number from 1 to 65535")
    return match[1], port


def range_mistakes(
    settings: msgspec.Struct, ranges: Mapping[str, tuple[float, float]], whole: Collection[str]
) -> Iterable[str]:
    """Which options are no number from the one to the other; those in `whole` are whole numbers."""
    for name, (low, high) in ranges.items():
        value: object = getattr(settings, name)
        kinds = int if name in whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            kind = "a whole number" if name in whole else "a number"
            yield f"{name}={value!r}: {kind} from {number(low)} to {number(high)} is needed"


def number(value: float) -> str:
    """A number as people write it: whole ones without a point, and none with an exponent."""
    return str(int(value)) if value == int(value) else f"{value:f}".rstrip("0")


def tls_mistakes(settings: Any, secure: str) -> Iterable[str]:
    """What does not go together of `tls`, `ca`, `cert` and `key`."""
    for name in ("ca", "cert", "key"):
        if getattr(settings, name) is not None and not settings.tls:
            yield f"{name}={getattr(settings, name)!r} without TLS: write {secure} in the URL"
    for name, other in (("cert", "key"), ("key", "cert")):
        if getattr(settings, name) is not None and getattr(settings, other) is None:
            yield f"{name}={getattr(settings, name)!r} without {other}=: our certificate and its key come together"


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """The context of these files in PEM: whom to trust (None: the system's), our certificate and its key. The server's
    certificate and name are verified."""
    files = (("ca", ca), ("cert", cert), ("key", key))
    return _context(*(path and (path, _changed(option, path)) for option, path in files))


def _changed(option: str, path: str) -> float:
    """When the file was last written: a certificate that was renewed is read again."""
    try:
        with open(path, "rb"):
            return os.stat(path).st_mtime
    except OSError as error:
        raise ValueError(f"{option}={path!r}: cannot be read: {error.strerror}") from None


_File: TypeAlias = "tuple[str, float] | None"


@lru_cache(maxsize=16)
def _context(ca: _File, cert: _File, key: _File) -> ssl.SSLContext:
    """Made once for each set of files."""
    try:
        context = ssl.create_default_context(cafile=ca[0] if ca else None)
    except ssl.SSLError as error:
        raise ValueError(f"ca={ca and ca[0]!r}: holds no certificates in PEM: {error.reason or error}") from None
    if cert and key:
        try:
            # Without a password of ours, OpenSSL asks the terminal for one.
            context.load_cert_chain(cert[0], key[0], password=lambda: "")
        except ssl.SSLError as error:
            raise ValueError(
                f"cert={cert[0]!r}, key={key[0]!r}: not a certificate and its key in PEM, without a passphrase: "
                f"{error.reason or error}"
            ) from None
    return context
