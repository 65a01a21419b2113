"""The command line on a real server, which the environment names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner

from streamfw.cli.program import program

__all__ = ["Run", "commands_on"]

Run: TypeAlias = Callable[..., tuple[int, str, str]]
"""A command's arguments to its exit code, standard output and standard error."""


def commands_on(url: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, columns: int, secret: str = "") -> Run:
    """Commands run in `directory`, on a terminal so wide that no cell is wrapped; none may ever print `secret`."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("STREAMFW_BROKERS__DEFAULT__URL", url)
    runner = CliRunner()

    def run(*arguments: str) -> tuple[int, str, str]:
        result = runner.invoke(program, list(arguments), catch_exceptions=False)
        assert not secret or secret not in result.output
        return result.exit_code, result.stdout, result.stderr

    return run
