"""The programs of Apache Kafka: its jars by name through Maven, and the command line that runs a class of them.

They are kept under ``.cache/kafka`` of the checkout, in a directory named after what they depend on: the POM and the
Java. Beside the jars is an archive of the classes that a server loads (class data sharing): with it a node is up in 1 s
instead of 2.3 s. Without Maven, what is cached is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Java", "KafkaServerError", "programs"]

POM = Path(__file__).parent / "kafka_server" / "pom.xml"
CACHE = Path(__file__).parents[2] / ".cache" / "kafka"


class KafkaServerError(Exception):
    """The test server cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    """Where the programs are."""

    program: str
    directory: Path

    @property
    def archive(self) -> Path:
        return self.directory / "classes.jsa"

    def command(self, main_class: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """The command line for a main class. Serial collector and C1 only: they start fastest and take the least."""
        small = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        sharing = [f"-XX:SharedArchiveFile={self.archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        flags = [*small, *(sharing if self.archive.exists() else []), quiet, *options]
        return [self.program, *flags, "-cp", f"{self.directory}/lib/*", main_class, *arguments]


def _java() -> tuple[str, str]:
    """The program and what it says of its version."""
    program = shutil.which("java")
    if program is None:
        raise KafkaServerError("the tests need Java 17 or later for Kafka: apt-get install default-jre-headless")
    said = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < 17:
        raise KafkaServerError(
            f"Kafka needs Java 17 or later, and {program} says {said.strip()!r}: "
            "apt-get install openjdk-17-jre-headless"
        )
    return program, said


def programs(cache: Path | None = None) -> Java:
    """Return the programs, resolved by Maven the first time (44 MB). Raises `KafkaServerError`.

    One process resolves at a time; the others wait, and find them.
    """
    program, version = _java()
    cache = cache or CACHE
    key = hashlib.sha256(POM.read_bytes() + version.encode()).hexdigest()[:12]
    java = Java(program, cache / key)
    library = java.directory / "lib"
    if not library.is_dir():
        java.directory.mkdir(parents=True, exist_ok=True)
        with locked(java.directory / "lock"):
            if not library.is_dir():
                _resolve(library)
    return java


def _resolve(library: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise KafkaServerError("the tests need Maven to fetch the Kafka server: apt-get install maven")
    unfinished = library.with_name(f"lib.{secrets.token_hex(4)}")
    command = [maven, "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={unfinished}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise KafkaServerError(f"Maven could not fetch the Kafka server:\n{(done.stdout + done.stderr)[-2000:]}")
        unfinished.rename(library)
    except subprocess.TimeoutExpired:
        raise KafkaServerError("Maven could not fetch the Kafka server in 10 minutes") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the file's lock; wait for it."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
