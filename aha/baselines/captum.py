"""Captum's attribution methods behind the project's explainer interface."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aha.baselines.geometry import cannot_serve, channel_dim, resize, token_grid
from aha.baselines.traceless import differentiable, restored
from aha.classifier import FrozenClassifier
from aha.explainer import Explainer
from aha.nearest import nearest


class CaptumExplainer(Explainer):
    """Any of Captum's methods by class name, for instance ``LayerGradCam``, ``IntegratedGradients``, ``Occlusion``.

    Where a method wants more than images and targets, this gives it what fits an image classifier, and options
    override it: ``baselines`` the data mean (zero after normalisation); ``sliding_window_shapes`` an eighth of each
    side, ``strides`` half of that; ``feature_mask`` a 7×7 grid; the ``layer`` the classifier's last feature map, or
    in transformers the tokens that enter the last attention (behind it, only a CLS token has a gradient), as an
    NCHW map.

    Args:
        classifier: the explained model.
        method: a class in ``captum.attr``.
        seed: for methods that draw random numbers; the caller's generators are left as they were.
        chunk_size: images per classifier forward, where the method lets it be set.
        options: passed to the method's constructor or to its ``attribute``, whichever knows them.

    Raises:
        ImportError: without captum.
        ValueError: for an unknown method or option.
    """

    def __init__(
        self, classifier: FrozenClassifier, method: str, *, seed: int = 0, chunk_size: int = 64, **options: Any
    ) -> None:
        super().__init__(classifier)
        self.name = f"captum:{method}"
        self.method = _find(method)
        self.seed = seed
        self.chunk_size = chunk_size
        construct, attribute = _parameters(self.method.__init__), _parameters(self.method.attribute)
        unknown = options.keys() - construct - attribute
        if unknown:
            known = ", ".join(sorted(construct | attribute))
            msg = f"{self.name} has no option {', '.join(sorted(unknown))}. It has: {known}."
            raise ValueError(msg)
        self.construct = {key: value for key, value in options.items() if key in construct}
        self.options = {key: value for key, value in options.items() if key not in construct}

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        size = (images.shape[-2], images.shape[-1])
        with (
            differentiable(self.classifier, images) as (classifier, pixels),
            restored(classifier),
            _seeded(self.seed, images.device),
            warnings.catch_warnings(),
        ):
            # That hooks are set is no news here: they are undone.
            warnings.filterwarnings("ignore", message=r"(?s).*[Ss]etting (forward, )?backward hooks")
            if targets is None:
                with torch.no_grad():
                    targets = classifier.forward(pixels).argmax(-1)
            pixels.requires_grad_()
            probed = _Probed(classifier)
            construct = dict(self.construct)
            if "layer" in _parameters(self.method.__init__):
                probed.install(self.name)
                construct.setdefault("layer", probed.features)
            method = self.method(probed, **construct)
            maps = method.attribute(pixels, target=targets, **(self._defaults(classifier, pixels) | self.options))
        maps = maps[0] if isinstance(maps, tuple) else maps
        return resize(maps.detach().sum(1, keepdim=True), size, "bilinear")

    def _defaults(self, classifier: FrozenClassifier, images: Tensor) -> dict[str, Any]:
        batch, _, height, width = images.shape
        window = max(1, height // 8), max(1, width // 8)
        rows, columns = (torch.arange(side, device=images.device) * 7 // side for side in (height, width))
        defaults = {
            "baselines": classifier.mean.to(images).expand_as(images).contiguous(),
            "sliding_window_shapes": (3, *window),
            "strides": (3, max(1, window[0] // 2), max(1, window[1] // 2)),
            "feature_mask": (rows[:, None] * 7 + columns)[None, None],
            "internal_batch_size": max(self.chunk_size, batch),
            "perturbations_per_eval": max(1, self.chunk_size // batch),
        }
        return {key: value for key, value in defaults.items() if key in _parameters(self.method.attribute)}


class _Probed(nn.Module):
    """The classifier, with its last feature map passing through ``features`` as NCHW."""

    def __init__(self, classifier: FrozenClassifier) -> None:
        super().__init__()
        self.classifier = classifier
        self.features = nn.Identity()
        self._size = (0, 0)

    def forward(self, images: Tensor) -> Tensor:
        self._size = (images.shape[-2], images.shape[-1])
        return self.classifier.forward(images)

    def install(self, method: str) -> None:
        """Hook the feature layer; the caller restores the classifier."""
        classifier, self._method = self.classifier, method
        model = classifier.model
        blocks = [
            m for m in model.modules() if all(isinstance(getattr(m, k, None), nn.Module) for k in ("norm1", "attn"))
        ]
        if blocks and classifier._layout == "tokens":
            self._layer = blocks[-1].norm1
        else:
            info = getattr(model, "feature_info", None)
            info = getattr(info, "info", info)
            names = list(classifier.feature_layers) or [entry["module"] for entry in info or []]
            if not names:
                raise cannot_serve(
                    classifier, method, "it names no feature layer; pass feature_layers=… to FrozenClassifier."
                )
            self._layer = model.get_submodule(names[-1])
        self._layer.register_forward_hook(self._reroute)

    def _reroute(self, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_()
        if output.ndim == 3:
            prefix, patches = output.tensor_split([self.classifier.num_prefix_tokens], 1)
            grid = token_grid(self.classifier, patches.shape[1], self._size)
            if grid is None:
                raise cannot_serve(self.classifier, self._method, f"{output.shape[1]} tokens form no grid.")
            maps = self.features(patches.transpose(1, 2).unflatten(2, grid))
            return torch.cat([prefix, maps.flatten(2).transpose(1, 2)], 1)
        nhwc = self.classifier._layout == "NHWC" and channel_dim(self._layer, output) == -1
        return self.features(output.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if nhwc else self.features(output)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's and numpy's global generators inside (captum draws from both); their states come back."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            np.random.seed(seed)
            yield
    finally:
        np.random.set_state(state)


def _find(method: str) -> type:
    try:
        attr = importlib.import_module("captum.attr")
    except ImportError as error:
        msg = f"captum:{method} needs captum: pip install 'aha[compare]'."
        raise ImportError(msg) from error
    known = [name for name, value in vars(attr).items() if inspect.isclass(value) and hasattr(value, "attribute")]
    if (
        method not in known
        or "forward_func" not in (first := _parameters(getattr(attr, method).__init__))
        and "model" not in first
    ):
        near = ", ".join(nearest(method, known, count=4)) or "none"
        msg = f"Captum has no method {method!r} that explains a classifier by itself. Nearest: {near}."
        raise ValueError(msg)
    return getattr(attr, method)


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}
