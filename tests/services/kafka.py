"""Kafka servers for tests: Apache Kafka in KRaft mode, broker and controller in one process, on 127.0.0.1.

`ONE` is a node (the shared one also listens with SASL and TLS), `THREE` are three nodes with every topic on all of them
(two must have a record before it is acknowledged). Their heaps are small and their timeouts short; topics are made on
request only.

    python -m tests.services.kafka run -- COMMAND {url}    # COMMAND, with a node for as long as it runs
    python -m tests.services.kafka fetch                   # only fetch the server's programs
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamfw_postgres._embedded_steps import run

from . import _kafka_nodes as nodes
from ._homes import fail, run_directory, running
from ._kafka_cluster import ONE, THREE, Cluster, Kafka, Kind, ready_programs
from ._kafka_java import KafkaServerError
from ._kafka_nodes import Login, Node
from .proxy import Proxy

__all__ = ["ONE", "THREE", "Kafka", "Kind", "Login", "OwnKafka", "java_tool", "own", "run_directory", "shared"]


class OwnKafka:
    """A server of one test's own, whose nodes (numbered from 1) it may stop, start, kill and freeze.

    All of these block; call them by `asyncio.to_thread` where the event loop has to go on meanwhile. Without a number
    they are for all nodes. Ports and data stay the same.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.facts = cluster.facts()

    @property
    def home(self) -> Path:
        return self._cluster.home

    def stop(self, node: int | None = None) -> None:
        """Shut down: a node hands over what it leads first; killed after 10 s."""
        run(nodes.ending(self._which(node), patience=10.0))

    def start(self, node: int | None = None) -> None:
        """Start what does not run, and wait until it answers and knows all the nodes that run."""
        run(self._cluster.starting(self._which(node), ready_programs()))

    def restart(self, node: int | None = None) -> None:
        self.stop(node)
        self.start(node)

    def kill(self, node: int | None = None) -> None:
        """End it as a power cut would, but for what the kernel had written (SIGKILL)."""
        run(nodes.ending(self._which(node), patience=0.0))

    def freeze(self, node: int | None = None) -> None:
        """Stop the process (SIGSTOP): connections stay open, nothing answers."""
        for each in self._which(node):
            each.signal(signal.SIGSTOP)

    def thaw(self, node: int | None = None) -> None:
        """Let it go on."""
        for each in self._which(node):
            each.signal(signal.SIGCONT)

    def pids(self) -> dict[int, int]:
        """The process of each node that runs."""
        found = {node.number: node.process() for node in self._cluster.nodes}
        return {number: process.pid for number, process in found.items() if process is not None}

    def proxies(self) -> list[Proxy]:
        """Return a new proxy for each node, to be entered by the test; `Kafka.proxied` are their addresses."""
        found = []
        for ports in self._cluster.ports.values():
            proxy = Proxy.to_tcp("127.0.0.1", ports[nodes.PROXIED])
            proxy.port = ports[nodes.ADVERTISED]
            found.append(proxy)
        return found

    def _which(self, node: int | None) -> list[Node]:
        return [each for each in self._cluster.nodes if node in (None, each.number)]


# ---------------------------------------------------------------------- for a test run


@contextmanager
def _running(cluster: Cluster) -> Iterator[Cluster]:
    try:
        with running(cluster):
            yield cluster
    except KafkaServerError as error:
        fail(str(error))


@contextmanager
def shared(kind: Kind, directory: Path) -> Iterator[Kafka]:
    """Use the one server of this kind that all workers of the run share."""
    with _running(Cluster(kind, directory / kind.name)) as cluster:
        yield cluster.facts()


@contextmanager
def own(kind: Kind, directory: Path, *, settings: Mapping[str, str] | None = None) -> Iterator[OwnKafka]:
    """Start a server for one test, without login and TLS; stopped (thawed first) and removed at the end."""
    home = directory / f"{kind.name}-{secrets.token_hex(4)}"
    plain = replace(kind, secure=False)
    with _running(Cluster(plain, home, proxied=True, settings=settings)) as cluster:
        yield OwnKafka(cluster)


def java_tool(main_class: str, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run one of Kafka's own command line tools, for example ``org.apache.kafka.tools.ConsoleProducer``."""
    try:
        command = ready_programs().command(main_class, *arguments)
    except KafkaServerError as error:
        fail(str(error))
    return subprocess.run(command, input=input, capture_output=True, timeout=50, check=False)


if __name__ == "__main__":
    from ._kafka_command import app

    sys.exit(app())
