"""The nodes of a Kafka cluster: broker and KRaft controller in one process each, in directories of their own.

What a node is and does is in its directory, so that any process can find, signal and stop it: ``server.properties``,
``pid`` (of the process that makes ``data``, then of the server), ``server.log`` and ``data``.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from streamfw_postgres._embedded_steps import Steps

from ._kafka_java import Java, KafkaServerError

__all__ = [
    "ADVERTISED",
    "CONTROLLER",
    "PLAINTEXT",
    "PROTOCOLS",
    "PROXIED",
    "SASL",
    "SASL_TLS",
    "TLS",
    "Login",
    "Node",
    "Ports",
    "ending",
    "format_nodes",
    "properties",
]

ADVERTISED = "ADVERTISED"
PLAINTEXT, PROXIED, SASL, TLS, SASL_TLS, CONTROLLER = "PLAINTEXT", "PROXIED", "SASL", "TLS", "SASLTLS", "CONTROLLER"
PROTOCOLS = {
    PLAINTEXT: "PLAINTEXT",
    PROXIED: "PLAINTEXT",
    SASL: "SASL_PLAINTEXT",
    TLS: "SSL",
    SASL_TLS: "SASL_SSL",
    CONTROLLER: "PLAINTEXT",
}
"""Our names of listeners, and what each speaks."""

Ports = Mapping[str, int]
"""The port of each listener of one node; that of `ADVERTISED` is the one that `PROXIED` tells its clients to use."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""The nodes this process started: it has to collect what they leave, whoever stops them."""


@dataclass(frozen=True, slots=True)
class Login:
    """A user of the server and the mechanism it logs in by."""

    mechanism: str
    user: str
    password: str = field(repr=False)


# ---------------------------------------------------------------------- settings


def properties(
    node: int, home: Path, ports: Mapping[int, Ports], logins: Iterable[Login], tls: Path | None
) -> dict[str, str]:
    """Return the settings of one node of a cluster (``ports`` has all of them)."""
    mine = ports[node]
    listeners = [name for name in PROTOCOLS if name in mine]
    advertised = {name: mine[ADVERTISED] if name == PROXIED else mine[name] for name in listeners}
    copies, enough = min(len(ports), 3), max(1, min(len(ports), 3) - 1)
    settings = {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{each[CONTROLLER]}" for n, each in ports.items()),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": PLAINTEXT,
        "listeners": ",".join(f"{name}://127.0.0.1:{mine[name]}" for name in listeners),
        "advertised.listeners": ",".join(f"{n}://127.0.0.1:{p}" for n, p in advertised.items() if n != CONTROLLER),
        "listener.security.protocol.map": ",".join(f"{name}:{PROTOCOLS[name]}" for name in listeners),
        "log.dirs": str(home / "data"),
        "default.replication.factor": str(copies),
        "min.insync.replicas": str(enough),
    }
    for prefix in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        settings |= {f"{prefix}.replication.factor": str(copies), f"{prefix}.num.partitions": "4"}
    for prefix in ("transaction.state.log", "share.coordinator.state.topic"):
        settings[f"{prefix}.min.isr"] = str(enough)
    return settings | _SMALL_AND_QUICK | _sasl(logins, mine) | _tls(tls)


_SMALL_AND_QUICK = {
    "num.partitions": "4",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "replica.lag.time.max.ms": "5000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "log.segment.bytes": str(16 << 20),
    "log.initial.task.delay.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "log.cleaner.dedupe.buffer.size": str(4 << 20),  # the default is 128 MB, on the heap from the start
    "log.cleaner.io.buffer.size": str(128 << 10),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "remote.log.reader.threads": "1",
}


