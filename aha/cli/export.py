"""`aha export` and `python export.py`: an explainer to a file that runs without the training code."""

from __future__ import annotations

from typing import Literal

from jsonargparse import auto_parser

from aha.cli.messages import guarded, spelled


def export(
    explainer: str,
    output: str,
    format: Literal["safetensors", "pt2", "onnx"] = "onnx",
    precision: Literal["fp32", "fp16"] = "fp32",
    pixels: Literal["float", "uint8"] = "float",
    size: list[int] | int | None = None,
    with_backbone: bool | None = None,
    checkpoint_path: str | None = None,
) -> None:
    """Export an explainer. The result is compared with torch on real pictures before it takes its place.

    A graph (pt2, onnx) takes images and targets, (batch, 3, H, W) and (batch,), −1 for the predicted class, and returns
    logits and maps; normalisation is inside and the batch size is free. The figures of the comparison are written
    beside it; if it fails, what was there stays and the exit status is 1.

    Args:
        explainer: an artefact's folder, a training checkpoint, or a hub id.
        output: a file for pt2 and onnx, a folder for safetensors.
        format: safetensors (for aha.load), pt2 (torch.export) or onnx.
        precision: fp16 runs a graph's backbone in half precision, or stores an artefact in it.
        pixels: what a graph takes: float in [0, 1] or uint8.
        size: another image size, one side or [height, width]; position embeddings are resampled.
        with_backbone: a graph always holds the backbone; an artefact only on request.
        checkpoint_path: local file with the backbone's weights.
    """
    from aha.export import load_explainer
    from aha.export.exporters import export_explainer
    from aha.export.graph import at_size

    loaded = load_explainer(explainer, checkpoint_path=checkpoint_path, device="cpu")
    if size is not None:
        loaded = at_size(loaded, size)
    figures = export_explainer(
        loaded, output, format=format, precision=precision, pixels=pixels, with_backbone=with_backbone
    )
    height, width = loaded.classifier.image_size
    print(
        f"{output}: {loaded.classifier.name} at {height}×{width}, {precision}. Largest difference to torch on real "
        f"pictures {figures['largest_difference']:.1e} of the range (allowed {figures['tolerance']:.0e})."
    )


def main(args: list[str] | None = None) -> int:
    """Parse and run; returns the exit status."""
    parser = auto_parser(export, as_positional=False, prog="aha export")
    options = parser.parse_args(spelled(args, switches=("with_backbone",)))
    options.pop("config", None)
    return guarded(lambda: export(**options.as_dict()), "aha export")
