"""`aha explain cat.jpg --explainer FOLDER`: pictures with what made the classifier say what it said."""

from __future__ import annotations

import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jsonargparse import DefaultHelpFormatter

from aha.cli.messages import CommandParser, guarded, spelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from aha.explainer import AmortizedExplainer

SHOWN = 720  # longest side of a picture in the result
CELL, DPI = 3.2, 150
LONGEST_SIDE, WEBP_SIDE = 60_000, 16_000  # pixels that formats can hold
EPILOG = """examples:
  aha explain cat.jpg --explainer runs/pets/explainer
  aha explain cat.jpg --explainer runs/pets/explainer --target tabby --target 285 --output cat.png
  aha explain photos/ --explainer runs/pets/explainer --compare cdam,gradskip --output explained/"""


def explain(
    images: list[str],
    explainer: str,
    target: list[str] | None = None,
    output: str | None = None,
    compare: str = "",
    refine: int = 0,
    top: int = 5,
    npy: bool = False,
    resize: Literal["squash", "crop"] = "squash",
    batch_size: int = 8,
    checkpoint_path: str | None = None,
    device: str = "cpu",
) -> None:
    """Explain pictures: one overlay per class asked for, and the predictions on the terminal.

    Args:
        images: picture files, folders and glob patterns.
        explainer: an artefact's folder, a training checkpoint, or a hub id.
        target: class index or name; repeat it for several; default: each picture's predicted class.
        output: a folder, or a file, in which several pictures get a row each; default: NAME.explained.png for one
            picture, else the folder explained/.
        compare: explainers to show beside it, by name and separated by commas: cdam,gradskip
        refine: steps of test-time refinement, shown as a row of its own.
        top: how many predictions to print.
        npy: also save the raw maps, float32 (classes, height, width), as NAME.npy, others' as NAME.EXPLAINER.npy.
        resize: the whole picture squashed to the classifier's size, or its largest central part.
        batch_size: pictures explained at once.
        checkpoint_path: local file with the backbone's weights.
        device: where to compute.
    """
    from rich.progress import track

    from aha.cli.classes import class_names, find_class
    from aha.cli.files import find_pictures, is_file_name, output_paths
    from aha.export import load_explainer
    from aha.pictures import sheet

    pictures = find_pictures(images)
    together = output if output is not None and is_file_name(output) and len(pictures) > 1 else None
    if together and npy:
        msg = f"--npy writes a file per picture, {output} is one: name a folder."
        raise ValueError(msg)
    if together and Path(together).resolve() in {file for file, _ in pictures}:
        msg = f"{output} is one of the pictures itself: name another output."
        raise ValueError(msg)
    paths = output_paths(pictures, None if together else output)
    rows: list | None = [] if together else None
    loaded = load_explainer(explainer, checkpoint_path=checkpoint_path, device=device)
    names = class_names(loaded.classifier)
    targets = [find_class(text, names) for text in target or []]
    methods = _methods(loaded, compare, refine)
    jobs = list(zip([file for file, _ in pictures], paths, strict=True))
    chunks = [jobs[i : i + batch_size] for i in range(0, len(jobs), max(batch_size, 1))]
    failed = []
    for chunk in track(chunks, "explaining", disable=len(chunks) < 2, transient=True):
        for line, bad in _explain_batch(
            loaded, methods, chunk, targets, names, top=top, npy=npy, resize=resize, rows=rows
        ):
            print(line)
            failed += bad
    if rows:
        Path(together).parent.mkdir(parents=True, exist_ok=True)
        figure = sheet(rows, ["", *methods], cell=CELL)
        side = WEBP_SIDE if together.lower().endswith(".webp") else LONGEST_SIDE
        figure.savefig(together, dpi=min(DPI, side / max(figure.get_size_inches())))
        print(f"{len(rows)} rows → {together}")
    if failed:
        msg = f"{len(failed)} of {len(pictures)} files could not be read: {', '.join(map(str, failed[:5]))}"
        raise ValueError(msg)


