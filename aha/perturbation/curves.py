"""Hard deletion and insertion curves: every perturbed image once, in chunks of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.perturbation.chunks import automatic_chunk_size, lay_out
from aha.perturbation.ranking import pixel_ranks
from aha.perturbation.references import Reference, is_constant, make_reference

Score = Literal["probability", "accuracy"]


class Curves(NamedTuple):
    """Scores along two perturbation paths.

    Attributes:
        fractions: share of pixels deleted, ``(K,)``; the same for insertion unless its counts were given apart.
        deletion: score with the most important pixels deleted, ``(batch, K)``.
        insertion: score with only the most important pixels shown, ``(batch, K)``.
        targets: classes scored, ``(batch,)``.
        forwards: images that went through the classifier.
    """

    fractions: Tensor
    deletion: Tensor
    insertion: Tensor
    targets: Tensor
    forwards: int = 0


@torch.no_grad()
def deletion_insertion_curves(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Tensor | None = None,
    *,
    counts: Sequence[int],
    insertion_counts: Sequence[int] | None = None,
    deletion_reference: Reference = "mean",
    insertion_reference: Reference = "mean",
    score: Score = "probability",
    chunk_size: int | None = None,
    clean_logits: Tensor | None = None,
    constant_logits: dict[tuple, Tensor] | None = None,
) -> Curves:
    """Score images whose pixels are deleted, or inserted, in the order of a map.

    No image is classified twice: where counts contain no pixel or all pixels, the image is the clean one or the
    reference, classified once for both curves (a constant reference once for the whole batch), and repeated counts
    (small images) share one image.

    Args:
        classifier: the explained model.
        images: ``(batch, 3, H, W)`` in [0, 1].
        maps: ``(batch, 1, H, W)``, finite.
        targets: ``(batch,)``; default: the predicted class of the clean image.
        counts: numbers of pixels deleted; see :func:`~aha.perturbation.ranking.fractions_to_counts`. Empty for no
            deletion curve.
        insertion_counts: numbers of pixels inserted; default: the same. Empty for no insertion curve.
        deletion_reference: replaces deleted pixels.
        insertion_reference: what insertion starts from.
        score: probability of the target, or whether the image is classified as the target (1 or 0): arg max, for a
            sigmoid link a probability above ½ (inferred: no source states it).
        chunk_size: images per classifier forward; None: :func:`~aha.perturbation.chunks.automatic_chunk_size`.
        clean_logits: ``(batch, classes)`` of the clean images, where already at hand.
        constant_logits: a dictionary kept between calls, so that constant references are classified once in a run.
    """
    batch, _, height, width = images.shape
    if tuple(maps.shape) != (batch, 1, height, width):
        msg = f"maps must be ({batch}, 1, {height}, {width}) as the images, got {tuple(maps.shape)}."
        raise ValueError(msg)
    pixels = height * width
    device = images.device
    forwards = 0

    def classify(pictures: Tensor) -> Tensor:
        nonlocal forwards
        forwards += len(pictures)
        return classifier(pictures)

    def value(logits: Tensor, of: Tensor) -> Tensor:
        if score == "probability":
            return classifier.target_probability(logits, of)
        if classifier.link == "sigmoid":
            return (classifier.target_probability(logits, of) > 0.5).float()
        return (logits.argmax(-1) == of).float()

    counts = [int(c) for c in counts]
    insertion_counts = counts if insertion_counts is None else [int(c) for c in insertion_counts]
    if batch == 0:
        empty = [images.new_zeros(0, len(c), dtype=torch.float32) for c in (counts, insertion_counts)]
        none = torch.zeros(0, dtype=torch.long, device=device)
        return Curves(torch.tensor(counts, device=device) / pixels, *empty, none)
    chunk_size = automatic_chunk_size(classifier, images) if chunk_size is None else chunk_size
    images = lay_out(images)
    needs_clean = targets is None or 0 in counts or pixels in insertion_counts
    if clean_logits is None and needs_clean:
        clean_logits = torch.cat([classify(chunk) for chunk in images.split(chunk_size)])
    targets = clean_logits.argmax(-1) if targets is None else targets.to(device)
    kinds = (deletion_reference, insertion_reference)
    references = {kind: make_reference(images, kind, data_mean=classifier.mean) for kind in set(kinds)}

    # What is asked of each curve: scores of the clean image, of the reference, or of a mixture.
    wanted = (sorted(set(counts)), sorted(set(insertion_counts)))
    scores: list[dict[int, Tensor]] = [{}, {}]
    if clean_logits is not None:
        clean = value(clean_logits, targets)
        scores[0][0] = scores[1][pixels] = clean
    needs_reference = {kinds[0]} if pixels in wanted[0] else set()
    needs_reference |= {kinds[1]} if 0 in wanted[1] else set()
    for kind in needs_reference:
        image = references[kind]
        if is_constant(kind):
            key = (kind, height, width)
            cache = {} if constant_logits is None else constant_logits
            if key not in cache:
                cache[key] = classify(image[:1])
            ends = value(cache[key].expand(batch, -1), targets)
        else:
            ends = torch.cat(
                [value(classify(i), t) for i, t in zip(image.split(chunk_size), targets.split(chunk_size), strict=True)]
            )
        for curve, count in ((0, pixels), (1, 0)):
            if kinds[curve] == kind:
                scores[curve][count] = ends

    # One flat list of (sample, curve, count), so that chunks are full whatever the batch.
    interior = [(curve, count) for curve in (0, 1) for count in wanted[curve] if 0 < count < pixels]
    if interior:
        painter = _Painter(images, maps.to(device), [references[kind] for kind in kinds], interior)
        flat = torch.empty(batch * len(interior), dtype=torch.float32, device=device)
        scored = targets.repeat_interleave(len(interior))
        for start in range(0, len(flat), chunk_size):
            stop = min(start + chunk_size, len(flat))
            flat[start:stop] = value(classify(painter.paint(start, stop)), scored[start:stop])
        for (curve, count), column in zip(interior, flat.view(batch, -1).unbind(1), strict=True):
            scores[curve][count] = column

    def gather(curve: int, asked: Sequence[int]) -> Tensor:
        columns = [scores[curve][count] for count in asked]
        return torch.stack(columns, 1) if columns else images.new_zeros(batch, 0, dtype=torch.float32)

    fractions = torch.tensor(counts, device=device) / pixels
    return Curves(fractions, gather(0, counts), gather(1, insertion_counts), targets, forwards)


class _Painter:
    """Perturbed images by their place in the list of (sample, curve, count), samples outermost.

    A run of one sample's points on one curve is one comparison and one selection, straight into a buffer that all
    chunks share: beside a small classifier, every further pass over the pixels shows.
    """

    def __init__(
        self, images: Tensor, maps: Tensor, references: Sequence[Tensor], interior: Sequence[tuple[int, int]]
    ) -> None:
        height, width = images.shape[-2:]
        self.points = len(interior)
        self.deletions = sum(curve == 0 for curve, _ in interior)
        # Where first: deletion shows its reference and insertion the image; elsewhere the other one.
        deleted, inserted = (lay_out(reference) for reference in references)
        self.sides = ((deleted, images), (images, inserted))
        kind = torch.int16 if height * width <= torch.iinfo(torch.int16).max else torch.int32
        ranks = pixel_ranks(maps).to(kind).view(-1, 1, height, width)
        self.ranks = lay_out(ranks.expand_as(images))  # a rank for each channel: no broadcasting in the inner loop
        counts = torch.tensor([count for _, count in interior], dtype=kind, device=images.device)
        self.counts = counts.view(-1, 1, 1, 1)
        self.buffer = images[:0]

    def paint(self, start: int, stop: int) -> Tensor:
        """Images ``(stop − start, 3, H, W)``; good until the next call."""
        if len(self.buffer) < stop - start:
            self.buffer = lay_out(self.sides[0][1].new_empty(stop - start, *self.ranks.shape[1:]))
        place = start
        while place < stop:
            sample, point = divmod(place, self.points)
            curve = int(point >= self.deletions)
            length = min((self.points if curve else self.deletions) - point, stop - place)
            first = self.ranks[sample] < self.counts[point : point + length]
            here, there = (side[sample] for side in self.sides[curve])
            torch.where(first, here, there, out=self.buffer[place - start : place - start + length])
            place += length
        return self.buffer[: stop - start]
