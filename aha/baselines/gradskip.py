"""GradSkip: relevance by attention, gradients and the skip connection, from one forward and one backward pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor

from aha.baselines.capture import BlockRecord, capture_attention
from aha.baselines.completeness import complete_gradients
from aha.baselines.geometry import Upsample, check_upsample, full_precision, resize
from aha.baselines.propagation import TokenLayout, layout_of, propagate, regrid
from aha.baselines.traceless import differentiable
from aha.classifier import FrozenClassifier
from aha.explainer import Explainer


class GradSkip(Explainer):
    """Gradient- and skip-aware attention relevance (GradSkip, arXiv 2607.10365).

    From the last block to the first, R ← β·ŴᵀR + (1 − β)·R, where Ŵ is the attention weighted by head importance,
    gradient magnitude and embedding magnitude, and β weighs the attention path against the skip path. The paper
    gives this structure and α = 0.5; what it leaves open is inferred here and marked below. Maps are non-negative.

    Plain ViTs of any kind and pooling, key-reduced (PVT v2) and windowed (Swin) attention; for segmentation models
    wrap the model in :class:`~aha.baselines.segmentation.MaskedLogits`.

    Args:
        classifier: the explained model.
        alpha: weight of the gradient flow against the Gini coefficient in a head's importance, 0…1.
        threshold: θ: heads whose flow is below θ · the largest are dropped (inferred; 0 = none).
        flow: the gradient's part that counts: ``"positive"`` max(G, 0), what speaks for the class (inferred: on the
            demo it is more faithful and tells two digits in a picture apart in 87 % of cases, not 72 %), or
            ``"absolute"`` |G|, the paper's "gradient magnitude" read literally.
        gate: β per image and block (``"block"``) or per token (``"token"``) (inferred).
        embedding_norm: weight keys by the L2 norm of the block's input tokens (which tokens: inferred).
        rescale: complete gradients (the rule: inferred, see :func:`~aha.baselines.completeness.complete_gradients`).
        upsample: ``"nearest"``, more faithful where the model itself sees patches, or ``"bilinear"``, smoother.

    Raises:
        ValueError: at the call, for models without readable attention; here for options out of range.
    """

    name = "gradskip"

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        alpha: float = 0.5,
        threshold: float = 0.1,
        flow: Literal["positive", "absolute"] = "positive",
        gate: Literal["block", "token"] = "block",
        embedding_norm: bool = True,
        rescale: bool = True,
        upsample: Upsample = "nearest",
    ) -> None:
        super().__init__(classifier)
        for key, value in (("alpha", alpha), ("threshold", threshold)):
            if not 0 <= value <= 1:
                msg = f"{key} must lie in [0, 1], got {value}."
                raise ValueError(msg)
        for key, value, known in (("flow", flow, ("positive", "absolute")), ("gate", gate, ("block", "token"))):
            if value not in known:
                msg = f"{key} must be one of {', '.join(known)}, got {value!r}."
                raise ValueError(msg)
        self.alpha = alpha
        self.threshold = threshold
        self.flow = flow
        self.gate = gate
        self.embedding_norm = embedding_norm
        self.rescale = rescale
        self.upsample = check_upsample(upsample)

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        size = (images.shape[-2], images.shape[-1])
        with ExitStack() as stack:
            classifier, images = stack.enter_context(differentiable(self.classifier, images))
            if self.rescale:
                stack.enter_context(complete_gradients(classifier.model))
            with capture_attention(classifier, "GradSkip", detach=self.rescale) as records:
                logits = classifier.forward(images)
            targets = classifier.resolve_targets(targets, logits)
            score = logits.gather(1, targets[:, None]).sum()
            inputs = [tensor for record in records for tensor in (record.attention, record.middle)]
            inputs.append(records[-1].exit)
            grads = torch.autograd.grad(score, inputs, allow_unused=True)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            values = [full_precision(t.detach()) for t in inputs]
            slopes = [
                torch.zeros_like(v) if g is None else full_precision(g) for v, g in zip(values, grads, strict=True)
            ]
            relevance = self._start(values[-1], slopes[-1])
            behind: TokenLayout | None = None
            for index in reversed(range(len(records))):
                layout = layout_of(classifier, "GradSkip", records[index], len(images), size)
                if behind is not None:
                    relevance = regrid(relevance, behind, layout)
                maps, middle = values[2 * index : 2 * index + 2]
                relevance = self._step(
                    relevance, records[index], layout, maps, middle, *slopes[2 * index : 2 * index + 2]
                )
                behind = layout
            patches = relevance[:, classifier.num_prefix_tokens :].unflatten(1, behind.grid)
            return resize(patches[:, None], size, self.upsample)

    @staticmethod
    def _start(tokens: Tensor, gradient: Tensor) -> Tensor:
        """R at the last block's output: |gradient · token|, summing to 1.

        Where a CLS token is classified, no other token has a gradient and this is its unit vector, as in the paper;
        for pooled patches it is inferred.
        """
        share = (tokens * gradient).flatten(1, -2).sum(-1).abs()
        total = share.sum(1, keepdim=True)
        return torch.where(total > 0, share / total, 1 / share.shape[1])

    def _step(
        self, relevance: Tensor, record: BlockRecord, layout: TokenLayout, maps: Tensor, middle: Tensor,
        map_gradient: Tensor, middle_gradient: Tensor,
    ) -> Tensor:  # fmt: skip
        batch = len(relevance)
        strength = map_gradient.clamp(min=0) if self.flow == "positive" else map_gradient.abs()
        flow = maps * strength
        heads = self.head_weights(flow.sum((-2, -1)).view(batch, -1, maps.shape[1]).sum(1), maps, batch)
        per_map = heads.repeat_interleave(len(maps) // batch, 0)
        weights = torch.einsum("bh,bhqk->bqk", per_map, flow)
        entry = full_precision(record.entry.detach()).reshape(batch, layout.tokens, -1)
        middle, slope = (t.reshape(batch, layout.tokens, -1) for t in (middle, middle_gradient))
        magnitude = entry.norm(dim=-1) if self.embedding_norm else entry.new_ones(batch, layout.tokens)
        main, skip = (slope * (middle - entry)).abs(), (slope * entry).abs()
        dims = (-2, -1) if self.gate == "block" else (-1,)
        main, skip = main.sum(dims).view(batch, -1), skip.sum(dims).view(batch, -1)
        beta = torch.where(main > 0, main / (main + skip), 0)
        return propagate(relevance, weights, beta, layout, magnitude)

    def head_weights(self, flow: Tensor, maps: Tensor, batch: int) -> Tensor:
        """ω = α·g̃ + (1 − α)·s̃: thresholded gradient flow and mean Gini of the attention rows, each summing to 1.

        Args:
            flow: g, ``(batch, heads)``, non-negative.
            maps: attention ``(batch · windows, heads, queries, keys)``.
            batch: number of images.

        Returns:
            ``(batch, heads)``, summing to 1.
        """
        flow = torch.where(flow >= self.threshold * flow.amax(1, keepdim=True), flow, 0)
        if self.alpha == 1:
            return _normalised(flow)
        sparsity = gini(maps).mean(-1).view(batch, -1, maps.shape[1]).mean(1)
        return self.alpha * _normalised(flow) + (1 - self.alpha) * _normalised(sparsity)


def gini(values: Tensor) -> Tensor:
    """Gini coefficient over the last dimension, Σ_i (2i − n − 1)·a_(i) / (n·Σa), i = 1…n ascending; 0 for all zeros.

    Args:
        values: ``(…, n)``, non-negative.

    Returns:
        ``(…)``, from 0 (all equal) to 1 − 1/n (one value holds everything).
    """
    count = values.shape[-1]
    # On the CPU numpy sorts some fifty times faster than torch.
    ordered = torch.from_numpy(_numpy_sorted(values)) if values.device.type == "cpu" else values.sort(-1).values
    ranks = 2 * torch.arange(1, count + 1, device=values.device, dtype=values.dtype) - count - 1
    total = values.sum(-1)
    return torch.where(total > 0, (ordered @ ranks) / (count * total), 0)


def _numpy_sorted(values: Tensor):  # noqa: ANN202
    array = values.detach().contiguous().numpy().copy()
    array.sort(-1)
    return array


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total, 1 / weights.shape[1])
