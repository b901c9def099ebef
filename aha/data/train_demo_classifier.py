"""The recipe of the demo's two frozen classifiers: ``python -m aha.data.train_demo_classifier vit vit.safetensors``.

They see fresh scenes in every step: one digit (its class), two digits (half and half), none (undecided). Some
images lose pixels, as they will when explanations are scored; as a digit disappears, its target fades to undecided.
Clutter fades in over the first third, and positions are supervised too in the first half. The ConvNeXt comes first:
its maps also teach the ViT, which learns too slowly from labels alone. About 12 minutes each on one free core.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import timm
import torch
import torch.nn.functional as F
from kornia.filters import gaussian_blur2d
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.optim import Muon
from torch import Tensor, nn

from aha.classifier import FrozenClassifier
from aha.data.demo import DEMO_CLASSIFIERS, digit_pool, load_demo_classifier
from aha.data.demo_scenes import SIZE, draw_scenes

NUM_CLASSES = 10
STEPS = {"vit": 3000, "convnext": 2400}
GRID = 8  # both classifiers end in a grid of 8×8 positions
EVALUATION_SEED = 2**32 + 1  # stream of the scenes that classifiers are measured on


def _scenes(
    split: str, seed: int, start: int, counts: tuple[int, int, int], *, clutter: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``counts[d]`` scenes with d digits, their clutter faded towards its mean colour.

    Returns:
        images in [0, 1] (batch, 3, H, W), masks (batch, 2, H, W) and one-hot labels (batch, 2, 10).
    """
    pictures, labels, _ = digit_pool(split)  # type: ignore[arg-type]
    images, masks, onehot = [], torch.zeros(sum(counts), 2, SIZE, SIZE), torch.zeros(sum(counts), 2, NUM_CLASSES)
    done = 0
    for digits, count in enumerate(counts):
        if count == 0:
            continue
        indices = range(start, start + count)
        scenes = draw_scenes(pictures, labels, seed=seed * 3 + digits, indices=indices, digits=digits)
        rows = slice(done, done + count)
        masks[rows, :digits] = torch.from_numpy(scenes.masks).float()
        onehot[rows, :digits] = F.one_hot(torch.from_numpy(scenes.labels), NUM_CLASSES).float()
        drawn = torch.from_numpy(scenes.images).float() / 255
        if clutter < 1:
            plain = torch.from_numpy(scenes.backgrounds).float().mean((2, 3), keepdim=True) / 255
            painted = masks[rows].amax(1, keepdim=True)
            drawn = drawn + (1 - painted) * (1 - clutter) * (plain - drawn)
        images.append(drawn)
        done += count
    return torch.cat(images), masks, onehot


def _feature_loss(
    projections: nn.ModuleList, tokens: list[Tensor], teacher: FrozenClassifier, images: Tensor
) -> Tensor:
    """How far a ViT's tokens at three depths are, after a linear map, from the ConvNeXt's maps (arXiv 1412.6550)."""
    with torch.no_grad():
        taught = [f.flatten(2).transpose(1, 2) for f in teacher.forward_features(images).features[1:]]
    losses = [
        F.mse_loss(project(F.layer_norm(ours, ours.shape[-1:])), F.layer_norm(theirs, theirs.shape[-1:]))
        for project, ours, theirs in zip(projections, tokens, taught, strict=True)
    ]
    return torch.stack(losses).mean()


