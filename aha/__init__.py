"""Amortized attribution for frozen image classifiers: faithful explanations in one forward pass.

Names are imported when first used, so that ``aha --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aha.backbone import FrozenBackbone
    from aha.baselines import CDAM, GradSkip, build_explainer
    from aha.classifier import FrozenClassifier
    from aha.explainer import AmortizedExplainer, CallableExplainer, Explainer
    from aha.export.artifact import load_explainer as load
    from aha.objective import AHAObjective
    from aha.refinement import RefineOptions, refine

_HOMES = {
    "AHAObjective": "aha.objective:AHAObjective",
    "AmortizedExplainer": "aha.explainer:AmortizedExplainer",
    "CDAM": "aha.baselines:CDAM",
    "CallableExplainer": "aha.explainer:CallableExplainer",
    "Explainer": "aha.explainer:Explainer",
    "FrozenBackbone": "aha.backbone:FrozenBackbone",
    "FrozenClassifier": "aha.classifier:FrozenClassifier",
    "GradSkip": "aha.baselines:GradSkip",
    "RefineOptions": "aha.refinement:RefineOptions",
    "build_explainer": "aha.baselines:build_explainer",
    "load": "aha.export.artifact:load_explainer",
    "refine": "aha.refinement:refine",
}

__all__ = [
    "AHAObjective",
    "AmortizedExplainer",
    "CDAM",
    "CallableExplainer",
    "Explainer",
    "FrozenBackbone",
    "FrozenClassifier",
    "GradSkip",
    "RefineOptions",
    "build_explainer",
    "load",
    "refine",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module 'aha' has no attribute {name!r}"
        raise AttributeError(msg)
    module, _, attribute = _HOMES[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
