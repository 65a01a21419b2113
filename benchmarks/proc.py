"""CPU time of processes, read from the kernel.

Postgres is a process a connection, each with one thread: for those ``/proc/<pid>/schedstat`` has nanoseconds. A process
with several threads is read from ``/proc/<pid>/stat``, which counts all of them in clock ticks (10 ms). What a process
has reaped of its children (``cutime``, ``cstime``) is counted too, so a backend that ends within a window stays in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

__all__ = ["tree_cpu"]

TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def tree_cpu(pid: int) -> float:
    """Seconds of CPU of a process, all its living descendants, and what they have reaped."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(map(_process_cpu, pids))


def _process_cpu(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        schedstat = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended: from now on it is in what its parent has reaped
    # Counted from after the name: utime, stime, cutime, cstime are fields 14 to 17 and num_threads is 20 (proc(5)).
    own, reaped, threads = int(stat[11]) + int(stat[12]), int(stat[13]) + int(stat[14]), int(stat[17])
    precise = int(schedstat[0]) / 1e9
    return (precise if threads == 1 and precise else own * TICK) + reaped * TICK
