"""Which of the known names a misspelt one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str], *, count: int = 3, cutoff: float = 0.4) -> list[str]:
    """The names that start with the word, then those spelt most like it.

    Args:
        word: what was given.
        names: what there is.
        count: at most so many.
        cutoff: in [0, 1], how alike spellings must be.

    Example:
        >>> nearest("grad", ["gradskip", "random", "grid"])
        ['gradskip', 'grid', 'random']
    """
    names = list(names)
    starting = [name for name in names if word and name.startswith(word)]
    return list(dict.fromkeys([*starting, *difflib.get_close_matches(word, names, n=count, cutoff=cutoff)]))[:count]
