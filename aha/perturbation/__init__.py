"""From scores to perturbed images to curves; soft and hard differ only in who makes the prefix masks."""

from aha.perturbation.chunks import automatic_chunk_size
from aha.perturbation.curves import Curves, deletion_insertion_curves
from aha.perturbation.ranking import auc, fractions_to_counts, pixel_ranks
from aha.perturbation.references import REFERENCES, Reference, is_constant, make_reference
from aha.perturbation.regions import pool_scores, region_masks_to_pixels, sample_grid, sample_shift
from aha.perturbation.soft_curves import soft_scores

__all__ = [
    "REFERENCES",
    "Curves",
    "Reference",
    "auc",
    "automatic_chunk_size",
    "deletion_insertion_curves",
    "fractions_to_counts",
    "is_constant",
    "make_reference",
    "pixel_ranks",
    "pool_scores",
    "region_masks_to_pixels",
    "sample_grid",
    "sample_shift",
    "soft_scores",
]
