"""A broker's options, from its URL and its arguments, checked; and what aiokafka's clients are made with.

kafka://user:password@h1:9092,h2:9092/?isolation=read_uncommitted
kafka+tls://h1,h2:9093/?ca=/etc/kafka/ca.pem
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import unquote

from aiokafka import codec

from streamfw.config import refuse
from streamfw.urls import OptionReader, Options, host_and_port, range_mistakes, tls_context, tls_mistakes

__all__ = ["Compression", "Isolation", "Sasl", "Settings", "client_arguments", "is_legal_name", "parsed"]

Sasl: TypeAlias = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
Compression: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]

PORT: Final = 9092
_SECURE: Final = "kafka+tls://"
_FORM: Final = "kafka://user:password@host:port,host:port/?option=value (or kafka+tls://..) is needed"
_ESCAPES: Final = "special characters in user and password are percent-encoded ('/' is %2F, '@' is %40)"
_LEGAL: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def is_legal_name(name: object) -> bool:
    """Whether it can name a topic (the server's own rule, `Topic.validate` in its source), or a static member."""
    return isinstance(name, str) and _LEGAL.fullmatch(name) is not None and name not in (".", "..")


class Settings(Options, frozen=True, kw_only=True):
    """See `KafkaBroker`. Times are in seconds, sizes in bytes. Raises `ValueError`, naming the option.

    - `bootstrap`: ``host:port`` of the servers that are asked first.
    - `client_id`: what the server's log calls us.
    - `username`, `password`, `sasl`: how we authenticate (a user name without `sasl` means PLAIN).
    - `tls`, `ca`, `cert`, `key`: whether over TLS; files of certificates to trust, and of our own.
    - `create_topics`, `partitions`, `replication`: make missing topics, and how (-1: the server's defaults).
    - `isolation`: whether records of open and aborted transactions are seen.
    - `session_timeout`, `heartbeat`, `rebalance_timeout`, `max_poll_interval`, `static_member`: of the consumer group;
      `static_member` is the ``group.instance.id``.
    - `rebalance_drain`: how long running handlers may finish before their partitions move.
    - `commit_every`, `commit_after`, `commit_timeout`: seconds, or messages, between two commits.
    - `open_limit`, `window_limit`: unsettled messages of a partition, and messages from the oldest of them to the
      newest, at which it is not read further.
    - `fetch_wait`: how long the server may wait for records.
    - `compression`, `max_body`, `linger`, `publish_timeout`: of publishing; for `linger` a batch waits for more.
    - `request_timeout`: one request; `connect_timeout`: all of connecting.
    - `metadata_age`: after how long topics and partitions are asked for again.
    """

    bootstrap: tuple[str, ...]
    client_id: str = "streamfw"
    username: str | None = None
    password: str | None = None
    sasl: Sasl | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    create_topics: bool = False
    partitions: int = -1
    replication: int = -1
    isolation: Isolation = "read_committed"
    session_timeout: float = 45.0
    heartbeat: float = 0.4
    rebalance_timeout: float = 60.0
    rebalance_drain: float = 1.0
    commit_every: float = 0.2
    commit_after: int = 5000
    commit_timeout: float = 5.0
    open_limit: int = 10_000
    window_limit: int = 50_000
    fetch_wait: float = 0.1
    max_poll_interval: float = 300.0
    static_member: str | None = None
    compression: Compression = "none"
    max_body: int = 1_000_000
    linger: float = 0.0
    request_timeout: float = 10.0
    publish_timeout: float = 30.0
    connect_timeout: float = 10.0
    metadata_age: float = 10.0

    def __post_init__(self) -> None:
        if not self.bootstrap:
            raise ValueError(f"url: no host; {_FORM}")
        refuse([*_choice_mistakes(self), *_range_mistakes(self)] or _mistakes_together(self))
        if self.tls:
            tls_context(self.ca, self.cert, self.key)


# From, to, and whether it is a whole number. What the server's own limits are (for example of session_timeout) only
# the server knows: it refuses, and the error says so.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "partitions": (-1, 10_000),
    "replication": (-1, 100),
    "session_timeout": (0.5, 3600),
    "heartbeat": (0.05, 600),
    "rebalance_timeout": (1, 3600),
    "rebalance_drain": (0, 3600),
    "commit_every": (0.01, 60),
    "commit_after": (1, 10_000_000),
    "commit_timeout": (0.1, 300),
    "open_limit": (1, 10_000_000),
    "window_limit": (1, 100_000_000),
    "fetch_wait": (0.001, 10),
    "max_poll_interval": (1, 86_400),
    "max_body": (1, 1_000_000_000),
    "linger": (0, 10),
    "request_timeout": (0.1, 600),
    "publish_timeout": (0.1, 3600),
    "connect_timeout": (0.1, 600),
    "metadata_age": (0.1, 3600),
}
_WHOLE: Final = frozenset({"partitions", "replication", "commit_after", "open_limit", "window_limit", "max_body"})


