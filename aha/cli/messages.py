"""What the commands share: option names with hyphens or underscores, and errors as one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXPECTED = (ValueError, OSError, ImportError)


def spelled(args: list[str] | None, *, switches: tuple[str, ...] = ()) -> list[str]:
    """Arguments as the parser knows them: ``--with-backbone`` is ``--with_backbone``, a bare switch means true."""
    spelled = []
    args = sys.argv[1:] if args is None else list(args)
    for arg, following in zip(args, [*args[1:], "--"], strict=True):
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg[2:].partition("=")
            name = name.replace("-", "_")
            if name in switches and not equals and following not in ("true", "false", "null"):
                equals, value = "=", "true"
            arg = f"--{name}{equals}{value}"
        spelled.append(arg)
    return spelled


def guarded(function: Callable[[], object], name: str) -> int:
    """Run a command: expected errors become a message on stderr and status 1, a bug keeps its traceback."""
    from aha.export.parity import ParityError

    try:
        function()
    except (*EXPECTED, ParityError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0
