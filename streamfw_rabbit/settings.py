"""A broker's options, from its URL and its arguments, checked.

amqp://user:password@h1:5672,h2:5672/vhost?heartbeat=30
amqps://h1,h2/?ca=/etc/rabbitmq/ca.pem
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import unquote

import msgspec

from streamfw.config import near

from .epochs import ConnectionOptions
from .queue import LEAST_LIMIT, Declare

__all__ = ["Auth", "Settings", "TransportOption", "connection_options", "parsed"]

Auth: TypeAlias = Literal["plain", "external"]
TransportOption: TypeAlias = Literal["auto", "aiormq", "fast"]

_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_FORM: Final = "amqp://user:password@host:port,host:port/vhost?option=value (or amqps://..) is needed"
_ESCAPES: Final = "special characters in user, password and vhost are percent-encoded ('/' is %2F, '@' is %40)"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """See `RabbitBroker`. Times are in seconds, sizes in bytes. Raises `ValueError`, naming the option.

    - `hosts`: names and ports of the servers, tried in turn. `vhost`, `username`, `password`: where and as whom.
    - `tls`, `ca`, `cert`, `key`: whether over TLS; files of certificates to trust, and of our own.
    - `auth`: how we authenticate; ``external`` is by our certificate.
    - `name`: how the server's management calls our connections.
    - `heartbeat`, `connect_timeout`: of a connection.
    - `transport`: which of the two channels; see `epochs.ConnectionOptions`.
    - `declare`, `delivery_limit`: of queues that do not say it themselves, and of plain names.
    - `max_body`, `window`, `window_bytes`, `publish_timeout`, `blocked_timeout`, `priorities`: of publishing.
    - `consumer_timeout`: after which the server ends a channel for a message that is not settled.
    """

    hosts: tuple[tuple[str, int], ...]
    vhost: str = "/"
    username: str = "guest"
    password: str = "guest"
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    auth: Auth = "plain"
    name: str = "streamfw"
    heartbeat: int = 15
    connect_timeout: float = 10.0
    transport: TransportOption = "auto"
    declare: Declare = "declare"
    delivery_limit: int = LEAST_LIMIT
    max_body: int = 16 * 1024 * 1024
    window: int = 1000
    window_bytes: int = 8 * 1024 * 1024
    publish_timeout: float = 30.0
    blocked_timeout: float = 10.0
    priorities: int = 0
    consumer_timeout: float = 1800.0

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError(f"url: no host; {_FORM}")
        for mistake in (*_choice_mistakes(self), *_range_mistakes(self), *_mistakes_together(self)):
            raise ValueError(mistake)
        if self.tls:
            _context_of(self)

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "***" if name == "password" else value) for name, value in given if value is not None]


_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "heartbeat": (0, 3600),
    "connect_timeout": (0.1, 600),
    "delivery_limit": (LEAST_LIMIT, 2**31 - 1),
    "max_body": (1, 512 * 1024 * 1024),
    "window": (1, 100_000),
    "window_bytes": (1024, 1024**3),
    "publish_timeout": (0.1, 3600),
    "blocked_timeout": (0, 3600),
    "priorities": (0, 255),
    "consumer_timeout": (0.1, 10**7),
}
_WHOLE: Final = frozenset({"heartbeat", "delivery_limit", "max_body", "window", "window_bytes", "priorities"})


def _choice_mistakes(s: Settings) -> Iterable[str]:
    for name, choices in (("auth", Auth), ("transport", TransportOption), ("declare", Declare)):
        if (given := getattr(s, name)) not in get_args(choices):
            yield f"{name}={given!r}: one of {', '.join(get_args(choices))} is needed"


def _range_mistakes(s: Settings) -> Iterable[str]:
    for name, (low, high) in _RANGES.items():
        value: object = getattr(s, name)
        kinds = int if name in _WHOLE else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            kind = "a whole number" if name in _WHOLE else "a number"
            yield f"{name}={value!r}: {kind} from {low:g} to {high:g} is needed"


def _mistakes_together(s: Settings) -> Iterable[str]:
    for name in ("ca", "cert", "key"):
        if getattr(s, name) is not None and not s.tls:
            yield f"{name}={getattr(s, name)!r} without TLS: write amqps:// in the URL"
    for name, other in (("cert", "key"), ("key", "cert")):
        if getattr(s, name) is not None and getattr(s, other) is None:
            yield f"{name}={getattr(s, name)!r} without {other}=: our certificate and its key come together"
    if s.auth == "external" and s.cert is None:
        yield "auth='external' without cert= and key=: it is our certificate that says who we are"
    for name in ("username", "vhost", "name"):
        if len(getattr(s, name).encode(errors="replace")) > 255:
            yield f"{name}: AMQP has at most 255 bytes for it"


_NAMES: Final = tuple(field.name for field in msgspec.structs.fields(Settings) if field.name not in ("hosts", "tls"))
_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def parsed(url: str, **options: Any) -> Settings:
    """The settings of `url` and `options`; an option that is None counts as not given. The query of the URL takes the
    same options as text; of one that is given both ways the argument wins.

    Raises `ValueError`, naming the option, and without what may be a password.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _PORTS:
        raise ValueError(f"url: {_FORM}")
    if "#" in rest:
        raise ValueError(f"url: '#' has no meaning in it; {_ESCAPES}")
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    if "@" in rest[len(authority) :]:  # else what follows would be taken for the vhost, or an option, and shown
        raise ValueError(f"url: '@' behind '/' or '?'; {_ESCAPES}")
    if "/" in path:
        raise ValueError(f"url: one vhost belongs between the hosts and '?'; {_FORM}; {_ESCAPES}")
    login, _, hosts = authority.rpartition("@")
    values = _login(login) | ({"vhost": unquote(path)} if path else {}) | _query(query)
    for name, value in options.items():
        if value is not None:
            values[name] = _converted(name, os.fspath(value) if isinstance(value, os.PathLike) else value, strict=True)
    return Settings(hosts=_hosts(hosts, _PORTS[scheme]), tls=scheme == "amqps", **values)


