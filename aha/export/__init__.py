"""Handing a trained explainer on: artefacts (safetensors + JSON), torch.export and ONNX, each checked before it counts.

The graph exporters are imported only where they are called, so that loading an artefact needs no onnx.
"""

from aha.export.artifact import (
    FORMAT_VERSION,
    build_from_config,
    explainer_config,
    load_artifact,
    load_explainer,
    save_artifact,
)

__all__ = [
    "FORMAT_VERSION",
    "build_from_config",
    "explainer_config",
    "load_artifact",
    "load_explainer",
    "save_artifact",
]
