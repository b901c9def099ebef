"""The attribution head: features of several depths and a class in, one signed map at image resolution out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from kornia.color import rgb_to_grayscale
from kornia.filters import guided_blur
from torch import Tensor, nn

Upsampling = Literal["nearest", "bilinear"]
FeatureNorm = Literal["position", "image"]
FINEST_STRIDE = 4
EMBEDDING_DIM = 128
EDGE_VARIANCE = 3e-3  # luminance variance above which a window holds an edge


class AttributionHead(nn.Module):
    """A light dense decoder in the manner of DPT (Ranftl et al. 2021, arXiv 2103.13413), conditioned on a class.

    Levels run from the coarsest grid to the finest. At each, the features of that grid are projected, gated by the
    projected class vector and added to what comes up from below; the last two levels also see the image itself, so
    that maps can follow object edges. A plain transformer's single grid gets levels of twice the resolution on top,
    down to a stride of 4 (two at least). The last layer starts near zero (N(0, 0.01), bias 0: arXiv 2604.05819,
    released code) and nothing squashes the output.

    Args:
        feature_channels: channels of each depth, shallow to deep.
        feature_strides: image side over grid side of each depth.
        class_dim: dimension of the class vectors; 0, without ``num_classes``: the head itself knows no classes.
        num_classes: given for a learned embedding of the classes in place of class vectors, else None.
        width: channels of the coarse levels; the one size option.
        upsampling: how coarse maps reach finer grids. ``"nearest"`` keeps the edges of the tokens, what a patch model
            sees whole or not at all; ``"bilinear"`` is smoother.
        feature_norm: how features are normalised. ``"position"``: the channels of each position on their own (layer
            norm). ``"image"``: all positions together, which keeps where a feature map is strong.
        edges: pass the map through :func:`follow_edges`.

    Shape:
        - features: each ``(batch, channels, h, w)``
        - targets: ``(batch,)``
        - images: ``(batch, 3, H, W)`` in [0, 1]
        - class_vectors: ``(batch, class_dim)``, or None with a learned embedding or no classes
        - evidence: ``(batch, 1, h, w)``, added to the output after standardisation, or None
        - output: ``(batch, 1, H, W)``, signed
    """

    def __init__(
        self,
        feature_channels: Sequence[int],
        feature_strides: Sequence[int],
        *,
        class_dim: int,
        num_classes: int | None = None,
        width: int = 96,
        upsampling: Upsampling = "nearest",
        feature_norm: FeatureNorm = "position",
        edges: bool = False,
    ) -> None:
        super().__init__()
        if feature_norm not in ("position", "image"):
            msg = f"feature_norm must be 'position' or 'image', got {feature_norm!r}."
            raise ValueError(msg)
        self.edges = edges
        if upsampling not in ("nearest", "bilinear"):
            msg = f"upsampling must be 'nearest' or 'bilinear', got {upsampling!r}."
            raise ValueError(msg)
        self.upsampling = upsampling
        if width < 8 or width % 4:
            msg = f"width must be a multiple of 4, at least 8, got {width}."
            raise ValueError(msg)
        self.embedding = None if num_classes is None else nn.Embedding(num_classes, EMBEDDING_DIM)
        dim = class_dim if num_classes is None else EMBEDDING_DIM
        strides = sorted(set(feature_strides), reverse=True)
        if len(strides) == 1:
            strides += [strides[0] / 2, strides[0] / 4]
        while strides[-1] > FINEST_STRIDE:
            strides.append(strides[-1] / 2)
        widths = [width] * (len(strides) - 2) + [width // 2, width // 4]
        self.members = [[i for i, s in enumerate(feature_strides) if s == stride] for stride in strides]
        self.levels = nn.ModuleList(
            Level(
                below,
                here,
                [feature_channels[i] for i in members],
                dim,
                stem=depth >= len(strides) - 2,
                upsampling=upsampling,
                feature_norm=feature_norm,
            )
            for depth, (below, here, members) in enumerate(zip([1, *widths], widths, self.members, strict=False))
        )
        self.output = nn.Conv2d(widths[-1], 1, 3, padding=1)
        nn.init.normal_(self.output.weight, std=0.01)
        nn.init.zeros_(self.output.bias)

    def forward(
        self,
        features: Sequence[Tensor],
        targets: Tensor,
        images: Tensor,
        *,
        class_vectors: Tensor | None = None,
        evidence: Tensor | None = None,
    ) -> Tensor:
        # The classifier may run in another precision than its head.
        dtype = self.output.weight.dtype
        features, images = [feature.to(dtype) for feature in features], images.to(dtype)
        evidence = None if evidence is None else evidence.to(dtype)
        vectors = self.embedding(targets) if self.embedding is not None else class_vectors
        if vectors is not None:
            vectors = F.normalize(vectors.to(dtype), dim=-1) * vectors.shape[-1] ** 0.5
        size = images.shape[-2:]
        evidence = None if evidence is None else standardize(evidence)
        x = evidence
        for level, members in zip(self.levels, self.members, strict=True):
            here = [features[i] for i in members]
            grid = (
                here[0].shape[-2:]
                if here
                else [min(2 * side, full) for side, full in zip(x.shape[-2:], size, strict=True)]
            )
            x = level(x, here, vectors, images, grid)
        maps = resize(self.output(x), size, self.upsampling)
        maps = maps if evidence is None else maps + resize(evidence, size, self.upsampling)
        return follow_edges(maps, images) if self.edges else maps


class Level(nn.Module):
    """One resolution: what comes from below, the features of this grid, and the image where ``stem`` is set."""

    def __init__(
        self,
        below: int,
        width: int,
        channels: Sequence[int],
        class_dim: int,
        *,
        stem: bool,
        upsampling: Upsampling,
        feature_norm: FeatureNorm,
    ) -> None:
        super().__init__()
        self.upsampling = upsampling
        self.below = nn.Conv2d(below, width, 1)
        norms = [ChannelNorm(c) if feature_norm == "position" else nn.GroupNorm(1, c) for c in channels]
        self.project = nn.ModuleList(
            nn.Sequential(norm, nn.Conv2d(c, width, 1)) for norm, c in zip(norms, channels, strict=True)
        )
        self.gate = nn.ModuleList(nn.Linear(class_dim, width) for _ in channels if class_dim)
        self.stem = (
            nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1))
            if stem
            else None
        )
        self.norm = ChannelNorm(width)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(
        self, x: Tensor | None, features: Sequence[Tensor], vectors: Tensor | None, images: Tensor, grid: Sequence[int]
    ) -> Tensor:
        y = 0 if x is None else resize(self.below(x), grid, self.upsampling)
        for i, (feature, project) in enumerate(zip(features, self.project, strict=True)):
            projected = project(feature)
            y = y + (projected if vectors is None else projected * self.gate[i](vectors)[:, :, None, None])
        if self.stem is not None:
            y = y + self.stem(resize(images - 0.5, grid, "area"))
        return y + self.out(F.gelu(self.mix(self.norm(y))))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an NCHW map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def standardize(maps: Tensor) -> Tensor:
    """Zero mean and unit deviation per sample over everything but the batch, float32; constant maps become zero."""
    flat = maps.flatten(1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    flat = flat - flat.mean(1, keepdim=True)
    return (flat / flat.std(1, unbiased=False, keepdim=True).clamp_min(1e-6)).view_as(maps)


def follow_edges(maps: Tensor, images: Tensor) -> Tensor:
    """Maps ``(batch, 1, H, W)`` whose values spread inside objects, up to the edges of images ``(batch, 3, H, W)``.

    A guided filter (He et al. 2013, doi 10.1109/TPAMI.2012.213) with the luminance as guide, in windows of three
    eighths of the shorter side; its statistics are taken on 64 to 127 pixels of the shorter side.
    """
    side = min(images.shape[-2:])
    guide, window, step = rgb_to_grayscale(images), 2 * (3 * side // 16) + 1, max(side // 64, 1)
    return guided_blur(guide, maps, window, EDGE_VARIANCE, subsample=step, separable=True).to(maps.dtype)


def resize(x: Tensor, size: Sequence[int], mode: Literal["nearest", "bilinear", "area"]) -> Tensor:
    """Resampling to ``(height, width)``; "area" is the one to make pictures smaller with."""
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    if mode == "area":
        return F.adaptive_avg_pool2d(x, tuple(size))
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=False if mode == "bilinear" else None)
