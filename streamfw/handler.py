"""From a handler's signature to one compiled call.

`compile_call` reads a signature once and writes the source of a small function that decodes the body, finds the other
arguments and returns the handler's own coroutine. It is a plain function, so it adds no coroutine frame; generated,
because a loop over getters costs five times as much a message.
"""

from __future__ import annotations

import inspect
import linecache
import types
import typing
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec

from .codec import Codec, JsonCodec
from .errors import ArgumentError, BuildError, DecodeError
from .injection import Injected, Injector
from .message import Headers, Message, Tombstone
from .outcome import Outcome
from .placement import Place, parameter_mistake, plain
from .publisher import Publisher
from .sync_publisher import SyncPublisher

__all__ = [
    "Attempt",
    "Call",
    "Compiled",
    "DeliveryField",
    "Header",
    "MessageBatch",
    "State",
    "UnitConnection",
    "compile_call",
    "undecoded",
]

Call = Callable[[Any], Awaitable[Any]]


class Header:
    """Marks a parameter that takes a header: ``tenant: Annotated[str, Header("tenant")]``.

    Text, ``bytes`` (as they came) or anything that msgspec converts text to (``int``, ``float``, ``bool``, an enum).
    A parameter with a default takes it where the header is missing; without one the message goes to the dead letter.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class State:
    """Marks a parameter that takes what the app's lifespan yielded, by type: ``pool: Annotated[Pool, State]``."""


class DeliveryField:
    """Marks a parameter that takes a field of the delivery. Brokers declare their own keys with it:
    ``Offset = Annotated[int, DeliveryField("offset")]``. A parameter with a default takes it on brokers that have no
    such field: ``offset: Offset = -1``."""

    __slots__ = ("field",)

    def __init__(self, field: str) -> None:
        self.field = field


class UnitConnection:
    """Marks a parameter that takes the connection of the delivery's own transaction (``transactional=True``).

    A broker gives it a name and a type (``Transaction`` of `streamfw_postgres`). ``Transaction | None`` is None where
    the subscriber is not transactional, for handlers that run on brokers with and without transactions.
    """


Attempt: Final = DeliveryField("attempt")
"""Marks a parameter that takes which delivery this is: ``attempt: Annotated[int, Attempt]``; 1 is the first."""


class MessageBatch:
    """What middleware of a batch subscriber sees: the messages of one batch, and their decoded values."""

    __slots__ = ("messages", "unit", "values")

    @property
    def name(self) -> str:
        """What its messages were published to."""
        return self.messages[0].name

    def __init__(self, messages: list[Message], values: list[Any]) -> None:
        self.messages = messages
        self.values = values
        self.unit: Any = None


class Compiled(msgspec.Struct, kw_only=True):
    """A compiled handler. `call` takes a delivery (or a `MessageBatch`) and returns the handler's coroutine.

    `decode` is the element decoder of a batch. `states` are the types to bind before the first call, by `bind_state`.
    `publishers` are the names that parameters publish to, with the parameter's name; `blocking` those of them that
    take a `SyncPublisher`. `arguments` are the parameters, in order, without those that are injected. `raw_body` is the
    parameter that gets the body as it is, because it is decoded where the handler runs.
    """

    call: Call
    names: dict[str, Any]
    body: Any
    decode: Callable[[Any], Any] | None = None
    states: dict[str, Any] = {}
    publishers: dict[str, tuple[str, Any]] = {}
    blocking: set[str] = set()
    uses_unit: bool = False
    arguments: dict[str, str] = {}
    raw_body: str | None = None
    returns_value: bool = True

    def call_instead(self, runner: Callable[..., Awaitable[Any]]) -> None:
        """Call `runner` with the arguments, in the place of a handler that does not run in the event loop."""
        self.names["_handler"] = runner

    def bind(self, parameter: str, value: object) -> None:
        """Give the value of a parameter that is the same for every message."""
        self.names[f"_bound_{parameter}"] = value


