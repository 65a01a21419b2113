"""Files of lines that processes write about themselves, each with one `os.write`: the kernel has it when that returns,
so a SIGKILL loses none of it. Times in them are of CLOCK_MONOTONIC, which all processes of a machine share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LineFile", "lines_of"]


class LineFile:
    """One process's file; its name without the ending is the process's."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self.process = path.stem

    def write(self, *lines: str) -> None:
        """Write so many lines at once."""
        os.write(self._file, ("\n".join(lines) + "\n").encode())


def lines_of(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Each line of each process in `directory` (``<process>.log``), in words, with the process's name."""
    for path in sorted(directory.glob("*.log")):
        for line in path.read_text().splitlines():
            yield path.stem, line.split(" ")
