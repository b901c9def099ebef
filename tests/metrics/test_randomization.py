"""Model randomisation: leaves no trace, cascades from the head down, and tells explainers from edge detectors."""

from __future__ import annotations

import pickle

import matplotlib
import pytest
import torch
from torch import nn

from aha.classifier import FrozenClassifier
from aha.explainer import CallableExplainer, Explainer
from aha.metrics import ModelRandomization, model_randomization
from aha.metrics.randomization import randomization_units

matplotlib.use("Agg")


class Gradient(Explainer):
    """Input times gradient of the logit, summed over channels."""

    def _attribute(self, images, targets):
        images = images.clone().requires_grad_()
        with torch.enable_grad():
            logits = self.classifier(images).gather(1, targets[:, None]).sum()
            (gradient,) = torch.autograd.grad(logits, images)
        return (gradient * images).sum(1, keepdim=True)


def edges(classifier: FrozenClassifier) -> Explainer:
    """Ignores the classifier."""
    return CallableExplainer(classifier, lambda images, _targets: images.mean(1, keepdim=True), "edges")


@pytest.fixture(scope="module")
def classifier() -> FrozenClassifier:
    torch.manual_seed(0)
    return FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=(32, 48), num_classes=6)


def test_the_explained_model_is_never_changed(classifier):
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    fingerprint = classifier.fingerprint()
    images = torch.rand(3, 3, 32, 48)
    result = model_randomization(Gradient, classifier, images)
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())
    assert classifier.fingerprint() == fingerprint
    assert result.rank_correlation.shape == result.ssim.shape == (len(result.units), 3)
    assert result.rank_correlation[-1].abs().max() < 0.3  # every weight is random
    again = model_randomization(Gradient, classifier, images)
    assert torch.equal(result.rank_correlation, again.rank_correlation)
    other = model_randomization(Gradient, classifier, images, seed=5)
    assert not torch.equal(result.rank_correlation, other.rank_correlation)


def test_units_run_from_the_head_to_the_stem(classifier):
    units = randomization_units(classifier)
    names = [name for name, _ in units]
    assert names[0] == "head" and names[-1] == "embeddings" and names[-2] == "patch_embed"
    blocks = [name for name in names if name.startswith("blocks.")]
    assert blocks == sorted(blocks, reverse=True)
    parameters = [id(p) for _, members in units for p in members]
    assert sorted(parameters) == sorted(id(p) for p in classifier.model.parameters())


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_other_families(name):
    classifier = FrozenClassifier.from_timm(name, pretrained=False, image_size=64, num_classes=4)
    units = randomization_units(classifier)
    parameters = [id(p) for _, members in units for p in members]
    assert sorted(parameters) == sorted(id(p) for p in classifier.model.parameters())
    result = model_randomization(Gradient, classifier, torch.rand(2, 3, 64, 64), 1, steps=3)
    assert len(result.units) == 3 and not result.constant.any()


def test_a_users_own_module():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    classifier = FrozenClassifier(model, mean=(0.5,) * 3, std=(0.5,) * 3, image_size=16)
    assert [name for name, _ in randomization_units(classifier)] == ["4", "0"]


def test_an_explainer_that_ignores_the_model_is_exposed(classifier):
    metric = ModelRandomization(edges, classifier, steps=2)
    metric.update(torch.rand(2, 3, 32, 48))
    values = metric.compute()
    assert torch.allclose(values["rank_correlation"], torch.ones(2, dtype=torch.float64))
    assert torch.allclose(values["ssim"], torch.ones(2, dtype=torch.float64))


def test_metric_counts_pickles_and_plots(classifier):
    metric = ModelRandomization(Gradient, classifier, steps=2)
    images = torch.rand(5, 3, 32, 48)
    whole = model_randomization(Gradient, classifier, images, steps=2)
    metric.update(images[:2])
    metric = pickle.loads(pickle.dumps(metric))
    metric.update(images[2:])
    torch.testing.assert_close(metric.compute()["rank_correlation"], whole.rank_correlation.mean(1), atol=1e-4, rtol=0)
    assert metric.count.tolist() == [5, 5] and metric.excluded.tolist() == [0, 0]
    assert metric.units == whole.units
    assert metric.plot()[1].get_lines()
    assert not metric.state_dict()
    with pytest.raises(ValueError, match="at least 1"):
        ModelRandomization(Gradient, classifier, steps=0)
