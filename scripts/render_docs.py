"""Render the pages that come from code and results: docs/configuration.md and docs/reliability/README.md.

`--check` writes nothing and ends with 1 where a page is not up to date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from streamfw.config import Settings, SubscriberSettings
from streamfw.memory import MemoryBroker
from streamfw_kafka import KafkaBroker
from streamfw_kafka.settings import Settings as KafkaSettings
from streamfw_postgres import PostgresBroker
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.settings import Settings as RabbitSettings

DOCS = Path(__file__).resolve().parents[1] / "docs"

RELIABILITY = """\
# Reliability

What `make soak` found: each suite kills processes or cuts transports while messages flow, against a real server that
syncs to disk (Kafka as its defaults have it, which leave that to the system), and compares sets of ids at the end. A
*duplicate* is a second delivery whose cause the oracle has shown: the process of the first was killed, or stood still
past its lease or session, or could not reach the server, before the settlement was durable. Anything else, and anything
lost, fails the suite. This page is rendered from `results.json`; no figure is typed.

On RabbitMQ (`rabbit-cuts`) one app has subscribers of every kind: a single worker, many with a prefetch, batches,
retries and dead letters, one ordered by key, and one on a stream; a second process of its group competes with it, and
is killed. The app publishes all the while, and publishes again, with the same id, what it was not told to be stored. A
duplicate is explained by the end of its channel or process before the server had surely read the acknowledgement, by
such a second publish (*published again*), or by a copy for later or a dead letter that was made twice (*copied
again*); a channel that ends without a fault fails the suite, and so does a key out of order, or an outage that health
does not show. Within five seconds of the server's return every subscriber has to handle a fresh message (*at work
again*).

| suite | rounds | published | handled | lost | duplicates, explained | faults |
|---|---|---|---|---|---|---|
"""

CONFIGURATION = """\
# Configuration

Arguments of `App` win over the environment, the environment over `streamfw.toml` (where the process runs, or the file
that `STREAMFW_CONFIG` or `streamfw run --config` names), the file over defaults. Each wrong key or value is an error
that names its path, and all of them come together. A variable's name is `STREAMFW_`, the path in capitals, and `__`
between its parts. Times are in seconds, sizes in bytes. This page is rendered from the code.
"""


# -- configuration


def described(owner: type) -> dict[str, str]:
    """What the docstring's bullets say of each option."""
    text = inspect.cleandoc(owner.__doc__ or "")
    found: dict[str, str] = {}
    for bullet in re.findall(r"^- (`.+?(?:\n  .+)*)$", text, re.M):
        names, _, says = " ".join(bullet.split()).partition(": ")
        for name in re.findall(r"`(\w+)`", names):
            found[name] = says
    return found


def plain(annotation: Any) -> str:
    """A type as a reader of a table wants it."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " or ".join(plain(one) for one in typing.get_args(annotation) if one is not types.NoneType)
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    return str(annotation).replace("typing.", "").replace(" | None", "").replace("NoneType", "none")


def row(path: str, annotation: Any, default: object, says: str) -> str:
    shown = "" if default in ({}, inspect.Parameter.empty) else f"`{json.dumps(default, ensure_ascii=False)}`"
    kinds = plain(annotation).replace("|", "or")
    return f"| `{path}` | {kinds} | {shown.replace('null', 'none')} | {says.replace('|', 'or')} |"


TABLE = "| key | type | default | what it is |\n|---|---|---|---|"


def struct_rows(owner: type[msgspec.Struct], prefix: str, leave: tuple[str, ...] = ()) -> Iterator[str]:
    says = described(owner)
    hints = typing.get_type_hints(owner)
    for field in msgspec.structs.fields(owner):
        if field.name in leave:
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else {}
        yield row(f"{prefix}{field.name}", hints[field.name], default, says[field.name])


def broker_rows(owner: type, settings: type[msgspec.Struct] | None = None) -> Iterator[str]:
    """The options of a broker. `settings` is what has the defaults where the constructor's are None."""
    kept = {} if settings is None else {field.name: field.default for field in msgspec.structs.fields(settings)}
    says = described(owner)
    hints = typing.get_type_hints(owner.__init__)  # type: ignore[misc]
    yield row("brokers.NAME.url", str, inspect.Parameter.empty, "where it is, and which kind it is (by the scheme)")
    for parameter in inspect.signature(owner).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = kept.get(parameter.name, parameter.default)
            yield row(f"brokers.NAME.{parameter.name}", hints[parameter.name], default, says[parameter.name])


