"""Amortized attribution for frozen image classifiers: faithful explanations in one forward pass."""

from aha.classifier import FrozenClassifier

__all__ = ["FrozenClassifier"]
__version__ = "0.1.0"
