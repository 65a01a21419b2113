"""What the code itself costs, counted: Python calls, memory blocks, and instructions where valgrind is installed.

Instructions and allocations are those of a whole process under valgrind, as the slope between a run of 1,000 messages
and one of 2,000; a run of none is the cold start. What putting the messages there costs is measured apart, and taken
off.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.counts import JOBS, block_slope, count_calls
from benchmarks.document import ROOT, Count

__all__ = ["Counted", "scenario"]

LOW, HIGH = 1000, 2000
UNDER_VALGRIND = "consume, workers=1"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A scenario that counts."""

    name: str = "code"
    title: str = "What the code costs, counted"
    about: str = (
        "Calls a message (`sys.setprofile`) on the memory broker, on Kafka's source with its records at hand, and on "
        "RabbitMQ's fast lane with a server that answers from memory; and what stays in memory. Nothing is timed."
    )

    def count(self, report: Callable[[str], None]) -> list[Count]:
        counts = []
        for name, job in JOBS.items():
            calls = count_calls(job)
            counts.append(Count(name=name, values={"Python calls": calls.python, "C calls": calls.c}))
            report(f"code: {name}: {calls.python:g} Python calls, {calls.c:g} C calls a message")
        counts.append(Count(name="publish and consume", values={"blocks left": block_slope()}))
        if shutil.which("valgrind"):
            counts += [_instructions(report)]
        else:
            report("code: no valgrind (apt-get install valgrind): instructions and allocations are left out")
        return counts


def scenario(loop: str) -> Counted:
    """The scenario; it is the same on every loop but for callgrind, and runs on asyncio."""
    return Counted()


def _instructions(report: Callable[[str], None]) -> Count:
    fill = "c.fill(c.MemoryBroker(), {})"
    consume = f"c.JOBS[{UNDER_VALGRIND!r}]({{}}, contextlib.nullcontext())"
    values = {}
    for what, read in (("instructions", _callgrind), ("allocations", _memcheck)):
        report(f"code: {what} under valgrind: five runs of some ten seconds")
        filling, both = ((read(job.format(HIGH)) - read(job.format(LOW))) / (HIGH - LOW) for job in (fill, consume))
        values[what] = both - filling
        values[f"{what}, cold start"] = float(read("asyncio.sleep(0)"))
    return Count(name=UNDER_VALGRIND, values=values)


def _callgrind(job: str) -> int:
    with tempfile.NamedTemporaryFile() as out:
        said = _valgrind(["--tool=callgrind", f"--callgrind-out-file={out.name}"], job)
    return _found(r"Collected : ([\d,]+)", said)


def _memcheck(job: str) -> int:
    return _found(r"total heap usage: ([\d,]+) allocs", _valgrind(["--tool=memcheck", "--leak-check=no"], job))


def _valgrind(options: list[str], job: str) -> str:
    code = f"import asyncio, contextlib, benchmarks.counts as c; asyncio.run({job})"
    done = subprocess.run(
        ["valgrind", *options, sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"valgrind ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stderr


def _found(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"valgrind did not say {pattern!r}: {text[-2000:]}")
    return int(match[1].replace(",", ""))