def configuration() -> str:
    parts = [CONFIGURATION, "## The app\n", TABLE]
    parts += struct_rows(Settings, "", leave=("brokers", "subscribers"))
    parts += ["\n## A subscriber, by the name of its handler\n", TABLE]
    parts += struct_rows(SubscriberSettings, "subscribers.NAME.")
    for title, owner, settings in (
        ("A broker: `postgres://`, `postgres+embedded://`", PostgresBroker, None),
        ("A broker: `kafka://`, `kafka+tls://`", KafkaBroker, KafkaSettings),
        ("A broker: `amqp://`, `amqps://`", RabbitBroker, RabbitSettings),
        ("A broker: `memory://`", MemoryBroker, None),
    ):
        parts += [f"\n## {title}\n", TABLE, *broker_rows(owner, settings)]
    parts.append("\n`NAME` is `default` for the broker that subscribers use unless they name another.\n")
    return "\n".join(parts)


# -- reliability


def _faults(total: dict[str, Any]) -> str:
    parts = [f"{total['kills']} processes killed (SIGKILL)"] if "kills" in total else []
    parts += [f"{count} x {name}" for name, count in total.get("faults", {}).items()]
    if "dead_letters" in total:
        parts.append(f"{total['dead_letters']} dead letters")
    if total.get("outcome_unknown"):
        parts.append(f"{total['outcome_unknown']} publishes ended unknown")
    return ", ".join(parts)


def _figures(total: dict[str, Any]) -> Iterator[str]:
    """What some suites have measured besides."""
    if causes := total.get("duplicates_by_cause"):
        yield "duplicates by cause: " + ", ".join(f"{cause} {count:,}" for cause, count in causes.items())
    if (kills := total.get("repeated_after_kills")) and kills["at_most"]:
        repeated, most = kills["repeated"], kills["at_most"]
        yield f"a kill repeats what was done since the last commit: {repeated:,} messages of at most {most:,}"
    for name, value in total.items():
        if isinstance(value, dict) and (seconds := value.get("seconds")):
            times = " / ".join(f"{seconds[key] * 1000:,.0f}" for key in ("median", "p95", "longest"))
            yield f"{name.replace('_', ' ')}, median / 95 % / longest of the worst round: {times} ms"
    if "generations" in total:
        kept, new = total["partitions"]["kept"], total["partitions"]["new"]
        yield f"{total['generations']:,} generations of the group, partitions kept {kept:,}, given to others {new:,}"


def reliability(document: dict[str, Any]) -> str:
    lines, notes = [], []
    for name, suite in sorted(document["suites"].items()):
        total = suite["total"]
        rounds = f"{len(suite['rounds'])}{'' if suite['complete'] else ' (not complete)'}"
        lines.append(
            f"| {name} | {rounds} | {total['published']:,} | {total['handled']:,} | {total['lost']} "
            f"| {total['duplicates']:,} | {_faults(total)} |"
        )
        notes.append(
            f"- `{name}`: {suite['what']}. {suite['date']}, commit `{suite['commit'][:12]}`, seed {suite['seed']}, "
            f"Python {suite['python']}."
        )
        notes += [f"  - {figure}" for figure in _figures(total)]
    return RELIABILITY + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def pages() -> Iterator[tuple[Path, str]]:
    """Each rendered page and its text."""
    yield DOCS / "configuration.md", configuration()
    results = DOCS / "reliability" / "results.json"
    yield DOCS / "reliability" / "README.md", reliability(json.loads(results.read_text()))


def main() -> int:
    stale = [path for path, text in pages() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path} is not up to date: make docs", file=sys.stderr)
        return int(bool(stale))
    for path, text in pages():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