def _erase(images: Tensor, masks: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replaces a random share of every image's pixels by black, the mean colour or a blur.

    Which pixels go is random in squares of 1 to 8 pixels, and in two of three images the digits go first or last.

    Returns:
        The images, and the share of each digit that is left. Shape: (batch, 3, H, W) and (batch, 2).
    """
    batch = len(images)
    side = int(2 ** torch.randint(3, 7, (1,), generator=generator))
    order = torch.rand(batch, 1, side, side, generator=generator)
    order = F.interpolate(order, size=(SIZE, SIZE), mode="nearest")
    bias = torch.randint(-1, 2, (batch, 1, 1, 1), generator=generator) * torch.rand(batch, 1, 1, 1, generator=generator)
    order = order + bias * masks.sum(1, keepdim=True)
    share = torch.rand(batch, 1, generator=generator)
    keep = (order > order.flatten(1).sort().values.gather(1, (share * SIZE**2).long())[:, :, None, None]).float()
    fills = torch.stack(
        [
            torch.zeros_like(images),
            torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1).expand_as(images),
            gaussian_blur2d(images, (25, 25), (10.0, 10.0)),
        ]
    )
    fill = fills[torch.randint(0, 3, (batch,), generator=generator), torch.arange(batch)]
    left = (masks * keep).sum((2, 3)) / masks.sum((2, 3)).clamp(min=1)
    return images * keep + fill * (1 - keep), left


def _targets(onehot: Tensor, visible: Tensor) -> Tensor:
    """Class probabilities to aim at, given the share of each digit that is left. Shape: (batch, 10)."""
    weight = ((visible - 0.15) / 0.4).clamp(0, 1) * onehot.sum(-1)
    certain = weight.amax(1, keepdim=True)
    shared = (onehot * weight[..., None]).sum(1) / weight.sum(1, keepdim=True).clamp(min=1e-6)
    return certain * shared + (1 - certain) / NUM_CLASSES


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Starts a narrow network where it learns in minutes: unit-gain layers, and a position code that ViTs can use.

    timm's defaults (weights of 0.02, ConvNeXt's layer scale of 1e-6) are made for width and long schedules.
    """
    head = model.get_classifier()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 0.5 if module is head else 1.0
            nn.init.normal_(module.weight, std=gain * module.weight[0].numel() ** -0.5, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(getattr(module, "gamma", None), nn.Parameter):
            nn.init.constant_(module.gamma, 0.5)
    if hasattr(model, "pos_embed"):
        width = model.pos_embed.shape[-1]
        y, x = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
        waves = math.pi / GRID * torch.arange(1, 7) / 2
        code = torch.cat([f(v.reshape(-1, 1) * waves) for v in (y, x) for f in (torch.sin, torch.cos)], dim=1)
        mixing = torch.randn(code.shape[1], width, generator=generator) * code.shape[1] ** -0.5
        model.pos_embed.data[0, -(GRID**2) :] = code @ mixing


def _local_logits(model: nn.Module, final: Tensor) -> Tensor:
    """The classifier's head applied to every position of its last features. Shape: (batch, positions, 10)."""
    if final.ndim == 3:
        positions = final[:, -(GRID**2) :]
        return model.forward_head(positions.reshape(-1, 1, final.shape[-1])).unflatten(0, positions.shape[:2])
    positions = final.flatten(2).transpose(1, 2)
    return model.forward_head(positions.reshape(-1, final.shape[1], 1, 1)).unflatten(0, positions.shape[:2])


def _local_loss(logits: Tensor, masks: Tensor, onehot: Tensor) -> Tensor:
    """Cross-entropy of every position with the digit that it lies on, or with undecided where there is none."""
    covered = F.avg_pool2d(masks, SIZE // GRID).flatten(2).transpose(1, 2) > 0.08
    targets = torch.einsum("bnk,bkc->bnc", covered.float(), onehot)
    count = targets.sum(-1, keepdim=True)
    targets = torch.where(count > 0, targets / count.clamp(min=1), torch.full_like(targets, 1 / NUM_CLASSES))
    loss = -(targets * logits.log_softmax(-1)).sum(-1)
    on_digit = (count[..., 0] > 0).float()
    return (loss * on_digit).sum() / on_digit.sum().clamp(min=1) + 0.2 * (loss * (1 - on_digit)).mean()


def _normalised(model: nn.Module, images: Tensor) -> Tensor:
    config = resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (images - mean) / std


@torch.no_grad()
def measure(probabilities: Callable[[Tensor], Tensor], *, split: str = "test", count: int = 512) -> dict[str, float]:
    """Measures a demo classifier on ``count`` scenes of each kind.

    Args:
        probabilities: maps images (batch, 3, 64, 64) in [0, 1] to class probabilities (batch, 10).

    Returns:
        ``accuracy`` on one digit; ``first``, ``second``: mean probability of either digit of two, and
        ``both_on_top``: share of those scenes where they are the two likeliest; ``largest_on_clutter``: mean
        probability of the likeliest class where there is no digit (0.1 is undecided).
    """
    images, _, onehot = _scenes(split, EVALUATION_SEED, 0, (count, count, count))
    found = torch.cat([probabilities(chunk) for chunk in images.split(128)])
    none, one, two = found.split(count)
    labels = onehot.argmax(-1)
    first, second = (two.gather(1, labels[2 * count :, k : k + 1]).squeeze(1) for k in range(2))
    on_top = two.topk(2).values[:, 1] <= torch.minimum(first, second)
    return {
        "accuracy": (one.argmax(1) == labels[count : 2 * count, 0]).float().mean().item(),
        "first": first.mean().item(),
        "second": second.mean().item(),
        "both_on_top": on_top.float().mean().item(),
        "largest_on_clutter": none.amax(1).mean().item(),
    }


def train_demo_classifier(
    name: Literal["vit", "convnext"],
    output: Path,
    *,
    steps: int | None = None,
    batch_size: int = 64,
    learning_rate: float = 4e-3,
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, float]:
    """Trains a demo classifier and writes its weights in half precision.

    Args:
        name: which of the two.
        output: safetensors file to write.
        steps: optimiser steps; the default is the one that the shipped weights were made with.
        batch_size: scenes per step.
        learning_rate: peak of Muon's learning rate.
        seed: of weights, scenes and erased pixels.
        threads: CPU threads, all by default; the weights' last digits depend on their number (shipped: 1).
    """
    console = Console()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    architecture, options = DEMO_CLASSIFIERS[name]
    model = timm.create_model(architecture, pretrained=False, **options)
    steps = STEPS[name] if steps is None else steps
    _initialise(model, generator)
    teacher = load_demo_classifier("convnext") if name == "vit" else None
    projections = nn.ModuleList()
    if teacher is not None:
        projections.extend(nn.Linear(model.embed_dim, channels) for channels in teacher.feature_channels[1:])
    optimizer = Muon([*model.parameters(), *projections.parameters()], lr=learning_rate, weight_decay=0.05)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"training {name}", total=steps)
        for step in range(steps):
            done = step / steps
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min((done + 1 / steps) / 0.05, 0.5 + 0.5 * math.cos(math.pi * done))
            none, two = (batch_size // 10, batch_size // 4) if done > 0.15 else (0, 0)
            counts = (none, batch_size - none - two, two)
            images, masks, onehot = _scenes("train", seed, step * batch_size, counts, clutter=min(done / 0.3, 1))
            left = torch.ones(batch_size, 2)
            local = 1 - done / 0.5
            if local <= 0:
                rows = torch.randperm(batch_size, generator=generator)[: batch_size // 3]
                images[rows], left[rows] = _erase(images[rows], masks[rows], generator)
            inputs = _normalised(model, images)
            if teacher is None:
                final, alike = model.forward_features(inputs), torch.zeros(())
            else:
                final, tokens = model.forward_intermediates(inputs, indices=[0, 2, 3], output_fmt="NLC")
                alike = _feature_loss(projections, tokens, teacher, images)
            loss = F.cross_entropy(model.forward_head(final), _targets(onehot, left))
            total = loss + 2 * (1 - done) * alike
            if local > 0:
                total = total + local * _local_loss(_local_logits(model, final), masks, onehot)
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, advance=1, description=f"training {name}, loss {loss.item():.3f}")
            if (step + 1) % 100 == 0:
                model.eval()
                found = measure(lambda x: model(_normalised(model, x)).softmax(1), split="val", count=128)
                model.train()
                progress.console.print(f"step {step + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()))

    weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, output)
    model.load_state_dict(weights)
    model.eval()
    found = measure(lambda x: model(_normalised(model, x)).softmax(1))
    for key, value in found.items():
        console.print(f"test {key}: {value:.4f}")
    console.print(f"{output}: {output.stat().st_size} bytes, sha256 {hashlib.sha256(output.read_bytes()).hexdigest()}")
    return found


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(train_demo_classifier)