class _Builder:
    """Collects the lines of one call while it goes over the parameters."""

    def __init__(
        self, handler: Callable[..., Any], where: str, batch: bool, place: Place, injectors: Sequence[Injector]
    ) -> None:
        self.handler, self.where, self.batch = handler, where, batch
        self.place: Place = place
        self.injected = Injected(injectors)
        self.names: dict[str, Any] = {"_handler": handler, "_argument": _argument_error}
        self.names |= {"_undecoded": undecoded, "_plain": plain}
        self.early: list[str] = []
        self.arguments: dict[str, str] = {}  # expressions, in the order of the parameters
        self.keyword_only: set[str] = set()
        self.body: tuple[str, Any] | None = None
        self.errors: list[BuildError] = []
        self.states: dict[str, Any] = {}
        self.publishers: dict[str, tuple[str, Any]] = {}
        self.blocking: set[str] = set()
        self.uses_unit = self.raw_body = self.takes_message = False

    def error(self, message: str) -> None:
        self.errors.append(BuildError(self.where, message))

    def parameter(self, parameter: inspect.Parameter, hint: Any) -> None:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return self.error(f"parameter {name!r}: *args, **kwargs and positional-only parameters cannot be filled")
        if parameter.kind is parameter.KEYWORD_ONLY:
            self.keyword_only.add(name)
        if self.by_injector(parameter, hint):
            return None
        kind, markers = _unmarked(hint)
        for marker in markers:
            if self.marked(parameter, kind, marker):
                return None
        if kind is Message:
            self.takes_message = True
            return self.per_message(name, "_plain(message)" if self.place == "process" else "message")
        if _is_publisher(kind):
            return self.error(
                f"parameter {name!r} is an unbound publisher: say where it publishes, "
                f'{name}: Annotated[Publisher[...], "a name"]'
            )
        if hint is inspect.Parameter.empty:
            return self.error(f"parameter {name!r} has no annotation, so nobody knows how to fill it")
        if (mark := _bare_marker(hint)) is not None:
            return self.error(f"parameter {name!r}: {mark} goes beside its type, {name}: Annotated[<its type>, {mark}]")
        if self.body is not None:
            return self.error(
                f"parameters {self.body[0]!r} and {name!r} both look like the body: exactly one parameter is without a "
                "marker; mark the other (Header, State, Attempt, ..)"
            )
        self.body = (name, hint)
        self.arguments[name] = "_body"
        return None

    def by_injector(self, parameter: inspect.Parameter, hint: Any) -> bool:
        try:
            taken = self.injected.take(parameter, hint)
        except LookupError as error:
            self.error(f"parameter {parameter.name!r}: {error}")
            return True
        if taken:
            self.refuse(parameter.name, object, "injected")
        return taken

    def marked(self, parameter: inspect.Parameter, kind: Any, marker: Any) -> bool:
        name = parameter.name
        if isinstance(marker, type) and issubclass(marker, Header | DeliveryField):
            self.error(f'parameter {name!r}: {marker.__name__} needs a name, {marker.__name__}("..")')
        elif isinstance(marker, Header):
            self.header(parameter, kind, marker.name)
        elif marker is State or isinstance(marker, State):
            self.refuse(name, kind, "state")
            self.states[name] = kind
            self.arguments[name] = f"_bound_{name}"
        elif isinstance(marker, DeliveryField):
            self.field(parameter, marker.field)
        elif marker is UnitConnection or isinstance(marker, UnitConnection):
            self.refuse(name, kind, "transaction")
            optional = type(None) in get_args(kind)
            self.uses_unit = self.uses_unit or not optional
            without = " if message.unit is not None else None" if optional else ""
            self.arguments[name] = f"(message.unit.connection{without})"
        elif _is_publisher(kind) and isinstance(marker, str):
            self.refuse(name, get_origin(kind) or kind, "publisher")
            if issubclass(get_origin(kind) or kind, SyncPublisher):
                self.blocking.add(name)
            self.publishers[name] = (marker, next(iter(get_args(kind)), None))
            self.arguments[name] = f"_bound_{name}"
        else:
            return False
        return True

    def field(self, parameter: inspect.Parameter, field: str) -> None:
        name = parameter.name
        if parameter.default is parameter.empty:
            return self.per_message(name, f"message.{field}")
        self.names[f"_default_{name}"] = parameter.default
        return self.per_message(name, f"getattr(message, {field!r}, _default_{name})")

    def refuse(self, name: str, kind: Any, what: str) -> None:
        if (mistake := parameter_mistake(self.place, name, kind, what)) is not None:
            self.error(mistake)

    def per_message(self, name: str, expression: str) -> None:
        if self.batch:
            return self.error(f"parameter {name!r} belongs to one message, and this handler takes a batch of them")
        self.arguments[name] = expression
        return None

    def header(self, parameter: inspect.Parameter, kind: Any, header: str) -> None:
        name = parameter.name
        if self.batch:
            return self.error(f"parameter {name!r} is a header of one message, and this handler takes a batch of them")
        try:
            JsonCodec().decoder(kind)
        except TypeError:
            return self.error(f"parameter {name!r}: the text of a header cannot become {kind!r}")
        optional = parameter.default is not parameter.empty
        self.names[f"_header_{name}"] = _header_getter(header, kind, optional, parameter.default)
        self.early.append(f"        _value_{name} = _header_{name}(_headers)")
        self.arguments[name] = f"_value_{name}"
        return None


