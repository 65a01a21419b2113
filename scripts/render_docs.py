"""Render docs/reliability/README.md from its results; `--check` only says whether it is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reliability"

HEAD = """\
# Reliability

What `make soak` found: each suite kills processes or cuts transports while messages flow, against a real server that
syncs to disk, and compares sets of ids at the end. A *duplicate* is a second delivery whose cause the oracle has shown:
the process of the first was killed, or its lease had ended, before the settlement was durable. Anything else, and
anything lost, fails the suite. This page is rendered from `results.json`; no figure is typed.

| suite | rounds | published | handled | lost | duplicates, explained | faults |
|---|---|---|---|---|---|---|
"""


def _faults(total: dict[str, Any]) -> str:
    parts = [f"{total['kills']} processes killed (SIGKILL)"] if "kills" in total else []
    parts += [f"{count} x {name}" for name, count in total.get("faults", {}).items()]
    if "dead_letters" in total:
        parts.append(f"{total['dead_letters']} dead letters")
    if total.get("outcome_unknown"):
        parts.append(f"{total['outcome_unknown']} publishes ended unknown")
    return ", ".join(parts)


def render(document: dict[str, Any]) -> str:
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
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def main() -> int:
    page, results = DOCS / "README.md", DOCS / "results.json"
    text = render(json.loads(results.read_text()))
    if "--check" in sys.argv:
        return int(page.read_text() != text)
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
