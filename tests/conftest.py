"""Tiny frozen classifiers without trained weights, one thread, one seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aha.classifier import FrozenClassifier

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tiny(name: str, size: tuple[int, int], **kwargs) -> FrozenClassifier:
    """A classifier with random weights that are large enough for its predictions to depend on the image."""
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    classifier = FrozenClassifier.from_timm(name, pretrained=False, image_size=size, **kwargs)
    with torch.no_grad():
        for key, value in classifier.model.state_dict().items():
            if value.is_floating_point() and "running" not in key:
                value.add_(0.05 * torch.randn_like(value))
    torch.random.set_rng_state(state)
    return classifier


@pytest.fixture(scope="session")
def vit() -> FrozenClassifier:
    """A ViT with a CLS token, images of 64×96, 7 classes. Shared: leave it as it is."""
    return tiny("test_vit", (64, 96), num_classes=7)


@pytest.fixture(scope="session")
def convnext() -> FrozenClassifier:
    """A ConvNeXt, images of 64×96, 7 classes. Shared: leave it as it is."""
    return tiny("test_convnext", (64, 96), num_classes=7)


class SmallCNN(nn.Module):
    """A user's own module: pooled NCHW features, a linear layer."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, classes)

    def forward(self, x):
        return self.fc(self.drop(self.body(self.stem(x)).mean((2, 3))))


class SmallTransformer(nn.Module):
    """A user's own module: tokens behind a CLS token."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc(self.block(torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1))[:, 0])


@pytest.fixture(scope="session")
def small_cnn() -> FrozenClassifier:
    """A small CNN of float64 weights, images of 24×36, 5 classes: fast enough for loops. Shared."""
    torch.manual_seed(3)
    model = SmallCNN().double()
    return FrozenClassifier(
        model,
        mean=[0.4, 0.5, 0.6],
        std=[0.2, 0.25, 0.3],
        image_size=(24, 36),
        feature_layers=["body"],
        class_layer="fc",
    )
