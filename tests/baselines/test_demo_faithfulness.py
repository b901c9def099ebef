"""On the demo's ViT, CDAM and GradSkip beat random patches by a clear paired margin."""

from __future__ import annotations

import pytest
import torch

from aha.baselines import build_explainer
from aha.data.demo import DemoDataset, load_demo_classifier
from aha.perturbation import auc, deletion_insertion_curves, fractions_to_counts

COUNT = 64


@pytest.fixture(scope="module")
def scored():  # noqa: ANN201
    classifier = load_demo_classifier("vit")
    images = DemoDataset("val", length=COUNT).batch(range(COUNT))["image"].float() / 255
    with torch.no_grad():
        logits = classifier(images)
    counts = fractions_to_counts(torch.linspace(0, 1, 21), 64 * 64)

    def score(spec: str) -> torch.Tensor:
        """Insertion − deletion of each image, by the ``aha`` protocol."""
        maps = build_explainer(spec, classifier).attribute(images)
        curves = deletion_insertion_curves(classifier, images, maps, counts=counts, clean_logits=logits)
        return auc(curves.insertion, curves.fractions) - auc(curves.deletion, curves.fractions)

    return score, score("random")


@pytest.mark.parametrize("spec", ["cdam", "gradskip"])
def test_beats_random_patches(scored, spec: str) -> None:  # noqa: ANN001
    score, random = scored
    gain = score(spec) - random
    picks = torch.randint(COUNT, (1000, COUNT), generator=torch.Generator().manual_seed(0))
    low = gain[picks].mean(1).quantile(0.025)
    assert low > 0.05
