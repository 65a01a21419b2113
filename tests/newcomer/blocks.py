"""The code blocks of a Markdown page, as files and as modules.

Text that runs keeps the page's line numbers (what is not code is blank lines), so a traceback points into the page.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

__all__ = ["ROOT", "Block", "Page"]

ROOT = Path(__file__).parents[2]
FENCE = "```"


class Block(NamedTuple):
    """One fenced block: ```` ```language title="..." no-run="..." ````."""

    line: int
    language: str
    options: dict[str, str]
    code: str

    @property
    def title(self) -> str | None:
        return self.options.get("title")


class Page:
    """A Markdown page. Raises `ValueError` for a fence that is not closed or an info string that is not understood."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        self._read(path.read_text().splitlines())

    def _read(self, lines: list[str]) -> None:
        begun: int | None = None
        for number, line in enumerate(lines):
            if not line.lstrip().startswith(FENCE):
                continue
            if line != line.lstrip():
                raise ValueError(f"{self.path}:{number + 1}: a fence begins at the margin, so that its code does, too")
            if begun is None:
                begun = number
            elif line.strip() == FENCE:
                language, options = self._info(begun, lines[begun])
                code = "".join(f"{text}\n" for text in lines[begun + 1 : number])
                self.blocks.append(Block(begun + 2, language, options, code))
                begun = None
        if begun is not None:
            raise ValueError(f"{self.path}:{begun + 1}: the block is not closed")

    def _info(self, number: int, line: str) -> tuple[str, dict[str, str]]:
        language, *words = shlex.split(line[len(FENCE) :]) or [""]
        if language == "console" and words in (["install"], ["background"], ["output"]):
            return language, {}  # see walk.py
        options = dict(word.partition("=")[::2] for word in words)
        for name, value in options.items():
            if name not in ("title", "no-run") or not value:
                raise ValueError(f'{self.path}:{number + 1}: {name}={value!r}; known are title="FILE", no-run="REASON"')
        return language, options

    def titles(self) -> list[str]:
        """The files that the page's blocks make up, in the order in which they begin."""
        return list(dict.fromkeys(block.title for block in self.blocks if block.title is not None))

    def file(self, title: str) -> str:
        """The text of one file: its blocks in order, each on the lines it has in the page."""
        blocks = [block for block in self.blocks if block.title == title]
        if not blocks:
            raise KeyError(f"{self.path} has no block titled {title!r}")
        return self.padded(blocks)

    @staticmethod
    def padded(blocks: list[Block]) -> str:
        text, line = "", 1
        for block in blocks:
            text += "\n" * (block.line - line) + block.code
            line = block.line + block.code.count("\n")
        return text

    def write(self, directory: Path) -> None:
        """Write every titled file."""
        for title in self.titles():
            path = directory / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.file(title))

    def module(self, title: str) -> ModuleType:
        """Import the file titled `title`, from the page itself, under its own name."""
        module = ModuleType(Path(title).stem)
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module
        exec(compile(self.file(title), self.path, "exec"), module.__dict__)
        return module
