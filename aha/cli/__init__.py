"""Command lines. ``aha COMMAND …`` imports only what that command needs."""

from __future__ import annotations

import importlib
import sys

from aha.nearest import nearest

COMMANDS = {
    "explain": ("aha.cli.explain:main", "pictures with what made the classifier say what it said"),
    "export": ("aha.cli.export:main", "an explainer to safetensors, .pt2 or ONNX, checked against torch"),
    "train": ("aha.cli.train:main", "train an explainer for a frozen classifier"),
    "evaluate": ("aha.cli.evaluate:main", "measure explainers: insertion, deletion and more, side by side"),
    "shards": ("aha.cli.shards:main", "a folder of pictures to tar shards"),
}


def main(args: list[str] | None = None) -> int:
    """The ``aha`` console command; returns the exit status."""
    args = sys.argv[1:] if args is None else list(args)
    command = args[0] if args else "--help"
    if command in ("-h", "--help"):
        print("usage: aha COMMAND [options]\n")
        for name, (_, line) in COMMANDS.items():
            print(f"  {name:10}{line}")
        print("\naha COMMAND --help tells more.")
        return 0
    if command == "--version":
        from aha import __version__

        print(__version__)
        return 0
    if command not in COMMANDS:
        near = nearest(command, COMMANDS, count=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"aha: no command {command!r}.{hint} There are: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(module), function)(args[1:]) or 0
