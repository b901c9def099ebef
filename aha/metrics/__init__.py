"""Metrics of attribution maps: torchmetrics classes, each with a functional twin that returns one value per sample."""

from aha.metrics.class_sensitivity import ClassSensitivity, class_sensitivity
from aha.metrics.complexity import Compactness, Sparseness, compactness, sparseness
from aha.metrics.faithfulness import (
    DeletionAUC,
    InsertionAUC,
    NegativePerturbation,
    PositivePerturbation,
    deletion_auc,
    insertion_auc,
    negative_perturbation,
    positive_perturbation,
)
from aha.metrics.localization import EnergyPointing, PointingGame, energy_pointing, pointing_game
from aha.metrics.randomization import ModelRandomization, RandomizationResult, model_randomization
from aha.metrics.segmentation import (
    SegmentationAgreement,
    SegmentationScores,
    pooled_mean_iou,
    segmentation_agreement,
)
from aha.metrics.similarity import rank_correlation, structural_similarity
from aha.metrics.violation import FaithfulnessViolation, faithfulness_violation

__all__ = [
    "ClassSensitivity",
    "Compactness",
    "DeletionAUC",
    "EnergyPointing",
    "FaithfulnessViolation",
    "InsertionAUC",
    "ModelRandomization",
    "NegativePerturbation",
    "PointingGame",
    "PositivePerturbation",
    "RandomizationResult",
    "SegmentationAgreement",
    "SegmentationScores",
    "Sparseness",
    "class_sensitivity",
    "compactness",
    "deletion_auc",
    "energy_pointing",
    "faithfulness_violation",
    "insertion_auc",
    "model_randomization",
    "negative_perturbation",
    "pointing_game",
    "pooled_mean_iou",
    "positive_perturbation",
    "rank_correlation",
    "segmentation_agreement",
    "sparseness",
    "structural_similarity",
]