def compile_call(
    handler: Callable[..., Any],
    codec: Codec,
    where: str,
    *,
    batch: bool = False,
    place: Place = "loop",
    decoder: Callable[[Any], Callable[[Any], Any] | None] = lambda annotation: None,
    injectors: Sequence[Injector] = (),
) -> Compiled:
    """Compile `handler` into a call.

    `decoder` is the source's own way to the body's annotation (None: the codec's). `place` is where the handler runs;
    elsewhere than in the loop, `Compiled.call_instead` is still to be told how. `injectors` fill parameters of kinds
    of their own. Raises an `ExceptionGroup` of
    `BuildError`, one for each mistake in the signature.
    """
    build = _Builder(handler, where, batch, place, injectors)
    for parameter, hint in _parameters(handler, build):
        build.parameter(parameter, hint)
    if build.body is None and not build.errors and not build.takes_message:
        build.error("no parameter takes the body: the first one without a marker does")
    decode, body = _decoder(build, codec, decoder)
    if build.errors:
        raise ExceptionGroup(f"{where} cannot be called", build.errors)
    call = _generate(build, decode)
    return Compiled(
        call=call,
        names=build.names,
        body=body,
        decode=decode if batch else None,
        states=build.states,
        publishers=build.publishers,
        uses_unit=build.uses_unit,
        blocking=build.blocking,
        arguments=build.arguments,
        raw_body=build.body[0] if build.raw_body and build.body is not None else None,
        returns_value=_returns_value(handler),
    )


def _bare_marker(hint: Any) -> str | None:
    """How a marker that stands where the type should is written; None when `hint` is none."""
    if hint is Attempt:
        return "Attempt"
    for marker in (State, Header, DeliveryField, UnitConnection):
        if hint is marker or isinstance(hint, marker):
            return marker.__name__
    return None


