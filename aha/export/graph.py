"""The graph that is exported: pixels and a target in, logits and map out, with normalisation inside."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer

Precision = Literal["fp32", "fp16"]
Pixels = Literal["float", "uint8"]


class ExplainerGraph(nn.Module):
    """Classifier, encoder if there is one, and head as one module, on copies, so that the explainer stays as it was.

    Args:
        explainer: what to export.
        precision: ``"fp16"`` runs classifier and encoder in half precision. The head stays in float32: it is the
            smaller part, and its standardisation and the map's ranking need it.

    Shape:
        - images: ``(batch, 3, H, W)``, float in [0, 1], or uint8
        - targets: ``(batch,)`` int64; −1 stands for the predicted class
        - output: logits ``(batch, classes)`` and maps ``(batch, 1, H, W)``, float32
    """

    def __init__(self, explainer: AmortizedExplainer, *, precision: Precision = "fp32") -> None:
        super().__init__()
        self.classifier = copy.deepcopy(explainer.classifier)
        self.encoder = copy.deepcopy(explainer.encoder)
        if precision == "fp16":
            for backbone in filter(None, (self.classifier, self.encoder)):
                backbone.half()
        self.head = copy.deepcopy(explainer.head).eval()
        twin = copy.copy(explainer)
        twin.classifier, twin.encoder, twin.head = self.classifier, self.encoder, self.head
        self._explainer = (twin,)  # a tuple, as modules are registered above already

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        output = self._explainer[0].encode(images)
        output = output._replace(logits=output.logits.float(), features=tuple(f.float() for f in output.features))
        targets = torch.where(targets < 0, output.logits.argmax(-1), targets)
        return output.logits, self._explainer[0].decode(output, images, targets).float()


def trace(explainer: AmortizedExplainer, *, precision: Precision = "fp32", pixels: Pixels = "float") -> ExportedProgram:
    """Trace an explainer with a dynamic batch (at batch 2: tracing at 1 would fix it).

    Args:
        explainer: on the CPU.
        precision: see :class:`ExplainerGraph`.
        pixels: type of the graph's images: float in [0, 1], or uint8.
    """
    images = torch.rand(2, 3, *explainer.classifier.image_size)
    images = images if pixels == "float" else (images * 255).to(torch.uint8)
    batch = Dim("batch", min=1)
    shapes = {"images": {0: batch}, "targets": {0: batch}}
    graph = ExplainerGraph(explainer, precision=precision).eval()
    with torch.no_grad():
        return torch.export.export(graph, (images, torch.tensor([-1, 0])), dynamic_shapes=shapes)


def at_size(explainer: AmortizedExplainer, size: int | Sequence[int]) -> AmortizedExplainer:
    """The same explainer for another image size; an encoder keeps its own.

    Position embeddings are resampled here, once, so that no resize of them lands in the graph.

    Raises:
        ValueError: the classifier can't take that size.
    """
    original = explainer.classifier
    height, width = (size, size) if isinstance(size, int) else size
    model = copy.deepcopy(original.model)
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(height, width))
    classifier = FrozenClassifier(
        model,
        mean=original.mean.flatten().tolist(),
        std=original.std.flatten().tolist(),
        image_size=(height, width),
        link=original.link,
        feature_layers=original.feature_layers,
        class_layer=original.class_layer,
        class_names=original.class_names,
        name=original.name,
        copy_model=False,
    )
    if original._config is not None:
        classifier._config = original._config | {"image_size": [height, width]}
    resized = AmortizedExplainer(classifier, encoder=explainer.encoder, **explainer.options)
    resized.head.load_state_dict(explainer.head.state_dict())
    resized.head.eval()
    resized.record = explainer.record
    return resized
