"""What the shell completes: ``streamfw --install-completion`` is typer's; this finds apps, and mends bash's colons.

Apps are found by reading modules, not by importing them: a completion runs nobody's code.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Generator, Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

__all__ = ["complete_app", "completing", "join_colons"]

_VARIABLE = "_STREAMFW_COMPLETE"
_MOST = 300  # modules of one directory that are looked into
_LARGEST = 1_000_000  # bytes of a module that is looked into
# As source text, to leave a module without an app unparsed: parsing takes a thousand times as long.
_MENTIONED = re.compile(rb"\bApp\(")


def complete_app(incomplete: str) -> list[str]:
    """The apps and packages of the directory where the command runs whose names begin with `incomplete`."""
    parts = incomplete.partition(":")[0].split(".")
    if not all(part.isidentifier() for part in parts[:-1]):
        return []
    found = list(_targets(Path(*parts[:-1]), "".join(f"{part}." for part in parts[:-1]), parts[-1]))
    return sorted(target for target in found if target.startswith(incomplete))


def _targets(directory: Path, prefix: str, begin: str) -> Iterator[str]:
    try:
        entries = sorted(path for path in directory.iterdir() if path.name.startswith(begin))[:_MOST]
    except OSError:
        return
    for path in entries:
        name = path.stem if path.suffix == ".py" else path.name
        if not name.isidentifier():
            continue
        module = path if path.suffix == ".py" else path / "__init__.py"
        if name != "__init__":
            yield from (f"{prefix}{name}:{app}" for app in _apps(module))
        if path.is_dir() and any(path.glob("*.py")):
            yield f"{prefix}{name}."


def _apps(module: Path) -> list[str]:
    """The names at the top of a module that are given an ``App(..)``."""
    try:
        if module.stat().st_size > _LARGEST:
            return []
        source = module.read_bytes()
        return [] if _MENTIONED.search(source) is None else list(_assigned(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):
        return []


def _assigned(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _makes_an_app(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _makes_an_app(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    return (isinstance(called, ast.Name) and called.id == "App") or (
        isinstance(called, ast.Attribute) and called.attr == "App"
    )


@contextmanager
def completing(environ: MutableMapping[str, str]) -> Generator[None, None, None]:
    """Mend what bash makes of colons, around a call that may be to complete something. To bash a colon is a word of its
    own: it asks for completions of ``shop``, ``:`` and ``ap``, and puts what it gets in the place of the last of them.
    """
    begun = join_colons(environ)
    if not begun:
        yield
        return
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            print(line.removeprefix(begun))


def join_colons(environ: MutableMapping[str, str]) -> str:
    """Where bash asks for completions, make one word of what it cut at colons; what of the last word stands before its
    last colon, the colon included."""
    if environ.get(_VARIABLE) != "complete_bash":
        return ""
    words = environ.get("COMP_WORDS", "").split("\n")
    try:
        cursor = int(environ.get("COMP_CWORD", ""))
    except ValueError:
        return ""
    joined: list[str] = []
    for word in words[: cursor + 1]:
        if joined[1:] and (word.startswith(":") or joined[-1].endswith(":")):
            joined[-1] += word
        else:
            joined.append(word)
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
    before, colon, _ = joined[-1].rpartition(":")
    return before + colon