def _unmarked(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Type and markers of an annotation; ``Annotated[T, m] | None`` is as good as ``Annotated[T | None, m]``."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1:]
    for part in get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else ():
        if get_origin(part) is Annotated:
            return get_args(part)[0] | None, get_args(part)[1:]
    return hint, ()


def _returns_value(handler: Callable[..., Any]) -> bool:
    """Whether it may return something besides an outcome, as far as its annotation tells."""
    try:
        returns = typing.get_type_hints(handler).get("return", Any)
    except Exception:  # told with the parameters
        return True
    parts = get_args(returns) if get_origin(returns) in (typing.Union, types.UnionType) else (returns,)
    return not all(part is type(None) or (isinstance(part, type) and issubclass(part, Outcome)) for part in parts)


def _parameters(handler: Callable[..., Any], build: _Builder) -> Sequence[tuple[inspect.Parameter, Any]]:
    try:
        hints = typing.get_type_hints(handler, include_extras=True)
    except Exception as error:  # whatever evaluating somebody's annotations raises
        build.error(f"its annotations cannot be evaluated: {error!r}; are the names importable in its module?")
        return ()
    return [(p, hints.get(p.name, p.annotation)) for p in inspect.signature(handler).parameters.values()]


def _decoder(build: _Builder, codec: Codec, own: Callable[[Any], Any]) -> tuple[Callable[[Any], Any] | None, Any]:
    if build.body is None:
        return None, None
    name, hint = build.body
    if build.batch:
        if get_origin(hint) not in (list, Sequence):
            build.error(f"parameter {name!r} takes a batch, so it is a list[...], not {hint!r}")
            return None, None
        hint = get_args(hint)[0]
        if hint is Message:
            return None, Message
    try:
        given = own(hint)
        build.raw_body = given is None and not build.batch and build.place == "process"
        # bytes are bodies as they are, also where there may be none of them.
        plain = bytes if _may_be_none(hint) and set(get_args(hint)) == {bytes, type(None)} else hint
        decode = given or codec.decoder(plain)
        return (_or_none(decode) if _may_be_none(hint) else decode), hint
    except Exception as error:  # msgspec's TypeError, or what a codec of somebody's own raises
        build.error(f"parameter {name!r}: a body cannot be decoded as {hint!r}: {error}")
        return None, None


def _may_be_none(hint: Any) -> bool:
    return type(None) in get_args(hint) and get_origin(hint) in (typing.Union, types.UnionType)


def _or_none(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda body: None if isinstance(body, Tombstone) else decode(body)


def _generate(build: _Builder, decode: Callable[[Any], Any] | None) -> Call:
    lines = ["def call(message):"]
    if build.batch:
        values = "message.values"
        if decode is None and build.place == "process":  # of messages as they are
            values = f"[_plain(one) for one in {values}]"
        build.arguments = {n: values if e == "_body" else e for n, e in build.arguments.items()}
    elif build.raw_body:
        lines.append("    _body = message.body")
    elif decode is not None:
        build.names["_decode"] = decode
        lines += ["    try:", "        _body = _decode(message.body)"]
        lines += ["    except Exception as error:", "        raise _undecoded(error, message.body) from error"]
    if build.early:  # a try costs nothing while nothing raises (3.11 and later)
        build.names["_Headers"] = Headers
        lines += ["    try:", "        _headers = message.raw_headers"]
        lines += ["        if type(_headers) is not _Headers:", "            _headers = message.headers"]
        lines += build.early
        lines += ["    except Exception as error:", "        raise _argument(error) from error"]
    if build.injected:
        build.names["_inject"] = build.injected.compose()
        filled = [f"{n}={e}" for n, e in build.arguments.items()]
        lines.append(f"    return _inject(message, _handler, dict({', '.join(filled)}))")
    else:
        # By position where it may be: every parameter is filled, and keywords cost a fifth more.
        filled = [f"{n}={e}" if n in build.keyword_only else e for n, e in build.arguments.items()]
        lines.append(f"    return _handler({', '.join(filled)})")
    source = "\n".join(lines) + "\n"
    filename = f"<call of {build.where}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # readable tracebacks
    exec(compile(source, filename, "exec"), build.names)
    call: Call = build.names["call"]
    return call


def undecoded(error: Exception, body: object) -> DecodeError:
    """Why a body is not what the handler takes."""
    if isinstance(body, Tombstone):
        return DecodeError("there is no body: it is a tombstone, and the handler's annotation has no None")
    return DecodeError(f"the body cannot be decoded: {error}"[:1024])


def _argument_error(error: Exception) -> ArgumentError:
    return error if isinstance(error, ArgumentError) else ArgumentError(str(error)[:1024])


def _header_getter(name: str, kind: Any, optional: bool, default: Any) -> Callable[[Headers], Any]:
    convert: Callable[[Headers], Any] | None = None
    kinds = {one for one in get_args(kind) or (kind,) if one is not type(None)}
    if kinds == {bytes}:
        convert = lambda headers: headers.raw(name)  # noqa: E731
    elif kinds != {str}:
        convert = lambda headers: msgspec.convert(headers[name], kind, strict=False)  # noqa: E731

    def get(headers: Headers) -> Any:
        found = None
        for key, value in headers.pairs:  # written out: `Headers.raw` and `[]` cost three times as much
            if key == name:
                found = value  # the last one counts, and to go backwards would make an iterator
        if found is None:
            if optional:
                return default
            raise ArgumentError(f"header {name!r} is missing")
        try:
            return found.decode() if convert is None else convert(headers)
        except UnicodeDecodeError:
            return headers[name]  # says it well
        except msgspec.ValidationError as error:
            raise ArgumentError(f"header {name!r}: {error}") from None

    return get


def _is_publisher(kind: Any) -> bool:
    kind = get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, Publisher | SyncPublisher)
