"""Which pictures a command line means, and where their results go."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from aha.data.pictures import SUFFIXES

PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".pdf", ".svg")


def find_pictures(sources: Sequence[str]) -> list[tuple[Path, Path]]:
    """Files, folders (searched to the bottom) and glob patterns to ``(file, name relative to its folder)``.

    Raises:
        FileNotFoundError: naming the source that yields nothing.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            matches = [(p, p.relative_to(path)) for p in sorted(path.rglob("*")) if _is_picture(p, path)]
        elif path.is_file():
            matches = [(path, Path(path.name))]
        else:
            hits = sorted(glob.glob(str(path), recursive=True))
            matches = [(p, Path(p.name)) for p in map(Path, hits) if p.suffix.lower() in SUFFIXES and p.is_file()]
        if not matches:
            msg = f"There is no picture {source!r}" + (
                f" (looked for {', '.join(SUFFIXES)})." if path.is_dir() else "."
            )
            raise FileNotFoundError(msg)
        for file, name in matches:
            found.setdefault(file.resolve(), name)
    return list(found.items())


def is_file_name(output: str) -> bool:
    """Whether an output is the name of a picture, not of a folder."""
    return Path(output).suffix.lower() in PICTURE_ENDINGS


def output_paths(pictures: Sequence[tuple[Path, Path]], output: str | None) -> list[Path]:
    """One result per picture: the file asked for, or a name below a folder; no two are the same."""
    if output is not None and is_file_name(output):
        if len(pictures) > 1:
            msg = f"{output} is one file, but there are {len(pictures)} pictures: name a folder."
            raise ValueError(msg)
        if Path(output).resolve() == pictures[0][0]:
            msg = f"{output} is the picture itself: name another output."
            raise ValueError(msg)
        return [Path(output)]
    if output is None and len(pictures) == 1:
        return [Path(f"{pictures[0][1].stem}.explained.png")]
    folder = Path(output or "explained")
    sources = {file for file, _ in pictures}
    taken: dict[Path, None] = {}
    for _, name in pictures:
        candidates = [name.with_suffix(".png"), name.with_name(f"{name.name}.png")]
        candidates += [name.with_name(f"{name.stem}-{i}.png") for i in range(2, len(pictures) + 2)]
        chosen = next(
            folder / c for c in candidates if folder / c not in taken and (folder / c).resolve() not in sources
        )
        taken[chosen] = None
    return list(taken)


def _is_picture(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and path.suffix.lower() in SUFFIXES and path.is_file()
