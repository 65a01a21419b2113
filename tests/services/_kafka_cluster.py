"""A Kafka cluster for tests in a home directory: how to reach it, and its life."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import socket
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from streamfw_postgres._embedded_steps import Steps, run

from . import _kafka_admin as admin
from . import _kafka_nodes as nodes
from ._certificates import make_certificates
from ._homes import Service, free_port, register, remembered, run_directory, running
from ._kafka_java import Java, KafkaServerError, locked, programs
from ._kafka_nodes import Login, Node

__all__ = ["ONE", "THREE", "Cluster", "Kafka", "Kind", "ready_programs"]

T = TypeVar("T")


# ---------------------------------------------------------------------- how to reach one


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka:
    """How to reach a test server: ``host:port,...`` of each of its listeners, "" for one that it does not have.

    `bootstrap` asks for nothing, `sasl` for a login, `tls` is encrypted, `sasl_tls` both. The certificate is for
    127.0.0.1 and localhost, by the CA in `ca`. `logins` has a user for each mechanism: PLAIN, SCRAM-SHA-256 and
    SCRAM-SHA-512. `proxied` tells clients to come back by way of the proxies of `OwnKafka.proxies`.
    """

    bootstrap: str
    nodes: int
    proxied: str = ""
    sasl: str = ""
    tls: str = ""
    sasl_tls: str = ""
    ca: Path | None = None
    logins: Mapping[str, Login] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The URL of a broker, without login and TLS."""
        return f"kafka://{self.bootstrap}"

    @property
    def proxied_url(self) -> str:
        """The URL of a broker that is reached through the proxies of `OwnKafka.proxies`."""
        return f"kafka://{self.proxied}"

    async def create_topic(self, name: str, partitions: int = 4, **settings: str | int) -> str:
        """Make a topic, with a copy on each node, and wait until it can be used; return its name.

        Settings are written with ``_`` for the dots: ``cleanup_policy="compact"``. Raises what the server answers.
        """
        named = {key.replace("_", "."): str(value) for key, value in settings.items()}
        await admin.create_topic(self.bootstrap, name, partitions, min(self.nodes, 3), named)
        return name

    async def leader(self, topic: str, partition: int = 0) -> int:
        """The number of the node (from 1 on) that leads a partition."""
        return await admin.leader(self.bootstrap, topic, partition)

    async def coordinator(self, group: str) -> int:
        """The number of the node (from 1 on) that coordinates a consumer group."""
        return await admin.coordinator(self.bootstrap, group)


@dataclass(frozen=True, slots=True)
class Kind:
    """Which server: how many nodes, and whether it also listens with login and TLS."""

    name: str
    nodes: int = 1
    secure: bool = False


ONE = Kind("kafka", secure=True)
THREE = Kind("kafka3", nodes=3)

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_START = 60.0


# ---------------------------------------------------------------------- one cluster