def _login(login: str) -> dict[str, Any]:
    if not login:
        return {}
    username, colon, password = login.partition(":")
    if not colon:
        raise ValueError("url: a user name without a password: amqp://user:password@.. is needed")
    return {"username": unquote(username), "password": unquote(password)}


_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::(\d{1,5}))?")


def _hosts(text: str, default: int) -> tuple[tuple[str, int], ...]:
    if not text:
        raise ValueError(f"url: no host; {_FORM}")
    return tuple(_host(host, default) for host in text.split(","))


def _host(text: str, default: int) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    # The text itself may be a piece of a password.
    if match is None:
        raise ValueError(f"url: malformed host or port; {_FORM}; {_ESCAPES}, IPv6 addresses stand in brackets")
    port = int(match[2] or default)
    if not 0 < port < 65_536:
        raise ValueError("url: a port is a number from 1 to 65535")
    return unquote(match[1].strip("[]")), port


def _query(query: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        name, _, text = part.partition("=")
        if name in found:
            raise ValueError(f"url: option {name!r} stands in it twice")
        found[name] = _converted(name, unquote(text), strict=False)
    return found


def _converted(name: str, value: object, strict: bool) -> Any:
    if name == "tls":
        raise ValueError("tls: write amqps:// in the URL")
    if name not in _NAMES:
        raise ValueError(f"unknown option {name!r}{near(name, _NAMES)}")
    try:
        return msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError as error:
        shown = "" if name == "password" else f"={value!r}"
        choices = get_args(_TYPES[name])
        named = [choice for choice in choices if isinstance(choice, str)]
        needed = f"one of {', '.join(named)} is needed" if named else str(error)
        raise ValueError(f"{name}{shown}: {needed}") from None


def connection_options(settings: Settings, purpose: str) -> ConnectionOptions:
    """How to connect for a purpose, which stands in the connection's name."""
    return ConnectionOptions(
        hosts=settings.hosts,
        user=settings.username,
        password=settings.password,
        vhost=settings.vhost,
        tls=_context_of(settings) if settings.tls else None,
        auth=settings.auth,
        name=f"{settings.name} {purpose}",
        heartbeat=settings.heartbeat,
        timeout=settings.connect_timeout,
        transport=settings.transport,
    )


def _context_of(settings: Settings) -> ssl.SSLContext:
    files = (("ca", settings.ca), ("cert", settings.cert), ("key", settings.key))
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
    """Made once for each set of files. The server's certificate and name are verified."""
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
