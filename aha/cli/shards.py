"""`aha shards FOLDER OUTPUT`: a folder of pictures to tar shards."""

from __future__ import annotations

from jsonargparse import auto_parser

from aha.cli.messages import guarded, spelled


def main(args: list[str] | None = None) -> int:
    """Parse and run; returns the exit status."""
    from aha.data.write_shards import write_shards

    options = auto_parser(write_shards, prog="aha shards").parse_args(spelled(args))
    options.pop("config", None)
    return guarded(lambda: write_shards(**options.as_dict()), "aha shards")
