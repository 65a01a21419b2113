"""``streamfw run``: an app in this process, or in processes under a parent."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from streamfw.app import App
from streamfw.config import CONFIG, read
from streamfw.memory import MemoryBroker
from streamfw.observe.logs import configure_logging
from streamfw.runtime.main import run as run_app

from .app_loading import load_app
from .completion import complete_app
from .lifeline import Lifeline
from .output import BrokerUrl, CommandError, reporting
from .supervise import reload as reload_processes
from .supervise import supervise as supervise_processes

__all__ = ["AppName", "run"]

AppName = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="The app, as in shop:app.", autocompletion=complete_app)
]

logger = logging.getLogger("streamfw")


@reporting
def run(
    app: AppName,
    workers: Annotated[int, typer.Option(min=1, help="How many processes.")] = 1,
    supervise: Annotated[bool, typer.Option("--supervise", help="Have a parent also for a single worker.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start anew after each change of the source (for development).")
    ] = False,
    reload_dir: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, file_okay=False, metavar="DIRECTORY", help="What --reload watches (default: where it runs)."
        ),
    ] = None,
    broker: BrokerUrl = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for a server that is away at start."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The configuration file.")] = None,
    lifeline: Annotated[int | None, typer.Option(hidden=True, help="A worker's end, from its supervisor.")] = None,
) -> None:
    """Run an app until SIGINT or SIGTERM, then drain. A second signal ends at once (exit code 130).

    With --workers or --supervise, a parent starts crashed processes again, and replaces them one by one on SIGHUP. An
    app that cannot start ends it with exit code 1. Without a parent, SIGHUP drains.

    With --reload, running handlers finish before the new code starts; what cannot start waits for the next change.
    """
    if lifeline is not None:
        line = Lifeline(lifeline)
        loaded = _loaded(app, config, broker)
        _as_worker(loaded, line)
        raise typer.Exit(run_app(loaded, wait, line))
    if reload_dir and not reload:
        raise CommandError("--reload-dir says what --reload watches; give that, too")
    if reload or supervise or workers > 1:
        _log_as_parent(config)
    if reload:
        named = config or Path(os.environ.get(CONFIG) or "streamfw.toml")
        arguments = _arguments(app, broker, wait, config)
        raise typer.Exit(reload_processes(arguments, workers, reload_dir or [Path()], named))
    if supervise or workers > 1:
        raise typer.Exit(supervise_processes(_arguments(app, broker, wait, config), workers))
    raise typer.Exit(run_app(_loaded(app, config, broker), wait))


def _loaded(target: str, config: Path | None, broker: str | None) -> App:
    app = load_app(target, config)
    if broker is not None:
        app.use(broker)
    return app


def _arguments(app: str, broker: str | None, wait: float | None, config: Path | None) -> list[str]:
    """The command line of one worker."""
    options = (("--broker", broker), ("--wait", wait), ("--config", config))
    return ["run", app, *(f"{option}={value}" for option, value in options if value is not None)]


def _log_as_parent(config: Path | None) -> None:
    settings, _ = read(config)  # what is wrong there the workers tell
    configure_logging(settings.log == "json", settings.log_level.upper(), process=True)


def _as_worker(app: App, line: Lifeline) -> None:
    app.configure_logging(process=True)
    for broker in app.build().brokers.values():
        if isinstance(broker, MemoryBroker):
            logger.warning(
                "%s: each worker process has messages of its own there, which end with it", broker.describe()
            )
    line.drain_timeout = app.settings.drain_timeout
