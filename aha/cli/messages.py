"""What the commands share: option names with hyphens or underscores, and errors as one line instead of a traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NoReturn

from jsonargparse import ArgumentParser

from aha.nearest import nearest

EXPECTED = (ValueError, OSError, ImportError)


UNKNOWN = re.compile(r"unrecognized arguments: --([\w.-]+)|^Group '([\w.]+)' does not accept option '([\w.]+)'")


class BriefErrors:
    """For parsers of many options: an error is one line that offers the nearest one, without a screenful of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        if unknown := UNKNOWN.search(message):
            name = unknown[1] or f"{unknown[2]}.{unknown[3]}"
            options = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            near = nearest(name, options, count=1, cutoff=0.6)
            message += f". Did you mean {'--' if unknown[1] else ''}{near[0]}?" if near else "."
        print(f"{self.prog}: error: {message}\nSee {self.prog} --help.", file=sys.stderr)
        self.exit(2)


class CommandParser(BriefErrors, ArgumentParser):
    """The commands' parser."""


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
