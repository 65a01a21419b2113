"""``streamfw run``: an app in this process, or in several under a supervisor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from streamfw.app import App
from streamfw.memory import MemoryBroker
from streamfw.runtime.main import run as run_app

from .app_loading import load_app
from .lifeline import Lifeline
from .output import BrokerUrl, reporting
from .supervise import supervise

__all__ = ["AppName", "run"]

AppName = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as in shop:app.")]

logger = logging.getLogger("streamfw")


@reporting
def run(
    app: AppName,
    workers: Annotated[int, typer.Option(min=1, help="How many processes.")] = 1,
    broker: BrokerUrl = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for a server that is away at start."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The configuration file.")] = None,
    lifeline: Annotated[int | None, typer.Option(hidden=True, help="A worker's end, from its supervisor.")] = None,
) -> None:
    """Run an app until SIGINT or SIGTERM, then drain. A second signal ends at once (exit code 130).

    With --workers, a crashed process is started again; one that cannot start ends them all with exit code 1.
    """
    if workers > 1 and lifeline is None:
        raise typer.Exit(supervise(_arguments(app, broker, wait, config), workers))
    line = None if lifeline is None else Lifeline(lifeline)
    loaded = load_app(app, config)
    if broker is not None:
        loaded.use(broker)
    if line is not None:
        _as_worker(loaded, line)
    raise typer.Exit(run_app(loaded, wait, line))


def _arguments(app: str, broker: str | None, wait: float | None, config: Path | None) -> list[str]:
    """The command line of one worker."""
    options = (("--broker", broker), ("--wait", wait), ("--config", config))
    return ["run", app, *(f"{option}={value}" for option, value in options if value is not None)]


def _as_worker(app: App, line: Lifeline) -> None:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [%(process)d] %(name)s %(message)s")
    for broker in app.build().brokers.values():
        if isinstance(broker, MemoryBroker):
            logger.warning("%s: each worker process has messages of its own there", broker.describe())
    line.drain_timeout = app.settings.drain_timeout
