"""RabbitMQ servers for tests: a node of Debian's package, on 127.0.0.1, with TLS and the stream plugin.

    python -m tests.services.rabbit run -- COMMAND {url}    # COMMAND, with a node for as long as it runs

`TEST_RABBITMQ_URL` (``amqp://user:password@host:port/vhost``) names a server, a newer one say, that is used in place
of the shared node. With `TEST_RABBITMQ_MANAGEMENT_URL` (``http://user:password@host:port``, an administrator) each test
has a vhost there; without it all use the one of the URL.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamfw_postgres._embedded_steps import run

from ._homes import AnyService, fail, run_directory, running
from ._rabbit_cluster import OwnCluster, RabbitCluster
from ._rabbit_control import RabbitServerError
from ._rabbit_service import Rabbit, RabbitService, closing, external
from ._rabbit_vhosts import ByControl, ByManagement, Manager, new_password

__all__ = [
    "OwnCluster",
    "OwnRabbit",
    "Rabbit",
    "RabbitServerError",
    "Vhosts",
    "cluster",
    "own",
    "run_directory",
    "shared",
]


class OwnRabbit:
    """A node of one test's own, which it may stop, start, kill and freeze.

    All of these block; call them by `asyncio.to_thread` where the event loop has to go on meanwhile. Ports and data
    stay the same. `facts` is its vhost "/", as administrator.
    """

    def __init__(self, service: RabbitService) -> None:
        self._node = service.node
        self.facts = service.facts()

    def stop(self) -> None:
        """Shut it down (1 s): its clients are told, new ones are refused."""
        run(self._node.stopping())

    def start(self) -> None:
        """Start it and wait until clients can come (5 s)."""
        run(self._node.starting())

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """End it as a power cut would, but for what the kernel had written (SIGKILL)."""
        run(self._node.killing())

    def freeze(self) -> None:
        """Stop the server's process (SIGSTOP): connections stay open, nothing answers."""
        run(self._node.freezing())

    def thaw(self) -> None:
        """Let it go on."""
        self._node.signal(signal.SIGCONT)

    def pids(self) -> list[int]:
        """The processes that run for the node."""
        return [process.pid for process in self._node.processes()]

    def close_all_connections(self) -> int:
        """Let the server close all its connections (320), and return how many there were."""
        return int(self.facts.evaluate(closing("rabbit_networking:connections()")))

    def alarm(self, on: bool) -> None:
        """Raise the memory alarm, which blocks who publishes, or end it; returns when it is raised or ended."""
        limit, wanted = ("0.0001", "[_ | _]") if on else ("0.4", "[]")
        self.facts.evaluate(
            f"ok = vm_memory_monitor:set_vm_memory_high_watermark({limit}),"
            f"Wait = fun Wait(0) -> error(still); Wait(Left) -> case rabbit_alarm:get_alarms() of {wanted} -> ok;"
            " _ -> timer:sleep(10), Wait(Left - 1) end end, Wait(500)"
        )


# ---------------------------------------------------------------------- for a test run


@contextmanager
def _running(service: AnyService) -> Iterator[AnyService]:
    try:
        with running(service):
            yield service
    except RabbitServerError as error:
        fail(str(error))


@contextmanager
def shared(directory: Path) -> Iterator[Rabbit]:
    """Use the one node that all workers of the run share, or the server that the environment names."""
    if there := external():
        yield there
        return
    with _running(RabbitService(directory / "rabbit")) as service:
        yield service.facts()


@contextmanager
def own(
    directory: Path, *, settings: Mapping[str, str] | None = None, plugins: Sequence[str] = ()
) -> Iterator[OwnRabbit]:
    """Start a node for one test; ended and removed with its data at the end.

    `settings` are for rabbitmq.conf and `plugins` are enabled, beside those that all nodes have.
    """
    service = RabbitService(directory / f"rabbit-{secrets.token_hex(4)}", settings=settings, plugins=plugins)
    with _running(service):
        yield OwnRabbit(service)


@contextmanager
def cluster(directory: Path) -> Iterator[OwnCluster]:
    """Start three nodes for one test module, in one cluster (15 s); ended and removed with their data at the end."""
    service = RabbitCluster(directory / f"cluster-rabbit-{secrets.token_hex(4)}")
    with _running(service):
        yield OwnCluster(service)


class Vhosts:
    """Makes and deletes vhosts of one server, where it can: see `Rabbit.home` and the module's docstring."""

    def __init__(self, server: Rabbit, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._manager: Manager | None = None
        if server.home is not None:
            self._manager = ByControl(server.home)
        elif url := os.environ.get("TEST_RABBITMQ_MANAGEMENT_URL"):
            self._manager = ByManagement(url)

    def create(self) -> Rabbit:
        """Make a new vhost, and a user of the same name that has all rights to it alone."""
        if self._manager is None:
            return self._server
        name, password = f"{self._prefix}_{secrets.token_hex(6)}", new_password()
        self._manager.create(name, name, password)
        return replace(self._server, vhost=name, user=name, password=password)

    def drop(self, made: Rabbit) -> None:
        """Delete it, with what is connected to it."""
        if self._manager is not None:
            self._manager.delete(made.vhost, made.user)


if __name__ == "__main__":
    from ._rabbit_command import app

    sys.exit(app())
