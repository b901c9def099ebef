"""Explainers that need no training, by name, behind the same interface as the trained one."""

from aha.baselines.build import BASELINES, build_explainer
from aha.baselines.captum import CaptumExplainer
from aha.baselines.cdam import CDAM
from aha.baselines.gradskip import GradSkip
from aha.baselines.rise import RISE
from aha.baselines.rollout import AttentionRollout
from aha.baselines.segmentation import MaskedLogits
from aha.baselines.simple import CentrePrior, InputGradient, ObjectMask, Random

__all__ = [
    "BASELINES",
    "CDAM",
    "RISE",
    "AttentionRollout",
    "CaptumExplainer",
    "CentrePrior",
    "GradSkip",
    "InputGradient",
    "MaskedLogits",
    "ObjectMask",
    "Random",
    "build_explainer",
]
