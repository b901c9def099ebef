"""Amortized attribution for frozen image classifiers: faithful explanations in one forward pass."""

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer, CallableExplainer, Explainer
from aha.export.artifact import load_explainer as load

__all__ = ["AmortizedExplainer", "CallableExplainer", "Explainer", "FrozenClassifier", "load"]
__version__ = "0.1.0"
