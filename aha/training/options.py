"""What a user sets in a config file, as plain dataclasses: they give `--help` its text and checkpoints plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from aha.backbone import FrozenBackbone
from aha.classifier import FrozenClassifier
from aha.head import FeatureNorm, Upsampling

T = TypeVar("T")


@dataclass(kw_only=True)
class BackboneOptions:
    """A frozen timm backbone.

    Args:
        name: timm model name with an optional pretrained tag, see timm.list_models().
        pretrained: load the tag's weights from the hub (cached by timm).
        checkpoint_path: local weights in place of the hub's; 'package:NAME/path' looks inside an installed package.
        weights_by_order: match that file's tensors by position, not by name: same architecture, another library.
        image_size: [height, width] in pixels; default: the model's own.
        model_kwargs: further arguments of timm.create_model, for instance {num_classes: 10}.
    """

    name: str
    pretrained: bool = True
    checkpoint_path: str | None = None
    weights_by_order: bool = False
    image_size: list[int] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    KIND: ClassVar[type[FrozenBackbone]] = FrozenBackbone

    def build(self) -> FrozenBackbone:
        """The frozen model of this kind; raises as :meth:`FrozenBackbone.from_timm` does."""
        options = dataclasses.asdict(self)
        return self.KIND.from_timm(**options.pop("model_kwargs"), **options)


@dataclass(kw_only=True)
class ClassifierOptions(BackboneOptions):
    """The model to explain.

    Args:
        link: 'softmax', or 'sigmoid' for multi-label and single-logit classifiers.
        class_names: one name per class, for display.
    """

    link: Literal["softmax", "sigmoid"] = "softmax"
    class_names: list[str] | None = None

    KIND: ClassVar[type[FrozenBackbone]] = FrozenClassifier


@dataclass(kw_only=True)
class HeadOptions:
    """The attribution head.

    Args:
        width: channels of the coarse levels; the one size option.
        class_vector: 'weights' takes the classifier's own weight row of a class, 'embedding' learns one, 'none' leaves
            telling classes apart to the evidence map: for a few hundred pictures, whose classes a head learns by heart.
        evidence: add the classifier's own evidence map (class vector times final features) to the output.
        upsampling: 'nearest' keeps the edges of the tokens, 'bilinear' is smoother.
        feature_norm: 'position' normalises each position of the features by itself, 'image' all together, which keeps
            where a feature map is strong.
        edges: let values spread inside objects and stop at the edges of the image (guided filter).
    """

    width: int = 96
    class_vector: Literal["weights", "embedding", "none"] = "weights"
    evidence: bool = True
    upsampling: Upsampling = "nearest"
    feature_norm: FeatureNorm = "position"
    edges: bool = False


@dataclass(kw_only=True)
class OptimizerOptions:
    """AdamW with linear warm-up and cosine decay.

    Args:
        lr: peak learning rate.
        weight_decay: decoupled weight decay.
        warmup: share of all steps in which the rate climbs from lr/25.
        final_lr_divisor: the rate ends at lr/25 divided by this.
    """

    lr: float = 3e-4
    weight_decay: float = 1e-3
    warmup: float = 0.06
    final_lr_divisor: float = 1e4


@dataclass(kw_only=True)
class TemperatureOptions:
    """Temperature of the soft sort over the run.

    Args:
        start: at the first step.
        end: at the last step.
        schedule: 'geometric' or 'linear' (the published choice, 1.0 to 0.3).
    """

    start: float = 0.5
    end: float = 0.1
    schedule: Literal["geometric", "linear"] = "geometric"

    def __post_init__(self) -> None:
        if self.start <= 0 or self.end <= 0:
            msg = f"temperatures must be positive, got start={self.start} and end={self.end}."
            raise ValueError(msg)

    def at(self, progress: float) -> float:
        """Temperature at a share of the run in [0, 1]."""
        progress = min(max(progress, 0.0), 1.0)
        if self.schedule == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


@dataclass(kw_only=True)
class TargetOptions:
    """Which classes are explained in training.

    Args:
        mode: 'one' explains one class per sample and step, with its own map; 'published' scores two classes (the
            predicted, and the label where that is another, else the runner-up) on the predicted class's map.
        other_share: for 'one', share of samples whose class is not the predicted one but the label where that is
            another, else the runner-up; it makes maps class-discriminative.
    """

    mode: Literal["one", "published"] = "one"
    other_share: float = 0.25


def as_options(kind: type[T], value: T | dict[str, Any]) -> T:
    """A dataclass instance of its own, from another instance or from a checkpoint's dict of plain values."""
    return dataclasses.replace(value) if isinstance(value, kind) else kind(**value)