def _sasl(logins: Iterable[Login], ports: Ports) -> dict[str, str]:
    """PLAIN's users are settings; those of SCRAM are in the metadata, put there when the node is formatted."""
    mechanisms: dict[str, list[str]] = {}
    for login in logins:
        users = mechanisms.setdefault(login.mechanism, [])
        if login.mechanism == "PLAIN":
            users.append(f'user_{login.user}="{login.password}"')
    settings = {}
    for listener in (SASL, SASL_TLS):
        if listener not in ports:
            continue
        prefix = f"listener.name.{listener.lower()}"
        settings[f"{prefix}.sasl.enabled.mechanisms"] = ",".join(mechanisms)
        for mechanism, users in mechanisms.items():
            module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
            line = " ".join([f"org.apache.kafka.common.security.{module} required", *users])
            settings[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = f"{line};"
    return settings


def _tls(tls: Path | None) -> dict[str, str]:
    return {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(tls / "server.pem")} if tls else {}


# ---------------------------------------------------------------------- one node


class Node:
    """One node in `home`, which may run or not."""

    def __init__(self, number: int, home: Path) -> None:
        self.number = number
        self.home = home

    @property
    def settings(self) -> Path:
        return self.home / "server.properties"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    def configure(self, settings: Mapping[str, str]) -> None:
        """Write its settings."""
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.settings.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def formatting(self, java: Java, cluster: str, logins: Sequence[Login]) -> subprocess.Popen[bytes]:
        """Start to make its empty directory; whoever calls waits for it."""
        scram = [login for login in logins if login.mechanism != "PLAIN"]
        users = [f"{each.mechanism}=[name={each.user},password={each.password}]" for each in scram]
        arguments = [word for user in users for word in ("--add-scram", user)]
        command = java.command("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self.settings), *arguments)
        return self._run(command, said=False)  # it says what the users' logins are made of

    def launch(self, java: Java, *, megabytes: int, options: Sequence[str] = ()) -> None:
        """Start its process."""
        # Java unpacks native libraries into its temporary directory, and a killed one leaves them there.
        memory = ("-Xms64m", f"-Xmx{megabytes}m", f"-Djava.io.tmpdir={self.home}")
        command = java.command("kafka.Kafka", str(self.settings), options=(*memory, *options))
        process = self._run(command)
        _children[process.pid] = process
        while self.process() is None and process.poll() is None:
            time.sleep(0.001)  # until the shell wrote its number

    def _run(self, command: Sequence[str], *, said: bool = True) -> subprocess.Popen[bytes]:
        """Run it in a session of its own: what a terminal sends to the tests is not for it.

        It writes its number itself, so that it can be found also if we are killed just now.
        """
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.home / "pid"), *command],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log if said else subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def listening(self) -> set[int]:
        """The ports that its process listens on. (To connect to one would tell of whoever has it.)"""
        process = self.process()
        try:
            found = process.net_connections("tcp") if process is not None else []
        except psutil.Error:  # it has just ended
            return set()
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}

    def process(self) -> psutil.Process | None:
        """Its process, or none if it does not run."""
        for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
            del _children[pid]
        try:
            process = psutil.Process(int((self.home / "pid").read_text()))
            if process.pid in _children:
                return process
            if process.status() == psutil.STATUS_ZOMBIE:  # with threads that live it still holds files and ports
                return process if process.num_threads() > 1 else None
            return process if str(self.settings) in process.cmdline() else None  # else the number is another's now
        except (OSError, ValueError, psutil.Error):
            return None

    def responds(self) -> bool:
        """Say whether it runs, and is not frozen."""
        process = self.process()
        try:
            return process is not None and process.status() != psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> None:
        process = self.process()
        try:
            if process is not None:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            pass

    def said(self) -> str:
        """The end of its log."""
        try:
            return self.log.read_text(errors="replace")[-3000:]
        except FileNotFoundError:
            return ""


def format_nodes(nodes: Sequence[Node], java: Java, cluster: str, logins: Sequence[Login]) -> None:
    """Make the directories of a new cluster, all at once."""
    with ExitStack() as ended:
        processes = []
        for node in nodes:
            process = ended.enter_context(node.formatting(java, cluster, logins))
            ended.callback(process.kill)
            processes.append((node, process))
        for node, process in processes:
            if process.wait(60) != 0:
                raise KafkaServerError(f"Kafka could not format {node.home}:\n{node.said()}")


def ending(nodes: Sequence[Node], *, patience: float) -> Steps:
    """Stop them in order (SIGTERM), and by force (SIGKILL) those that run after `patience` seconds; 0 is at once."""
    for node in nodes:
        node.signal(signal.SIGCONT)
        node.signal(signal.SIGTERM if patience else signal.SIGKILL)
    waited = 0.0
    while running := [node for node in nodes if node.process() is not None]:
        if waited >= patience:
            for node in running:
                node.signal(signal.SIGKILL)
        waited += 0.02
        yield 0.02
