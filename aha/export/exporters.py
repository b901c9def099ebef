"""Explainer to file: an artefact, a ``.pt2`` program or an ONNX model, each checked before it takes its place."""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram

from aha.explainer import AmortizedExplainer
from aha.export.artifact import explainer_config, load_artifact, save_artifact
from aha.export.atomic import replace, write_atomically
from aha.export.graph import Pixels, Precision, trace
from aha.export.parity import check_parity

Format = Literal["safetensors", "pt2", "onnx"]
OPSET = 20
TOLERANCES = {"safetensors": 0.0, "pt2": 1e-6, "onnx": 1e-4}
HALF_TOLERANCE = 0.05
Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def export_explainer(
    explainer: AmortizedExplainer,
    output: str | Path,
    *,
    format: Format,
    precision: Precision = "fp32",
    pixels: Pixels = "float",
    with_backbone: bool | None = None,
) -> dict[str, Any]:
    """Export, check against torch on real pictures, and only then put the result in place.

    Args:
        explainer: what to export, on the CPU.
        output: a folder for ``"safetensors"``, else a file. What is there stays until the check has passed.
        format: ``"safetensors"`` (artefact for :func:`aha.load`), ``"pt2"`` (torch.export) or ``"onnx"``.
        precision: ``"fp16"``: half-precision backbone in a graph; half-precision storage in an artefact.
        pixels: what a graph takes: float in [0, 1] or uint8.
        with_backbone: a graph always holds the backbone; an artefact only on request.

    Returns:
        The figures of the check, as written to ``<output>.parity.json`` (``parity.json`` inside an artefact).

    Raises:
        ParityError: the check failed; nothing was written.
        ValueError: a graph without the backbone was asked for.
    """
    output = Path(output)
    tolerance = HALF_TOLERANCE if precision == "fp16" else TOLERANCES[format]
    if format == "safetensors":
        return _export_artifact(explainer, output, precision, tolerance, with_backbone=bool(with_backbone))
    if with_backbone is False:
        msg = f"A {format} graph takes pixels, so it always holds the backbone; only 'safetensors' can leave it out."
        raise ValueError(msg)
    if output.is_dir():
        msg = f"{output} is a folder; a {format} export is a file, such as {output / f'explainer.{format}'}."
        raise ValueError(msg)
    program = trace(explainer, precision=precision, pixels=pixels)
    about = _about(explainer, precision, pixels)
    write = _write_pt2 if format == "pt2" else _write_onnx
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        draft = Path(folder) / output.name
        run = write(program, draft, about)
        figures = {"format": format, "precision": precision, "pixels": pixels}
        figures |= check_parity(explainer, run, tolerance=tolerance, pixels=pixels)
        del run
        for part in sorted(Path(folder).iterdir(), key=lambda path: path == draft):  # the model itself comes last
            replace(part, output.parent / part.name)
    write_atomically(f"{output}.parity.json", json.dumps(figures, indent=2) + "\n")
    return figures


def _export_artifact(
    explainer: AmortizedExplainer, output: Path, precision: Precision, tolerance: float, *, with_backbone: bool
) -> dict[str, Any]:
    dtype = torch.float16 if precision == "fp16" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        save_artifact(explainer, folder, with_backbone=with_backbone, dtype=dtype)
        loaded = load_artifact(folder, classifier=None if with_backbone else explainer.classifier)

    def run(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        predicted = explainer.classifier(images).argmax(-1)
        found = loaded.explain(images, torch.where(targets < 0, predicted, targets))
        return found.logits, found.maps

    figures = {"format": "safetensors", "precision": precision} | check_parity(explainer, run, tolerance=tolerance)
    save_artifact(explainer, output, with_backbone=with_backbone, dtype=dtype)
    write_atomically(output / "parity.json", json.dumps(figures, indent=2) + "\n")
    return figures


def _write_pt2(program: ExportedProgram, path: Path, about: dict[str, str]) -> Run:
    with path.open("wb") as stream:  # given a name, torch insists on its own ending
        torch.export.save(program, stream, extra_files={"aha.json": json.dumps(about, indent=2)})
    with path.open("rb") as stream:
        graph = torch.export.load(stream).module()

    def run(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return graph(images, targets)

    return run


def _write_onnx(program: ExportedProgram, path: Path, about: dict[str, str]) -> Run:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        msg = f"Exporting to ONNX needs {error.name}: pip install 'aha[onnx]'."
        raise ImportError(msg) from error
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*axis name: batch will not be used.*")
        model = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=["images", "targets"],
            output_names=["logits", "maps"],
            verbose=False,
        )
    model.model.metadata_props.update(about)
    model.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, maps = session.run(["logits", "maps"], {"images": images.numpy(), "targets": targets.numpy()})
        return torch.from_numpy(logits), torch.from_numpy(maps)

    return run


def _about(explainer: AmortizedExplainer, precision: Precision, pixels: Pixels) -> dict[str, str]:
    """What travels inside the file: enough to use it without this package."""
    config = explainer_config(explainer)
    return {
        "aha": config["versions"]["aha"],
        "backbone": config["backbone"]["name"],
        "backbone_sha256": config["backbone"]["fingerprint"],
        "class_names": json.dumps(config["backbone"]["class_names"]),
        "image_size": json.dumps(config["preprocessing"]["image_size"]),
        "images": "RGB float in [0, 1]" if pixels == "float" else "RGB uint8",
        "targets": "class index per image, -1 for the predicted class",
        "precision": precision,
    }
