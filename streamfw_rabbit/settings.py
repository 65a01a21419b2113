"""A broker's options, from its URL and its arguments, checked.

amqp://user:password@h1:5672,h2:5672/vhost?heartbeat=30
amqps://h1,h2/?ca=/etc/rabbitmq/ca.pem
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import unquote

from streamfw.config import refuse
from streamfw.urls import OptionReader, Options, host_and_port, range_mistakes, tls_context, tls_mistakes

from .epochs import ConnectionOptions
from .queue import LEAST_LIMIT, Declare

__all__ = ["Auth", "Settings", "TransportOption", "connection_options", "parsed"]

Auth: TypeAlias = Literal["plain", "external"]
TransportOption: TypeAlias = Literal["auto", "aiormq", "fast"]

_SECURE: Final = "amqps://"
_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_FORM: Final = "amqp://user:password@host:port,host:port/vhost?option=value (or amqps://..) is needed"
_ESCAPES: Final = "special characters in user, password and vhost are percent-encoded ('/' is %2F, '@' is %40)"


class Settings(Options, frozen=True, kw_only=True):
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
        refuse((*_choice_mistakes(self), *range_mistakes(self, _RANGES, _WHOLE), *_mistakes_together(self)))
        if self.tls:
            tls_context(self.ca, self.cert, self.key)


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


def _mistakes_together(s: Settings) -> Iterable[str]:
    yield from tls_mistakes(s, _SECURE)
    if s.auth == "external" and s.cert is None:
        yield "auth='external' without cert= and key=: it is our certificate that says who we are"
    for name in ("username", "vhost", "name"):
        if len(getattr(s, name).encode(errors="replace")) > 255:
            yield f"{name}: AMQP has at most 255 bytes for it"


_OPTIONS: Final = OptionReader(Settings, places=("hosts",), secure=_SECURE)


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
    values = _login(login) | ({"vhost": unquote(path)} if path else {})
    values |= _OPTIONS.query(query) | _OPTIONS.given(options)
    return Settings(hosts=_hosts(hosts, _PORTS[scheme]), tls=scheme == "amqps", **values)


def _login(login: str) -> dict[str, Any]:
    if not login:
        return {}
    username, colon, password = login.partition(":")
    if not colon:
        raise ValueError("url: a user name without a password: amqp://user:password@.. is needed")
    return {"username": unquote(username), "password": unquote(password)}


def _hosts(text: str, default: int) -> tuple[tuple[str, int], ...]:
    if not text:
        raise ValueError(f"url: no host; {_FORM}")
    named = (host_and_port(host, default, f"{_FORM}; {_ESCAPES}") for host in text.split(","))
    return tuple((unquote(host.strip("[]")), port) for host, port in named)


def connection_options(settings: Settings, purpose: str) -> ConnectionOptions:
    """How to connect for a purpose, which stands in the connection's name."""
    return ConnectionOptions(
        hosts=settings.hosts,
        user=settings.username,
        password=settings.password,
        vhost=settings.vhost,
        tls=tls_context(settings.ca, settings.cert, settings.key) if settings.tls else None,
        auth=settings.auth,
        name=f"{settings.name} {purpose}",
        heartbeat=settings.heartbeat,
        timeout=settings.connect_timeout,
        transport=settings.transport,
    )
