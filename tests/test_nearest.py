"""Names that start with what was typed come first."""

from __future__ import annotations

from aha.nearest import nearest


def test_prefixes_come_first():
    names = ["input_gradient", "gradskip", "random", "grid", "centre_prior"]
    assert nearest("grad", names)[0] == "gradskip"
    assert nearest("centre", names) == ["centre_prior"]
    assert nearest("radnom", names, count=1) == ["random"]


def test_nothing_is_like_nothing():
    assert nearest("", ["cdam"]) == nearest("qqq", ["cdam"]) == []
