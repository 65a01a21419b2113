"""The demo's command line: ``python -m examples.webhooks [--broker URL]``. Exit code 0 only if the sets agree."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from streamfw import StreamError

from .demo import DemoFailed, demo, progress_bar
from .report import Report, show


def main(
    broker: Annotated[
        str, typer.Option(help="Where the messages go: memory://, or the URL of a server.")
    ] = "memory://",
    rounds: Annotated[int, typer.Option(min=1, help="How often the 329 webhooks are published.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Publish GitHub's example webhooks to the service, kill a worker half way, and count what came of them."""
    console = Console(quiet=as_json)
    try:
        with progress_bar(console, disable=as_json) as progress:
            report = asyncio.run(until_signal(demo(broker, rounds, progress.console, progress)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    except ExceptionGroup as errors:  # App.build says all that is wrong at once, and so do publishers
        if errors.split(StreamError)[1] is not None:
            raise
        print(*errors.exceptions, sep="\n", file=sys.stderr)
        raise typer.Exit(1) from None
    except (DemoFailed, StreamError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, console)
    raise typer.Exit(1 if report.differences else 0)


async def until_signal(work: Coroutine[object, object, Report]) -> Report:
    """Let SIGTERM do what SIGINT does: cancel, and so clean up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


if __name__ == "__main__":
    program = typer.Typer(pretty_exceptions_enable=False)
    program.command()(main)
    program()
