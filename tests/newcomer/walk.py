"""Follows a page as its reader would: writes its files, types its commands, and compares what they print.

Conventions of a console block:

- Lines that begin with ``$`` are typed, in order; the lines after one are what it prints. ``...`` stands for anything,
  also for any number of lines.
- ```` ```console background ````: its one command goes on running, in a terminal of its own, until the page ends; it is
  waited for until it has printed what stands there.
- ```` ```console output ````: what the command in the background prints next.
- ```` ```console install ````: installs something. Typed only when the reader has nothing yet.

    python -m tests.newcomer.walk docs/getting-started.md --install PYTHON

does all of it in an empty folder with a Python of your choice, this checkout being what is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+) ?(.*?)\n(.*?)^```", re.M | re.S)
PATIENCE = 30.0


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, what else the block's first line says, and its text."""
    for match in BLOCK.finditer(page.read_text()):
        yield match[1], match[2], match[3]


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return [(command, "\n".join(lines).strip()) for command, lines in found]


def matches(expected: str, printed: str) -> bool:
    """Whether what was printed is what the page says, ``...`` standing for anything and any space for any other."""
    pattern = r"[\s\S]*?".join(re.escape(part) for part in _plain(expected).split("..."))
    return re.fullmatch(pattern, _plain(printed)) is not None


def _plain(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


class Walk:
    """One reader in one folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str], install: str | None = None) -> None:
        self.folder, self.install = folder, install
        self.environment = {**environment, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        self.background: subprocess.Popen[bytes] | None = None
        self.log = folder / "background.log"
        self._read = 0

    def follow(self, page: Path) -> list[str]:
        """All of it; returns the commands that were typed. Raises `AssertionError` where the page is wrong."""
        typed: list[str] = []
        try:
            for language, info, text in blocks(page):
                title = re.search(r'title="([^"]+)"', info)
                if title:
                    (self.folder / title[1]).write_text(text)
                elif language == "console":
                    typed.extend(self._console(info, text))
        finally:
            self._end()
        return typed

    def _console(self, info: str, text: str) -> list[str]:
        if info == "install" and self.install is None:
            return []
        if info == "background":
            ((command, expected),) = commands(text)
            with self.log.open("wb") as log:
                shell = f"{self._activate()}exec {command}"
                self.background = subprocess.Popen(
                    ["bash", "-c", shell], cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            self._appears(expected)
            return [command]
        if info == "output":
            for line in text.splitlines():
                self._appears(line)
            return []
        return [self._type(command, expected) for command, expected in commands(text)]

    def _type(self, command: str, expected: str) -> str:
        shell = command
        if self.install is not None:
            shell = command.replace("python3", self.install, 1) if command.startswith("python3") else command
            shell = shell.replace("'streamfw[", f"'{ROOT}[")
        done = subprocess.run(
            ["bash", "-c", self._activate() + shell],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"$ {command}\nended with {done.returncode}:\n{said}"
        assert not expected or matches(expected, done.stdout), f"$ {command}\nprinted\n{said}\ninstead of\n{expected}"
        return command

    def _activate(self) -> str:
        return "" if self.install is None else "[ ! -e .venv ] || . .venv/bin/activate; "

    def _appears(self, expected: str) -> None:
        """Wait until a line in the background's terminal is the expected one, after those that were seen already."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            rest = self.log.read_text()[self._read :]
            at = 0
            for line in rest.splitlines(keepends=True):
                at += len(line)
                if matches(expected, line):
                    self._read += at
                    return
            time.sleep(0.05)
        raise AssertionError(f"not within {PATIENCE} s: {expected!r}; the terminal says\n{self.log.read_text()}")

    def _end(self) -> None:
        if self.background is None:
            return
        self.background.send_signal(signal.SIGINT)
        try:
            code = self.background.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.background.kill()
            raise
        assert code == 0, f"Ctrl-C ended it with {code}:\n{self.log.read_text()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--install", metavar="PYTHON", help="begin with nothing, on this Python")
    arguments = parser.parse_args()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STREAMFW_", "VIRTUAL_ENV"))}
    with tempfile.TemporaryDirectory(prefix="streamfw-walk-") as folder:
        began = time.monotonic()
        typed = Walk(Path(folder), clean, arguments.install).follow(arguments.page.resolve())
        print(f"{len(typed)} commands, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
