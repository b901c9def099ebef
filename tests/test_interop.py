"""Used by the real Captum and, where it is installed, the real Quantus."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aha import AmortizedExplainer
from aha.interop import CaptumAttribution, quantus_explain


@pytest.fixture
def explainer(convnext):
    explainer = AmortizedExplainer(convnext, width=8)
    torch.nn.init.normal_(explainer.head.output.weight)
    return explainer


def test_captum_metrics_take_it(explainer):
    metrics = pytest.importorskip("captum.metrics")
    wrapped = CaptumAttribution(explainer)
    images = torch.rand(2, 3, 64, 96)
    target = torch.tensor([1, 2])
    maps = wrapped.attribute(images, target=target)
    assert maps.shape == images.shape
    assert torch.equal(maps[:, :1], explainer.attribute(images, target))

    def perturb(inputs):
        noise = 0.01 * torch.randn_like(inputs)
        return noise, inputs - noise

    infidelity = metrics.infidelity(explainer.classifier, perturb, images, maps, target=target, n_perturb_samples=3)
    sensitivity = metrics.sensitivity_max(wrapped.attribute, images, target=target, n_perturb_samples=3)
    assert infidelity.shape == sensitivity.shape == (2,)
    assert infidelity.isfinite().all() and (sensitivity > 0).all()


def test_positional_use_as_in_captum(explainer):
    images = torch.rand(2, 3, 64, 96)
    assert torch.equal(explainer.attribute(images, 3), explainer.attribute(images, targets=[3, 3]))


def test_quantus_metrics_take_it(explainer):
    quantus = pytest.importorskip("quantus", reason="pip install quantus")
    x = np.random.default_rng(0).random((2, 3, 64, 96), dtype=np.float32)
    y = np.array([1, 2])
    metric = quantus.PixelFlipping(features_in_step=64 * 96 // 8, perturb_baseline="mean", disable_warnings=True)
    scores = metric(
        model=explainer.classifier,
        x_batch=x,
        y_batch=y,
        explain_func=quantus_explain(explainer),
        device="cpu",
    )
    assert len(scores) == 2 and np.isfinite(scores).all()


def test_quantus_signature(explainer):
    explain = quantus_explain(explainer, channels=3)
    maps = explain(model=explainer.classifier, inputs=np.zeros((2, 3, 64, 96)), targets=np.array([0, 1]), device="cpu")
    assert maps.shape == (2, 3, 64, 96) and maps.dtype == np.float32
