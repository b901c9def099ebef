"""CDAM: which tokens enter the last attention with a value that the class's gradient favours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from aha.baselines.geometry import Upsample, cannot_serve, channel_dim, check_upsample, full_precision, scores_to_map
from aha.baselines.traceless import differentiable
from aha.classifier import FrozenClassifier
from aha.explainer import Explainer, as_images

Variant = Literal["vanilla", "concept", "smooth", "integrated"]


class CDAM(Explainer):
    """Class-discriminative attention maps (Brocki et al., arXiv 2312.02364).

    S_i = Σ_j T_ij·∂f/∂T_ij with T the tokens that enter the last attention (the last block's norm1 output) and f the
    class logit; the gradient runs through the attention only, not through the skip path. Cost: one forward pass and
    the backward pass of one block; nothing before it is recorded.

    Any model whose last block is of the form x + attn(norm1(x)): ViTs with any prefix tokens and pooling, distilled,
    EVA, BEiT, DINO, class attention, PVT, Swin. ``smooth`` and ``integrated`` run the last block many times and need
    a model that ends in ``norm`` and ``forward_head`` behind its last block (ViT, EVA, BEiT, Swin).

    Args:
        classifier: the explained model.
        variant: ``"vanilla"``; ``"concept"``: f = ⟨z(x), v⟩, z the pooled latent before the class layer and v its mean
            over ``exemplars`` (targets are ignored); ``"smooth"``: mean over noise on the last block's input,
            σ = 0.05·(max − min) of each image's tokens; ``"integrated"``: mean over k = 1…runs−1 of S at
            (k/runs)·input.
        exemplars: images of a concept, ``(count, 3, H, W)``, for ``"concept"``.
        runs: noise draws or integration steps.
        noise: σ as a share of the range, for ``"smooth"``.
        seed: of the noise, which is drawn once and shared by all images.
        upsample: ``"nearest"`` as in the paper, or ``"bilinear"``.
        chunk_size: token sets per run of the last block, for ``"smooth"`` and ``"integrated"``.

    Raises:
        ValueError: unknown variant, exemplars missing; at the call, a model that can't be served.
    """

    name = "cdam"

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        variant: Variant = "vanilla",
        exemplars: Tensor | None = None,
        runs: int = 50,
        noise: float = 0.05,
        seed: int = 0,
        upsample: Upsample = "nearest",
        chunk_size: int = 64,
    ) -> None:
        super().__init__(classifier)
        if variant not in get_args(Variant):
            msg = f"variant must be one of {', '.join(get_args(Variant))}, got {variant!r}."
            raise ValueError(msg)
        if (variant == "concept") != (exemplars is not None):
            msg = f"exemplars=… (images of the concept) go with variant='concept', got variant={variant!r}."
            raise ValueError(msg)
        if runs < 2 or noise < 0 or chunk_size < 1:
            msg = f"CDAM needs runs ≥ 2, noise ≥ 0 and chunk_size ≥ 1, got {runs}, {noise}, {chunk_size}."
            raise ValueError(msg)
        self.variant = variant
        self.name = "cdam" if variant == "vanilla" else f"cdam_{variant}"
        self.runs = runs
        self.noise = noise
        self.seed = seed
        self.upsample = check_upsample(upsample)
        self.chunk_size = chunk_size
        self.concept = None if exemplars is None else self._latent_of(exemplars)

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        size = (images.shape[-2], images.shape[-1])
        with differentiable(self.classifier, images) as (classifier, images):
            name, block = self._last_block(classifier)
            if self.variant in ("smooth", "integrated"):
                scores = self._averaged(classifier, block, images, targets)
            else:
                with torch.no_grad(), _tokens_entering(classifier, block) as entering:
                    if self.concept is None:
                        logits = classifier.forward(images)
                        value = logits.gather(1, classifier.resolve_targets(targets, logits)[:, None])
                    else:
                        value = _latent(classifier, images) @ self.concept.to(images)
                scores = _weighted(entering, value, block)
            if len(scores) != len(images):
                raise cannot_serve(
                    classifier, "CDAM", f"{name} works on {len(scores)} windows of {len(images)} images."
                )
            return scores_to_map(classifier, "CDAM", scores, size, upsample=self.upsample)

    def _averaged(
        self, classifier: FrozenClassifier, block: nn.Module, images: Tensor, targets: Tensor | None
    ) -> Tensor:
        """Mean of S over perturbed inputs of the last block, which alone is run again."""
        caught: list[tuple] = []
        handle = block.register_forward_pre_hook(
            lambda _m, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
        )
        try:
            with torch.no_grad():
                logits = classifier.forward(images)
        finally:
            handle.remove()
        targets = classifier.resolve_targets(targets, logits)
        (hidden, *args), kwargs = caught[-1]

        def tail(tokens: Tensor) -> Tensor:
            return classifier.model.forward_head(classifier.model.norm(block(tokens, *args, **kwargs)))

        self._check_tail(classifier, tail, hidden, logits)
        total = 0
        for steps in torch.arange(1, self._count + 1).split(max(1, self.chunk_size // len(images))):
            tokens = torch.cat([self._perturbed(hidden, int(step)) for step in steps])
            repeated = targets.repeat(len(steps))
            with torch.no_grad(), _tokens_entering(classifier, block) as entering:
                value = tail(tokens).gather(1, repeated[:, None])
            total = total + _weighted(entering, value, block).unflatten(0, (len(steps), -1)).sum(0)
        return total / self._count

    @property
    def _count(self) -> int:
        return self.runs if self.variant == "smooth" else self.runs - 1

    def _perturbed(self, hidden: Tensor, step: int) -> Tensor:
        if self.variant == "integrated":
            return hidden * (step / self.runs)
        generator = torch.Generator().manual_seed(self.seed * 100_003 + step)
        noise = torch.randn(hidden.shape[1:], generator=generator, dtype=torch.float64).to(hidden)
        flat = hidden.flatten(1)
        spread = (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (hidden.ndim - 1))
        return hidden + self.noise * spread * noise

    def _check_tail(self, classifier: FrozenClassifier, tail, hidden: Tensor, logits: Tensor) -> None:  # noqa: ANN001
        try:
            # Twice the batch: what else enters the last block must not depend on the batch.
            with torch.no_grad():
                again, twice = tail(torch.cat([hidden, hidden])), logits.repeat(2, 1)
            same = again.shape == twice.shape and torch.allclose(again.float(), twice.float(), rtol=1e-2, atol=1e-2)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError):
            same = False
        if not same:
            reason = (
                f"variant {self.variant!r} needs a model that ends in norm and forward_head behind its last block, "
                f"unlike {type(classifier.model).__name__}; variant 'vanilla' works."
            )
            raise cannot_serve(classifier, "CDAM", reason)

    def _last_block(self, classifier: FrozenClassifier) -> tuple[str, nn.Module]:
        blocks = [
            (name, module)
            for name, module in classifier.model.named_modules()
            if all(isinstance(getattr(module, key, None), nn.Module) for key in ("norm1", "attn"))
        ]
        if not blocks or hasattr(classifier.model, "unroll"):
            kind = type(classifier.model).__name__
            reason = f"{kind} has no last block of the form x + attn(norm1(x)) with tokens in image order."
            raise cannot_serve(classifier, "CDAM", reason)
        return blocks[-1]

    def _latent_of(self, exemplars: Tensor) -> Tensor:
        images = as_images(exemplars, self.device)
        with differentiable(self.classifier, images) as (classifier, images), torch.no_grad():
            return torch.cat([_latent(classifier, chunk) for chunk in images.split(self.chunk_size)]).mean(0)


def _latent(classifier: FrozenClassifier, images: Tensor) -> Tensor:
    """z(x): the pooled latent before the class layer, ``(batch, dimension)``."""
    model = classifier.model
    if not hasattr(model, "forward_head"):
        raise cannot_serve(classifier, "CDAM", "variant 'concept' needs timm's forward_features and forward_head.")
    return model.forward_head(model.forward_features(classifier.normalize(images)), pre_logits=True)


@contextmanager
def _tokens_entering(classifier: FrozenClassifier, block: nn.Module) -> Iterator[list[Tensor]]:
    """Record the tokens that enter the block's attention, as a leaf; the graph starts there, until exit."""
    entering: list[Tensor] = []
    attended: list[bool] = []

    def start(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        if attended:
            raise cannot_serve(classifier, "CDAM", "its blocks normalise after the attention (post-norm), not before.")
        torch.set_grad_enabled(True)
        entering.append(output.detach().requires_grad_())
        # A view, because torch's FLOP counter can't follow modules that return leaves.
        return entering[-1].view_as(output)

    handles = [
        block.norm1.register_forward_hook(start),
        block.attn.register_forward_hook(lambda *_: attended.append(True)),
    ]
    try:
        yield entering
    finally:
        for handle in handles:
            handle.remove()


def _weighted(entering: list[Tensor], value: Tensor, block: nn.Module) -> Tensor:
    """S = Σ_j T_ij·∂value/∂T_ij, ``(batch, tokens)`` or ``(batch, h, w)``."""
    tokens = entering[-1]
    (gradient,) = torch.autograd.grad(value.sum(), tokens)
    product = full_precision(tokens.detach()) * full_precision(gradient)
    return product.sum(channel_dim(block.norm1, tokens))
