"""Every Python block of the README and of the pages in docs/ runs.

Conventions of a page:

- Untitled ```` ```python ```` blocks share one namespace, and run in order, as one module would be typed in. ``await``
  is allowed at the top level. The namespace is not ``__main__``.
- ```` ```python title="shop.py" ````: the blocks of one title, in order, are one file; it is imported, so its parts may
  define a class over several blocks. The page's other files can be imported from it by name. Files named ``test_*.py``
  and ``conftest.py`` are imported too, and run by a test of their page's own.
- ```` ```python no-run="needs a server" ````: is not run, for the reason given; it must compile all the same.
- ```` ```toml ```` must parse. All other blocks (console, text) are not looked at.

Blocks run in an empty directory, with no configuration in the environment.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .blocks import ROOT, Page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in an empty directory, importing from it; modules that were imported meanwhile are forgotten."""
    for variable in [name for name in os.environ if name.startswith("STREAMFW_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
async def test_the_blocks_of_a_page_run(path: Path, empty_directory: Path) -> None:
    page = Page(path)
    page.write(empty_directory)
    for title in page.titles():
        if title.endswith(".py"):
            sys.modules.pop(Path(title).stem, None)
    for title in page.titles():
        if title.endswith(".py"):
            importlib.import_module(title.removesuffix(".py").replace("/", "."))
    await _run_untitled(page)
    for block in page.blocks:
        if block.language == "toml":
            tomllib.loads(block.code)


async def _run_untitled(page: Page) -> None:
    module = ModuleType(f"page_{page.path.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module
    try:
        for block in page.blocks:
            if block.language == "python" and block.title is None:
                text = Page.padded([block])
                code = compile(text, page.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if "no-run" not in block.options:
                    running = eval(code, module.__dict__)
                    if inspect.iscoroutine(running):
                        await running
    finally:
        del sys.modules[module.__name__]


def _page(tmp_path: Path, text: str) -> Page:
    path = tmp_path / "page.md"
    path.write_text(text)
    return Page(path)


def test_the_readme_is_among_them_and_has_code() -> None:
    assert any(block.language == "python" for block in Page(PAGES[0]).blocks)


def test_blocks_of_one_title_are_one_file_with_the_lines_of_the_page(tmp_path: Path) -> None:
    page = _page(tmp_path, '# A\n```python title="a.py"\nx = 1\n```\ntext\n```python title="a.py"\ny = 2\n```\n')
    assert page.titles() == ["a.py"]
    assert page.file("a.py").splitlines() == ["", "", "x = 1", "", "", "", "y = 2"]
    with pytest.raises(KeyError, match=r"b\.py"):
        page.file("b.py")


async def test_untitled_blocks_share_a_namespace_and_may_await(tmp_path: Path) -> None:
    text = (
        "```python\nimport asyncio\nx = []\n```\n```python\nawait asyncio.sleep(0)\nx.append(1)\nassert x == [1]\n```\n"
    )
    await _run_untitled(_page(tmp_path, text))


async def test_a_failing_block_fails_at_its_line(tmp_path: Path) -> None:
    page = _page(tmp_path, "# A\n```python\n\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        await _run_untitled(page)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (page.path, 3)  # counted from 0


async def test_a_block_that_is_not_run_still_compiles(tmp_path: Path) -> None:
    await _run_untitled(_page(tmp_path, '```python no-run="needs a server"\n1 / 0\n```\n'))
    with pytest.raises(SyntaxError):
        await _run_untitled(_page(tmp_path, '```python no-run="needs a server"\n1 /\n```\n'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n", "not closed"),
        ("```python no-run\nx = 1\n```\n", "REASON"),
        ("```python no-run=\nx = 1\n```\n", "REASON"),
        ('```python titel="x.py"\nx = 1\n```\n', "titel"),
        ("- a list\n\n  ```python\n  x = 1\n  ```\n", "margin"),
    ],
)
def test_a_page_that_breaks_the_conventions(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _page(tmp_path, text)
    assert "page.md:" in str(caught.value)
