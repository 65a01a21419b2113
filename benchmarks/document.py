"""The JSON document of a run, and the one that is committed.

A run writes ``benchmarks/results/<scenario>-<time>.json``. ``docs/benchmarks.json`` holds the published run of each
scenario (for each Python and loop it was published with); ``docs/benchmarks.md`` is rendered from it.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Protocol

import msgspec

from .harness import CaseResult

__all__ = ["PUBLISHED", "SCHEMA", "Count", "Document", "Machine", "Run", "new_run", "publish", "published", "write"]

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = ROOT / "docs" / "benchmarks.json"
PACKAGES = ("msgspec", "asyncpg", "aiokafka", "uvloop", "pydantic", "faststream", "aio-pika", "aiormq")


class Machine(msgspec.Struct, kw_only=True):
    """Where it ran."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str


class Count(msgspec.Struct, kw_only=True):
    """What was counted of one job, a message; by what it counts."""

    name: str
    values: dict[str, float]


class Run(msgspec.Struct, kw_only=True):
    """One scenario, measured once.

    `date` is UTC; `commit` has a ``+`` behind it where files differed from it; `load` is the machine's, over the minute
    before it began.
    """

    scenario: str
    title: str
    about: str
    date: str
    commit: str
    machine: Machine
    load: float | None = None
    python: str
    loop: str
    versions: dict[str, str]
    facts: dict[str, str] = {}
    unit: str | None = None
    cases: list[CaseResult] = []
    counts: list[Count] = []

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scenario, self.python.rpartition(".")[0], self.loop


class Document(msgspec.Struct, kw_only=True):
    """Runs, by scenario, Python and loop."""

    schema: int = SCHEMA
    runs: list[Run] = []


class Described(Protocol):
    """What a scenario says of itself."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def about(self) -> str: ...


def new_run(scenario: Described, loop: str) -> Run:
    """A run of a scenario, here and now, without its figures."""
    return Run(
        scenario=scenario.name,
        title=scenario.title,
        about=scenario.about,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=_machine(),
        load=round(os.getloadavg()[0], 1),
        python=platform.python_version(),
        loop=loop,
        versions={name: version for name in PACKAGES if (version := _version(name))},
    )


def write(run: Run) -> Path:
    """Write the document of one run; return where."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stamp = run.date.partition("+")[0].replace(":", "")
    path = RESULTS / f"{run.scenario}-{stamp}.json"
    path.write_bytes(_encoded(Document(runs=[run])))
    return path


def published() -> Document:
    """The committed document. Raises `ValueError` when it has another schema."""
    if not PUBLISHED.exists():
        return Document()
    document = msgspec.json.decode(PUBLISHED.read_bytes(), type=Document)
    if document.schema != SCHEMA:
        raise ValueError(f"{PUBLISHED} has schema {document.schema}, and this is {SCHEMA}: publish its runs again")
    return document


def publish(run: Run) -> None:
    """Put a run into the committed document, in place of the one it repeats."""
    document = published()
    document.runs = sorted([other for other in document.runs if other.key != run.key] + [run], key=lambda one: one.key)
    PUBLISHED.write_bytes(_encoded(document))


def _encoded(document: Document) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _machine() -> Machine:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        processor=names[0] if names else platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        memory_gib=round(memory, 1),
        kernel=f"{platform.system()} {platform.release()}",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + ("+" if changed else "")
