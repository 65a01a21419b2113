"""What the commands say: results on stdout, errors on stderr, each as it is (no markup is read from data)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, ParamSpec, TypeAlias, TypeVar, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamfw.build import BuiltSubscriber
from streamfw.errors import StreamError
from streamfw.texts import one_line, printable

__all__ = [
    "BrokerUrl",
    "CommandError",
    "age",
    "cell",
    "console",
    "errors_of",
    "handler_of",
    "reporting",
    "say",
    "show_errors",
    "source_of",
    "table",
]

P = ParamSpec("P")
T = TypeVar("T")

BrokerUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="URL", help="The broker (default: STREAMFW_BROKERS__DEFAULT__URL, then streamfw.toml)."
    ),
]

# Whoever reads a pipe or a log of CI wraps lines better than we can.
_WIDTH_OF_A_FILE = 200


class CommandError(StreamError):
    """A command cannot do what it was asked to."""


def console(stderr: bool = False) -> Console:
    """A console on the stream that stdout or stderr is now."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if known else _WIDTH_OF_A_FILE, markup=False, highlight=False, emoji=False)


def say(text: str, style: str = "") -> None:
    """One paragraph on stdout, without what would drive the terminal: it may quote what somebody else wrote."""
    console().print(Text(printable(text), style=style), soft_wrap=True)


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """An empty table; `right` names the columns of numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def cell(text: str) -> Text:
    """A cell of what somebody else wrote: in one line, for one with more would look like another row."""
    return Text(one_line(text))


def age(seconds: float) -> str:
    """Seconds as a person reads them, to two places."""
    if not seconds:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"


def handler_of(one: BuiltSubscriber) -> str:
    """The name of a subscriber's handler."""
    return str(getattr(one.declaration.handler, "__qualname__", one.declaration.handler))


def source_of(one: BuiltSubscriber) -> str:
    """What it subscribes to."""
    source = one.declaration.source
    return source if isinstance(source, str) else repr(source)


def show_errors(errors: Sequence[BaseException], heading: str = "") -> None:
    """Errors on stderr: one alone as it is, several numbered below `heading`."""
    lines = [Text.assemble(("error: ", "bold red"), printable(heading or str(errors[0])))]
    if heading:
        lines += [Text(printable(f"  {number}. {error}")) for number, error in enumerate(errors, 1)]
    for line in lines:
        console(stderr=True).print(line, soft_wrap=True)


def errors_of(group: ExceptionGroup[Exception]) -> list[Exception]:
    """The errors in a group, and in the groups in it."""
    found: list[Exception] = []
    inner: Exception | ExceptionGroup[Exception]
    for inner in group.exceptions:
        if isinstance(inner, ExceptionGroup):
            found += errors_of(cast("ExceptionGroup[Exception]", inner))
        else:
            found.append(inner)
    return found


def reporting(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose `StreamError`s are told without a traceback, and end it with exit code 1."""

    @wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except StreamError as error:
            show_errors([error])
        except ExceptionGroup as group:
            errors = errors_of(group)
            if not all(isinstance(error, StreamError) for error in errors):
                raise
            # What `App.build` raises lists its errors in its message, too.
            show_errors(errors, f"{group.message.partition(':')[0].strip()}:")
        raise typer.Exit(1)

    return told