def _choice_mistakes(s: Settings) -> Iterable[str]:
    for name, choices, given in (
        ("sasl", Sasl, s.sasl),
        ("isolation", Isolation, s.isolation),
        ("compression", Compression, s.compression),
    ):
        if given is not None and given not in get_args(choices):
            yield f"{name}={given!r}: one of {', '.join(get_args(choices))} is needed"
    if s.compression in ("snappy", "lz4", "zstd") and not getattr(codec, f"has_{s.compression}")():
        yield f"compression={s.compression!r}: its codec is not installed; pip install cramjam"


def _range_mistakes(s: Settings) -> Iterable[str]:
    yield from range_mistakes(s, _RANGES, _WHOLE)
    for name in ("partitions", "replication"):
        if getattr(s, name) == 0:
            yield f"{name}=0: at least one is needed, or -1 for the server's default"
    if s.static_member is not None and not is_legal_name(s.static_member):
        yield f"static_member={s.static_member!r}: 1 to 249 letters, digits, '.', '_' and '-' are needed"


def _mistakes_together(s: Settings) -> Iterable[str]:
    if s.sasl and not s.username:
        yield f"sasl={s.sasl!r} without a user name: write it into the URL, kafka://user:password@.."
    if s.password is not None and not s.username:
        yield "password: there is no user name with it"
    if s.username and s.password is None:
        yield f"username={s.username!r} without a password: kafka://user:password@.. is needed"
    if s.username and not s.sasl:
        yield f"username={s.username!r} without sasl=: one of {', '.join(get_args(Sasl))} is needed"
    yield from tls_mistakes(s, _SECURE)
    if s.heartbeat * 3 > s.session_timeout:
        yield f"heartbeat={s.heartbeat:g} is more than a third of session_timeout={s.session_timeout:g}"
    if s.rebalance_drain >= s.rebalance_timeout:
        yield f"rebalance_drain={s.rebalance_drain:g} is not below rebalance_timeout={s.rebalance_timeout:g}"
    if s.window_limit < s.open_limit:
        yield f"window_limit={s.window_limit} is below open_limit={s.open_limit}"
    if s.linger >= s.publish_timeout:
        yield f"linger={s.linger:g} is not below publish_timeout={s.publish_timeout:g}"


_OPTIONS: Final = OptionReader(Settings, places=("bootstrap",), secure=_SECURE)


def parsed(url: str, **options: Any) -> Settings:
    """The settings of `url` and `options`; an option that is None counts as not given. The query of the URL takes the
    same options as text; of one that is given both ways the argument wins.

    Raises `ValueError`, naming the option, and without what may be a password.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in ("kafka", "kafka+tls"):
        raise ValueError(f"url: {_FORM}")
    bootstrap = _bootstrap(rest)
    values = _login(rest) | _query(rest) | _OPTIONS.given(options)
    if values.get("username"):
        values.setdefault("sasl", "PLAIN")
    return Settings(bootstrap=bootstrap, tls=scheme == "kafka+tls", **values)


def _authority(rest: str) -> tuple[str, str]:
    """What stands before and after the last "@" in front of the path."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :]:  # else what follows would be taken for options, and shown
        raise ValueError(f"url: '@' behind '/', '?' or '#'; {_ESCAPES}")
    login, _, hosts = authority.rpartition("@")
    return login, hosts


def _login(rest: str) -> dict[str, Any]:
    login, _ = _authority(rest)
    if not login:
        return {}
    username, colon, password = login.partition(":")
    found = {"username": unquote(username)}
    return found | {"password": unquote(password)} if colon else found


def _bootstrap(rest: str) -> tuple[str, ...]:
    _, hosts = _authority(rest)
    if not hosts:
        raise ValueError(f"url: no host; {_FORM}")
    named = (host_and_port(host, PORT, f"{_FORM}; {_ESCAPES}") for host in hosts.split(","))
    return tuple(f"{host}:{port}" for host, port in named)


def _query(rest: str) -> dict[str, Any]:
    path, _, query = rest.partition("?")
    if "#" in rest:
        raise ValueError(f"url: '#' has no meaning in it; {_ESCAPES}")
    if "/" in path and path.partition("/")[2]:
        raise ValueError(f"url: nothing belongs between the hosts and '?'; {_FORM}; {_ESCAPES}")
    return _OPTIONS.query(query)


def client_arguments(settings: Settings) -> dict[str, Any]:
    """What every client of aiokafka is made with (consumer, producer, admin and bare client alike)."""
    arguments: dict[str, Any] = {
        "bootstrap_servers": list(settings.bootstrap),
        "client_id": settings.client_id,
        "security_protocol": ("SASL_" if settings.sasl else "") + ("SSL" if settings.tls else "PLAINTEXT"),
        "request_timeout_ms": round(settings.request_timeout * 1000),
        "metadata_max_age_ms": round(settings.metadata_age * 1000),
        "retry_backoff_ms": 100,
    }
    if settings.tls:
        arguments["ssl_context"] = tls_context(settings.ca, settings.cert, settings.key)
    if settings.sasl:
        arguments["sasl_mechanism"] = settings.sasl
        arguments["sasl_plain_username"] = settings.username
        arguments["sasl_plain_password"] = settings.password
    return arguments
