"""``python evaluate.py``: score explainers under named protocols and write a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from aha.cli.memory import keep_freed_memory
from aha.cli.messages import CommandParser, guarded
from aha.evaluation.evaluate import EvaluateOptions, evaluate
from aha.evaluation.results import terminal_table

LOG_WIDTH = 160  # characters, where the output is no terminal


def build_parser() -> CommandParser:
    """The parser; ``--config FILE`` sets the same options."""
    parser = CommandParser(prog="evaluate.py", description="Score explainers under named protocols; write a report.")
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    parser.add_class_arguments(EvaluateOptions)
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Parse, run, print the tables; returns the exit status."""
    parser = build_parser()
    values = parser.instantiate(parser.parse_args(_expand(sys.argv[1:] if args is None else list(args)))).as_dict()
    values.pop("config", None)
    keep_freed_memory()
    return guarded(lambda: show(evaluate(EvaluateOptions(**values)), Path(values["output"])), "evaluate")


def show(results: dict, output: Path) -> None:
    """The terminal's version of the report; one process prints it."""
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    for protocol in results["protocols"]:
        console.print(terminal_table(results, protocol))
    what, file = ("Report", "report.html") if results["settings"]["report"] else ("Figures", "results.json")
    console.print(f"{what}: {output / file}", highlight=False)


def _expand(args: list[str]) -> list[str]:
    """``--classifier NAME`` as short for ``--classifier.name NAME``."""
    return [
        "--classifier.name" + arg[len("--classifier") :] if arg.split("=")[0] == "--classifier" else arg for arg in args
    ]