class Cluster(Service):
    """The nodes in `home`. `proxied` adds the listener for proxies."""

    def __init__(
        self, kind: Kind, home: Path, *, proxied: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(home)
        self.kind = kind
        self.nodes = [Node(number, home / f"node{number}") for number in range(1, kind.nodes + 1)]
        self._proxied = proxied
        self._settings = settings or {}

    @property
    def ports(self) -> dict[int, dict[str, int]]:
        """The ports of each node, the same for as long as the home exists."""
        text = remembered(self.home / "ports", lambda: json.dumps(self._choose_ports()))
        return msgspec.json.decode(text, type=dict[int, dict[str, int]])

    def _choose_ports(self) -> dict[int, dict[str, int]]:
        names = [nodes.PLAINTEXT, nodes.CONTROLLER]
        names += [nodes.PROXIED, nodes.ADVERTISED] if self._proxied else []
        names += [nodes.SASL, nodes.TLS, nodes.SASL_TLS] if self.kind.secure else []
        found: set[int] = set()
        while len(found) < len(names) * len(self.nodes):
            found.add(free_port())
        return {node.number: {name: found.pop() for name in names} for node in self.nodes}

    @property
    def id(self) -> str:
        return remembered(self.home / "id", _choose_id)

    @property
    def logins(self) -> list[Login]:
        text = remembered(self.home / "logins", lambda: json.dumps(_choose_logins() if self.kind.secure else []))
        return msgspec.json.decode(text, type=list[Login])

    def _start(self) -> Steps:
        java = ready_programs()
        if self.home.joinpath("ready").exists():
            yield from self.starting(self.nodes, java)
        else:
            yield from self.first_start(java)
            (self.home / "ready").touch()

    def first_start(self, java: Java, options: Sequence[str] = ()) -> Steps:
        """Make the nodes' directories and start them; `options` are for their Java."""
        yield from self._end()  # what another user left that was killed here
        for last in (False, False, True):
            self._make(java)
            try:
                yield from self.starting(self.nodes, java, options)
                return
            except KafkaServerError:
                # Between our look for a free port and the server's use of it somebody else may take it.
                if last or not any("Address already in use" in node.said() for node in self.nodes):
                    raise
                yield from nodes.ending(self.nodes, patience=0.0)

    def _make(self, java: Java) -> None:
        """Make the directories of all nodes, new."""
        (self.home / "ports").unlink(missing_ok=True)
        tls = self._tls() if self.kind.secure else None
        for node in self.nodes:
            shutil.rmtree(node.home, ignore_errors=True)
            settings = nodes.properties(node.number, node.home, self.ports, self.logins, tls)
            node.configure({**settings, **self._settings})
        nodes.format_nodes(self.nodes, java, self.id, self.logins)

    def _tls(self) -> Path:
        where = self.home / "tls"
        if not where.exists():
            where.mkdir(mode=0o700)
            make_certificates(where)
            (where / "server.pem").write_text((where / "server.key").read_text() + (where / "server.crt").read_text())
            shutil.copyfile(where / "ca.crt", self.home / "ca.crt")
        return where

    def starting(self, which: Sequence[Node], java: Java, options: Sequence[str] = ()) -> Steps:
        """Start those of the nodes that do not run, and wait until each knows all that run."""
        for node in which:
            if node.process() is None:
                node.launch(java, megabytes=320 if self.kind.nodes == 1 else 256, options=options)
        end = time.monotonic() + _START
        for node in which:
            while not self._answers(node):
                if node.process() is None:
                    raise KafkaServerError(f"Kafka node {node.number} ended while it started:\n{node.said()}")
                if time.monotonic() > end:
                    raise KafkaServerError(f"Kafka node {node.number} was not up in {_START:g} s:\n{node.said()}")
                yield 0.02

    def _answers(self, node: Node) -> bool:
        port = self.ports[node.number][nodes.PLAINTEXT]
        with socket.socket() as probe:  # first, as the client logs every refusal
            if probe.connect_ex(("127.0.0.1", port)):
                return False
        # A listener that cannot have its port ends the node, but the first one may have answered before.
        wanted = {number for name, number in self.ports[node.number].items() if name != nodes.ADVERTISED}
        if not wanted <= node.listening():
            return False
        alive = {node.number, *(each.number for each in self.nodes if each.responds())}
        return _in_thread(admin.known_to(f"127.0.0.1:{port}", node.number, self.id)) >= alive

    def _end(self) -> Steps:
        left = [Node(0, pid.parent) for pid in self.home.glob("node*/pid")]
        yield from nodes.ending(left, patience=0.0)  # nothing of it is kept

    def facts(self) -> Kafka:
        def listener(name: str) -> str:
            return ",".join(f"127.0.0.1:{each[name]}" for each in ports.values() if name in each)

        ports = self.ports
        return Kafka(
            bootstrap=listener(nodes.PLAINTEXT),
            nodes=self.kind.nodes,
            proxied=listener(nodes.ADVERTISED),
            sasl=listener(nodes.SASL),
            tls=listener(nodes.TLS),
            sasl_tls=listener(nodes.SASL_TLS),
            ca=self.home / "ca.crt" if self.kind.secure else None,
            logins={login.mechanism: login for login in self.logins},
        )


register("kafka", lambda home: Cluster(ONE, home))


def ready_programs() -> Java:
    """Return the server's programs; the first time fetch them, and run a node once to archive its classes."""
    java = programs()
    if not java.archive.exists():
        with locked(java.directory / "lock"):
            if not java.archive.exists():
                _archive_classes(java)
    return java


def _archive_classes(java: Java) -> None:
    unfinished = java.archive.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with running(_Archived(java, unfinished)) as cluster:
        _in_thread(admin.exercise(cluster.facts().bootstrap))
        run(nodes.ending(cluster.nodes, patience=30.0))
    if unfinished.exists():  # a Java that makes none only starts slower
        unfinished.rename(java.archive)


class _Archived(Cluster):
    """A node that writes the archive when it shuts down."""

    def __init__(self, java: Java, archive: Path) -> None:
        super().__init__(ONE, run_directory(f"archive-{os.getpid()}") / ONE.name)
        self._java = java
        self._options = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", f"-XX:ArchiveClassesAtExit={archive}")

    def _start(self) -> Steps:
        yield from self.first_start(self._java, self._options)


def _choose_id() -> str:
    """As Kafka does: not one that begins with "-", which its tools take for an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _choose_logins() -> list[dict[str, str]]:
    """Users with passwords that have to be quoted in a URL."""
    return [
        {"mechanism": each, "user": f"{each.lower()}-user", "password": f"{secrets.token_urlsafe(12)}:/@%"}
        for each in _MECHANISMS
    ]


def _in_thread(work: Coroutine[object, object, T]) -> T:
    """Run it in an event loop of its own, also where this thread has one that runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
