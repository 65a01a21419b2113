"""From ``module:app`` on the command line to the `App`, with an error that says what there is instead."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from streamfw.app import App
from streamfw.config import CONFIG
from streamfw.errors import StreamError

from .output import CommandError

__all__ = ["load_app"]


def load_app(target: str, config: Path | None = None) -> App:
    """The app that `target` (``module:app``, ``package.module:holder.app``) names; the module is looked for where the
    command runs, too. `config`: the configuration file, over what the app itself names.

    Raises `CommandError`, or the `StreamError` that the module raised when it was imported.
    """
    if config is not None:
        # By the environment as well: for what the module reads by itself, and for processes that it starts.
        os.environ[CONFIG] = str(config)
    module_name, colon, attribute = target.partition(":")
    _no_path(target, module_name)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name)
    if not colon or not attribute:
        raise CommandError(f"{target!r} names a module; name the app in it, too{_example(module_name, module)}")
    app = _attribute(module_name, module, attribute)
    if config is not None:
        # The command line wins over App(config=..), as its --broker wins over App(brokers=..).
        app.configure(config)
    return app


def _no_path(target: str, module_name: str) -> None:
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        parts = Path(module_name).with_suffix("").parts
        dotted = ".".join(part for part in parts if part not in (".", "..", "/", os.sep))
        raise CommandError(f"{target!r} is a path; name the module, as an import does: {dotted}:app")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise CommandError(f"{target!r} is not of the form module:app")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except StreamError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise CommandError(
                f"there is no module {missing!r} in {os.getcwd()} or where Python looks{_near_module(missing)}"
            ) from None
        raise CommandError(_failed(name, error)) from error
    except (Exception, SystemExit) as error:
        raise CommandError(_failed(name, error)) from error


def _near_module(missing: str) -> str:
    """The module of nearly that name, among those beside it, or of that name one directory below."""
    parent, _, _ = missing.rpartition(".")
    where = list(getattr(sys.modules.get(parent), "__path__", ())) if parent else [os.getcwd()]
    prefix = f"{parent}." if parent else ""
    close = difflib.get_close_matches(missing, [prefix + found.name for found in pkgutil.iter_modules(where)], n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "" if parent else _below(missing)


def _below(missing: str) -> str:
    for found in sorted({path.parent for path in (*Path().glob(f"*/{missing}.py"), *Path().glob(f"*/{missing}/"))}):
        if (found / "__init__.py").exists():
            return f"; did you mean '{found}.{missing}'?"
        if (found / f"{missing}.py").exists() or (found / missing / "__init__.py").exists():
            return f"; it is in {found}{os.sep}: run the command there, or set PYTHONPATH={found}"
    return ""


def _failed(name: str, error: BaseException) -> str:
    """What went wrong and where, by file and line. No source text: it may hold a password."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not frame.filename.startswith("<frozen importlib") and frame.filename != __file__
    ]
    own = [frame for frame in own if frame.filename != importlib.__file__]
    places = "".join(f"\n  {frame.filename}:{frame.lineno}, in {frame.name}" for frame in own)
    if isinstance(error, SyntaxError):
        places += f"\n  {error.filename}:{error.lineno}"
        error = type(error)(error.msg)
    return f"importing {name!r} failed: {type(error).__name__}: {error}{places}"


def _apps(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, App)]


def _example(module_name: str, module: ModuleType) -> str:
    apps = _apps(module)
    return f": {' or '.join(f'{module_name}:{app}' for app in apps)}" if apps else "; there is no App in it"


def _attribute(module_name: str, module: ModuleType, attribute: str) -> App:
    value: object = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise CommandError(
                f"{module_name!r} has no {attribute!r}; {_what_there_is(attribute, _apps(module))}"
            ) from None
    if not isinstance(value, App):
        kind = type(value).__name__
        raise CommandError(
            f"{module_name}:{attribute} is {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}, not an App; "
            f"{_what_there_is(attribute, _apps(module))}"
        )
    return value


def _what_there_is(attribute: str, apps: Sequence[str]) -> str:
    if not apps:
        return "there is no App in it"
    close = difflib.get_close_matches(attribute, apps, n=1) if len(apps) > 1 else []
    return f"Apps in it: {', '.join(apps)}{f'; did you mean {close[0]!r}?' if close else ''}"
