"""No password in what is shown of a URL, however wrong the URL is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfw.errors import redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("memory://shared", "memory://shared"),
        ("postgres://localhost/shop", "postgres://localhost/shop"),
        ("postgres://user:word@host:5432/shop", "postgres://user@host:5432/shop"),
        ("postgres://user@host/shop?password=word", "postgres://user@host/shop"),
        ("postgres://host/shop?password=wo@rd", "postgres://host/shop"),
        ("postgres://user:word@[::1]:5432/shop", "postgres://user@[::1]:5432/shop"),
        ("postgres://one:1,two:2/shop", "postgres://one:1,two:2/shop"),
        ("postgresql://user:word@/shop?host=/run/postgresql", "postgresql://user@/shop"),
        ("postgres+embedded:///var/lib/shop", "postgres+embedded:///var/lib/shop"),
        ("postgres+embedded://./data", "postgres+embedded://./data"),
        ("postgres://user:wo/rd@host/shop", "postgres://user@host/shop"),
        ("postgres://user:wo#rd@host/shop", "postgres://user@host/shop"),
        ("postgres://user:wo?rd@host/shop", "postgres://user@host/shop"),
        ("postgres://user:wo@rd@host/shop", "postgres://user@host/shop"),
        ("postgres://user:word", "postgres://user"),
        ("postgres://user:word/shop", "postgres://user"),
        ("user:word@host/shop", "user@host/shop"),
        ("", ""),
    ],
)
def test_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@given(password=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="@="), min_size=8))
def test_no_password(password: str) -> None:
    """Whatever is in it, unescaped: nothing of it is left. (What looks like a query, "?a=", is taken for one.)"""
    assert redact(f"postgres://user:{password}@host:5432/shop") == "postgres://user@host:5432/shop"
