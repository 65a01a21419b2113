"""What somebody else wrote (ids, keys, names, errors), made fit for a log and a terminal.

Raw, a newline in a message id would forge a line of a log, and an escape sequence drive the terminal of who reads it.
"""

from __future__ import annotations

__all__ = ["one_line", "printable"]


def printable(text: str, keep: str = "\n\t") -> str:
    """`text` with what does not print (control characters, lone surrogates) as escapes, as in a literal of Python;
    except what is in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """The same without newlines and tabs: a value inside a line."""
    return printable(text, keep="")
