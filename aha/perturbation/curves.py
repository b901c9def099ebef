"""Hard deletion and insertion curves: every perturbed image once, in chunks of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.perturbation.ranking import pixel_ranks
from aha.perturbation.references import Reference, is_constant, make_reference


class Curves(NamedTuple):
    """Scores along two perturbation paths.

    Attributes:
        fractions: share of pixels deleted (or inserted), ``(K,)``.
        deletion: score with the most important pixels deleted, ``(batch, K)``.
        insertion: score with only the most important pixels shown, ``(batch, K)``.
        targets: classes scored, ``(batch,)``.
    """

    fractions: Tensor
    deletion: Tensor
    insertion: Tensor
    targets: Tensor


@torch.no_grad()
def deletion_insertion_curves(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Tensor | None = None,
    *,
    counts: Sequence[int],
    deletion_reference: Reference = "mean",
    insertion_reference: Reference = "mean",
    score: Literal["probability", "accuracy"] = "probability",
    chunk_size: int = 64,
    clean_logits: Tensor | None = None,
) -> Curves:
    """Score images whose pixels are deleted, or inserted, in the order of a map.

    Where ``counts`` contains no pixel or all pixels, the image is the clean one or the reference: those are
    classified once and shared by both curves, a constant reference once for the whole batch.

    Args:
        classifier: the explained model.
        images: ``(batch, 3, H, W)`` in [0, 1].
        maps: ``(batch, 1, H, W)``, finite.
        targets: ``(batch,)``; default: the predicted class of the clean image.
        counts: numbers of pixels, increasing; see :func:`~aha.perturbation.ranking.fractions_to_counts`.
        deletion_reference: replaces deleted pixels.
        insertion_reference: what insertion starts from.
        score: probability of the target, or whether it is the arg max (1 or 0).
        chunk_size: images per classifier forward.
        clean_logits: ``(batch, classes)`` of the clean images, where already at hand.
    """
    batch, _, height, width = images.shape
    pixels = height * width
    device = images.device
    ranks = pixel_ranks(maps.to(device))
    if clean_logits is None:
        clean_logits = torch.cat([classifier(chunk) for chunk in images.split(chunk_size)])
    targets = clean_logits.argmax(-1) if targets is None else targets.to(device)

    def value(logits: Tensor, of: Tensor) -> Tensor:
        if score == "accuracy":
            return (logits.argmax(-1) == of).float()
        return classifier.target_probability(logits, of)

    references: dict[str, tuple[Tensor, Tensor]] = {}
    interior = [k for k, count in enumerate(counts) if 0 < count < pixels]

    def reference(kind: Reference) -> tuple[Tensor, Tensor]:
        """The reference images and their scores."""
        if kind not in references:
            image = make_reference(images, kind, data_mean=classifier.mean)
            if len(interior) == len(counts):
                scores = clean_logits.new_zeros(batch)
            elif is_constant(kind):
                scores = value(classifier(image[:1]).expand(batch, -1), targets)
            else:
                scores = torch.cat(
                    [
                        value(classifier(i), t)
                        for i, t in zip(image.split(chunk_size), targets.split(chunk_size), strict=True)
                    ]
                )
            references[kind] = image, scores
        return references[kind]

    clean = value(clean_logits, targets)
    deleted, inserted = reference(deletion_reference), reference(insertion_reference)
    empty = [count == 0 for count in counts]
    curves = torch.stack(
        [
            torch.stack([clean if e else deleted[1] for e in empty], 1),
            torch.stack([inserted[1] if e else clean for e in empty], 1),
        ]
    )
    # One flat list of (curve, sample, point), so that chunks are full whatever the batch.
    jobs = torch.cartesian_prod(torch.arange(2), torch.arange(batch), torch.tensor(interior, dtype=torch.long)).view(
        -1, 3
    )
    counts_tensor = torch.tensor(list(counts), device=device)
    for chunk in jobs.to(device).split(chunk_size):
        curve, sample, point = chunk.unbind(1)
        first = (ranks[sample] < counts_tensor[point, None]).view(-1, 1, height, width)
        is_insertion = curve.view(-1, 1, 1, 1).bool()
        picture = images[sample]
        if deletion_reference == insertion_reference:
            fill = deleted[0][sample]
        else:
            fill = torch.where(is_insertion, inserted[0][sample], deleted[0][sample])
        # Deletion hides the first pixels, insertion shows only them.
        perturbed = torch.where(first ^ is_insertion, fill, picture)
        curves[curve, sample, point] = value(classifier(perturbed), targets[sample]).to(curves.dtype)
    return Curves(counts_tensor / pixels, curves[0], curves[1], targets)
