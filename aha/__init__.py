"""Amortized attribution for frozen image classifiers: faithful explanations in one forward pass."""

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer, CallableExplainer, Explainer

__all__ = ["AmortizedExplainer", "CallableExplainer", "Explainer", "FrozenClassifier"]
__version__ = "0.1.0"