def _explain_batch(
    explainer: AmortizedExplainer,
    methods: dict,
    jobs: Sequence[tuple[Path, Path]],
    targets: list[int],
    names: list[str],
    *,
    top: int,
    npy: bool,
    resize: Literal["squash", "crop"],
    rows: list | None,
) -> Iterator[tuple[str, list[Path]]]:
    """Explain, draw and save one batch, or add to the rows of one sheet.

    Yields a line to print per picture, and the file if it was unreadable.
    """
    import torch

    from aha.cli.classes import short
    from aha.data.pictures import BadPicture

    readable, shown, batch = [], [], []
    for file, path in jobs:
        try:
            pixels, display = _read(file, explainer.classifier.image_size, resize)
        except BadPicture as error:
            yield f"{file}: {error}", [file]
            continue
        readable.append((file, path))
        shown.append(display)
        batch.append(pixels)
    if not batch:
        return
    images = torch.stack(batch).to(explainer.device)
    explanation = explainer.explain(images)
    probabilities = explainer.classifier.probabilities(explanation.logits).cpu()
    columns = [[t] * len(images) for t in targets] or [explanation.targets.tolist()]
    maps: dict[str, list[Tensor]] = {
        name: [method(images, torch.tensor(column)).float().cpu() for column in columns]
        for name, method in methods.items()
    }
    for i, (file, path) in enumerate(readable):
        classes = [column[i] for column in columns]
        titles = [f"{short(names[c])} {probabilities[i, c]:.1%}" for c in classes]
        own = {name: [m[i, 0] for m in each] for name, each in maps.items()}
        if rows is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _figure(shown[i], file.name, own, titles).savefig(path, dpi=DPI)
        else:
            rows += [_row(shown[i], file.name, own, k, title) for k, title in enumerate(titles)]
        if npy:
            _save_arrays(path, own)
        best = probabilities[i].topk(min(top, probabilities.shape[-1]))
        lines = [f"  {p:6.1%}  {names[c]} ({c})" for p, c in zip(best.values, best.indices.tolist(), strict=True)]
        yield "\n".join([f"{file} → {path}" if rows is None else str(file), *lines]), []


def _methods(explainer: AmortizedExplainer, compare: str, refine: int) -> dict:
    """Functions ``(images, targets) -> maps`` by the name that their row gets."""
    methods = {explainer.name: explainer.attribute}
    if refine:
        from aha.refinement import RefineOptions
        from aha.refinement import refine as refined

        options = RefineOptions(steps=refine)
        methods[f"{explainer.name}, refined"] = lambda images, targets: (
            refined(explainer, images, targets, options=options).maps
        )
    if compare:
        from aha.baselines import build_explainer

        for spec in _split(compare):
            other = build_explainer(spec, explainer.classifier)
            methods[other.name] = other.attribute
    return methods


def _row(picture: Tensor, name: str, maps: dict[str, list[Tensor]], k: int, title: str) -> tuple[str, list]:
    """A row of a sheet: the picture and every explainer's map of its k-th class."""
    from aha.pictures import overlay

    return title, [(picture, name), *((overlay(picture, each[k]), "") for each in maps.values())]


def _figure(picture: Tensor, name: str, maps: dict[str, list[Tensor]], titles: Sequence[str]) -> Figure:
    """A column per class and a row per explainer; for a single class, the explainers side by side."""
    from aha.pictures import overlay, sheet

    cells = {method: [(overlay(picture, m), "") for m in each] for method, each in maps.items()}
    if len(maps) > 1 and len(titles) == 1:
        return sheet([(titles[0], [(picture, ""), *(each[0] for each in cells.values())])], [name, *maps], cell=CELL)
    rows = [
        (method if len(maps) > 1 else "", [(picture, "") if row == 0 else None, *each])
        for row, (method, each) in enumerate(cells.items())
    ]
    return sheet(rows, [name, *titles], cell=CELL)


def _save_arrays(path: Path, maps: dict[str, list[Tensor]]) -> None:
    for row, (method, each) in enumerate(maps.items()):
        ending = ".npy" if row == 0 else f".{re.sub(r'[^A-Za-z0-9]+', '_', method).strip('_')}.npy"
        np.save(path.with_suffix(ending), np.stack([m.numpy() for m in each]))


def _read(file: Path, size: tuple[int, int], resize: Literal["squash", "crop"]) -> tuple[Tensor, Tensor]:
    """What the classifier sees, and the same part of the picture at a size to look at."""
    from aha.data.pictures import read_picture, read_sized

    pixels, (height, width) = read_sized(file, size=size, resize=resize)
    if resize == "crop":
        fit = min(height / size[0], width / size[1])
        height, width = size[0] * fit, size[1] * fit
    shrink = min(1.0, SHOWN / max(height, width))
    display = (max(round(height * shrink), 1), max(round(width * shrink), 1))
    return pixels, read_picture(file, size=display, resize=resize)


def _split(specs: str) -> list[str]:
    """At commas outside parentheses: ``"cdam, rise(num_masks=8, seed=1)"`` names two."""
    parts, depth = [""], 0
    for letter in specs:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


class _Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the examples' lines."""


def main(args: list[str] | None = None) -> int:
    """Parse and run; returns the exit status."""
    description = (explain.__doc__ or "").split("\n")[0]
    parser = CommandParser(prog="aha explain", description=description, epilog=EPILOG, formatter_class=_Help)
    parser.add_argument("images", nargs="+", help="Picture files, folders and glob patterns.")
    parser.add_argument("--target", action="append", help="Class index or name; repeat it for several.")
    parser.add_function_arguments(explain, as_group=False, skip={"images", "target"}, as_positional=False)
    options = parser.parse_args(spelled(args, switches=("npy",)))
    return guarded(lambda: explain(**options.as_dict()), "aha explain")
