"""What the shell completes: by a bash that reads typed keys, as far as bash is to do it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamfw.cli.completion import complete_app, completing, join_colons

SHOP = "import streamfw\napp = streamfw.App()\napply = 3\n"
BINARIES = str(Path(sys.executable).parent)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with modules, where the command runs."""
    files = {
        "shop.py": SHOP,
        "stock.py": "from streamfw import App\nfirst: App = App()\nsecond = third = App()\nother.app = App()\n",
        "string.txt": "App()",
        "strange.py": "app = App(",
        "not-a-module.py": SHOP,
        "parts/__init__.py": SHOP,
        "parts/bills.py": "app = App(name='bills')\n1 / 0\n",
        "parts/plain.py": "x = 1",
        "data/x.csv": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("_STREAMFW_COMPLETE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "targets"),
    [
        ("", ["parts.", "parts:app", "shop:app", "stock:first", "stock:second", "stock:third"]),
        ("sh", ["shop:app"]),
        ("shop:", ["shop:app"]),
        ("shop:app", ["shop:app"]),
        ("shop:x", []),
        ("stock:se", ["stock:second"]),
        ("parts", ["parts.", "parts:app"]),
        ("parts.", ["parts.bills:app"]),
        ("parts.bills:a", ["parts.bills:app"]),
        ("nothing.", []),
        ("../", []),
        ("str", []),
    ],
)
def test_apps_are_found_without_importing_them(typed: str, targets: list[str]) -> None:
    assert complete_app(typed) == targets


@pytest.mark.parametrize(
    ("words", "cursor", "joined", "begun"),
    [
        (["streamfw", "run", "shop", ":", "a"], 4, ["streamfw", "run", "shop:a"], "shop:"),
        (["streamfw", "run", "shop", ":"], 3, ["streamfw", "run", "shop:"], "shop:"),
        (["streamfw", "run", "shop", ":", ""], 4, ["streamfw", "run", "shop:"], "shop:"),
        (["streamfw", "run", ""], 2, ["streamfw", "run", ""], ""),
        (["streamfw", "run", "shop", ":", "app", "--wo"], 5, ["streamfw", "run", "shop:app", "--wo"], ""),
        (["streamfw", "run", "--broker", "x", ":", "//", "s"], 6, ["streamfw", "run", "--broker", "x://", "s"], ""),
        (["streamfw", "ru", "behind"], 1, ["streamfw", "ru"], ""),
    ],
)
def test_words_that_bash_cut_are_joined(words: list[str], cursor: int, joined: list[str], begun: str) -> None:
    environ = {"_STREAMFW_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(cursor)}
    assert join_colons(environ) == begun
    assert environ["COMP_WORDS"].split("\n") == joined
    assert int(environ["COMP_CWORD"]) == len(joined) - 1


def test_bash_gets_what_stands_behind_the_last_colon(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"_STREAMFW_COMPLETE": "complete_bash", "COMP_WORDS": "streamfw\nrun\nstock\n:", "COMP_CWORD": "3"}
    with completing(environ):
        print("\n".join(complete_app("stock:")))
    assert capsys.readouterr().out == "first\nsecond\nthird\n"


def test_other_shells_and_calls_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for variables in ({}, {"_STREAMFW_COMPLETE": "complete_zsh"}, {"_STREAMFW_COMPLETE": "complete_bash"}):
        environ = {**variables, "COMP_WORDS": "a\nb\n:"}
        before = dict(environ)
        with completing(environ):
            print("b:c")
        assert environ == before
        assert capsys.readouterr().out == "b:c\n"


class Shell:
    """An interactive bash with the completion that ``streamfw --install-completion`` installs."""

    def __init__(self, project: Path) -> None:
        terminal, line = pty.openpty()
        environ = {**os.environ, "PATH": f"{BINARIES}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=project, env=environ, stdin=line, stdout=line, stderr=line, start_new_session=True,
        )  # fmt: skip
        os.close(line)
        self._terminal = terminal
        self._seen = ""
        self.type('eval "$(_STREAMFW_COMPLETE=source_bash streamfw)"; echo "rea""dy"\n')
        self.until("ready")

    def type(self, keys: str) -> None:
        self._seen = ""
        os.write(self._terminal, keys.encode())

    def until(self, text: str) -> None:
        end = time.monotonic() + 20
        while text not in self._seen:
            if not select.select([self._terminal], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"bash did not show {text!r}: {self._seen!r}")
            self._seen += re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]|\x07", "", os.read(self._terminal, 4096).decode())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def shell(project: Path) -> Iterator[Shell]:
    shell = Shell(project)
    yield shell
    shell.close()


def test_bash_completes_commands_options_and_apps(shell: Shell) -> None:
    for typed, completed in (
        ("streamfw chec", "streamfw check "),
        ("streamfw dlq requ", "streamfw dlq requeue "),
        ("streamfw run --super", "streamfw run --supervise "),
        ("streamfw run sh", "streamfw run shop:app "),
        ("streamfw run shop:", "streamfw run shop:app "),
        ("streamfw check stock:se", "streamfw check stock:second "),
        ("streamfw check parts.b", "streamfw check parts.bills:app "),
        ("streamfw run shop:app --rel", "streamfw run shop:app --reload"),
    ):
        shell.type(f"{typed}\t")
        shell.until(completed)
        shell.type("\x15")  # the line is cleared
