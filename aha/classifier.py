"""Any image classifier, frozen, in [0, 1] pixel space: logits, features and class vectors from one pass."""

from __future__ import annotations

import copy
import difflib
import hashlib
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from timm.models import load_checkpoint, resolve_model_input_args
from torch import Tensor, nn

NUM_DEPTHS = 4


class ClassifierOutput(NamedTuple):
    """What one pass of a :class:`FrozenClassifier` yields.

    Attributes:
        logits: class logits, ``(batch, classes)``.
        features: intermediate maps, shallow to deep, each ``(batch, channels, h, w)``.
        final: the last map, as it enters the classifier's own head, ``(batch, channels, h, w)``.
    """

    logits: Tensor
    features: tuple[Tensor, ...]
    final: Tensor


class FrozenClassifier(nn.Module):
    """A frozen classifier that takes RGB images in [0, 1] and normalises them itself, once.

    It is always in eval mode and none of its parameters requires a gradient. Token grid, prefix tokens, layout and
    channels are read from the model, never assumed.

    Args:
        model: a timm model, or any module that maps normalised images ``(batch, 3, H, W)`` to logits.
        mean: per-channel mean subtracted inside; default: the timm model's own configuration.
        std: per-channel standard deviation divided by inside; default likewise.
        image_size: ``(height, width)`` or one side; default: the timm model's own configuration.
        link: ``"softmax"``, or ``"sigmoid"`` for multi-label and single-logit classifiers.
        feature_layers: for a module that is not a timm model, names of submodules whose outputs serve as features
            (NCHW maps, or tokens ``(batch, tokens, channels)``), shallow to deep.
        class_layer: for a module that is not a timm model, the name of its last linear layer (class vectors).
        num_prefix_tokens: for a module that is not a timm model and yields tokens, how many precede the patches.
        class_names: one name per class, for display.
        name: how messages name the classifier; default: the model's type.
        copy_model: freeze a copy, so that the module passed in stays as it was.

    Raises:
        ValueError: for a headless model, a missing mean/std/size, or an image size that the model can't take.

    Example:
        >>> classifier = FrozenClassifier.from_timm("test_vit", pretrained=False)
        >>> output = classifier.forward_features(torch.rand(2, 3, 160, 160))
        >>> output.logits.shape, output.final.shape
        (torch.Size([2, 1000]), torch.Size([2, 64, 10, 10]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        image_size: int | Sequence[int] | None = None,
        link: Literal["softmax", "sigmoid"] = "softmax",
        feature_layers: Sequence[str] = (),
        class_layer: str | None = None,
        num_prefix_tokens: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str | None = None,
        copy_model: bool = True,
    ) -> None:
        super().__init__()
        if link not in ("softmax", "sigmoid"):
            msg = f"link must be 'softmax' or 'sigmoid', got {link!r}."
            raise ValueError(msg)
        self.model = copy.deepcopy(model) if copy_model else model
        known = resolve_model_data_config(model) if hasattr(model, "pretrained_cfg") else {}
        self.name = name or type(model).__name__
        self.link = link
        self.feature_layers = tuple(feature_layers)
        self.class_layer = class_layer
        self.class_names = None if class_names is None else list(class_names)
        self._config: dict[str, Any] | None = None
        self._is_timm = hasattr(model, "forward_intermediates") and hasattr(model, "forward_head")

        mean = known.get("mean") if mean is None else mean
        std = known.get("std") if std is None else std
        size = known["input_size"][-2:] if image_size is None and known else image_size
        if mean is None or std is None or size is None:
            msg = f"{self.name} carries no timm configuration: pass mean=…, std=… (as in its training) and image_size=…"
            raise ValueError(msg)
        if len(mean) != 3 or len(std) != 3:
            msg = f"{self.name} must take RGB images: mean and std need three values, got {mean} and {std}."
            raise ValueError(msg)
        self.image_size: tuple[int, int] = _pair(size)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

        self.requires_grad_(False)
        self.train(False)
        if num_prefix_tokens is None:
            num_prefix_tokens = getattr(model, "num_prefix_tokens", None) or 0
        self.num_prefix_tokens = int(num_prefix_tokens)
        self._probe()

    @classmethod
    def from_timm(
        cls,
        name: str,
        *,
        pretrained: bool = True,
        checkpoint_path: str | Path | None = None,
        image_size: int | Sequence[int] | None = None,
        link: Literal["softmax", "sigmoid"] = "softmax",
        class_names: Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> FrozenClassifier:
        """Build a timm classifier by name, for instance ``"vit_base_patch16_224.augreg2_in21k_ft_in1k"``.

        Args:
            name: a timm model name with an optional pretrained tag, ``hf-hub:owner/name``, or ``local-dir:folder``.
            pretrained: load the tag's weights from the hub (cached by timm).
            checkpoint_path: local weights (``.safetensors``, ``.pth``, …; never unpickled) in place of the hub's;
                ``package:NAME/inner/path`` names a file inside an installed package.
            image_size: side or ``(height, width)``; position embeddings are resampled where the model has them, those
                in a local file, too.
            link: ``"softmax"`` or ``"sigmoid"``.
            class_names: one name per class, for display.
            model_kwargs: passed to ``timm.create_model``, for instance ``num_classes=10``.

        Raises:
            ValueError: unknown name (the nearest are offered), weights that don't fit, or a size that can't be taken.
            ConnectionError: the hub can't be reached and nothing is cached.
        """
        name = name.removeprefix("timm/")
        _check_name(name)
        if checkpoint_path is not None:
            pretrained = False
        size = None if image_size is None else _pair(image_size)
        model = _create(name, pretrained=pretrained, size=size, **model_kwargs)
        if checkpoint_path is not None:
            _load_weights(model, checkpoint_path, name)
        embedded = getattr(getattr(model, "patch_embed", None), "img_size", None)
        classifier = cls(
            model, image_size=size or embedded, link=link, class_names=class_names, name=name, copy_model=False
        )
        classifier._config = {
            "name": name,
            "pretrained": pretrained,
            "checkpoint_path": None if checkpoint_path is None else str(checkpoint_path),
            "image_size": None if size is None else list(size),
            "link": link,
            "class_names": classifier.class_names,
            "model_kwargs": copy.deepcopy(model_kwargs),
        }
        return classifier

    @classmethod
    def from_config(cls, config: dict[str, Any], *, checkpoint_path: str | Path | None = None) -> FrozenClassifier:
        """Rebuild a classifier from :meth:`config` and verify that its weights are the recorded ones.

        Args:
            config: plain values, as :meth:`config` returns them.
            checkpoint_path: local weights to use in place of the recorded source.

        Raises:
            ValueError: if the weights' hash differs from the recorded one.
        """
        options = {k: v for k, v in config.items() if k not in ("fingerprint", "model_kwargs")}
        if checkpoint_path is not None:
            options["checkpoint_path"] = checkpoint_path
        classifier = cls.from_timm(**options, **config.get("model_kwargs", {}))
        expected = config.get("fingerprint")
        if expected is not None and classifier.fingerprint() != expected:
            msg = (
                f"The weights of {config['name']} differ from those that the explainer was trained for "
                f"(sha256 {classifier.fingerprint()[:12]}…, expected {expected[:12]}…). "
                "Pass the original weights as checkpoint_path."
            )
            raise ValueError(msg)
        return classifier

    def config(self) -> dict[str, Any]:
        """Plain values (JSON-able) from which :meth:`from_config` rebuilds this classifier, weight hash included.

        Raises:
            ValueError: for a module that was not built by :meth:`from_timm`: only its owner can rebuild it.
        """
        if self._config is None:
            msg = (
                f"{self.name} was not built by FrozenClassifier.from_timm, so nothing here can rebuild it. "
                "Pass it again at load time: aha.load(path, classifier=…)."
            )
            raise ValueError(msg)
        return copy.deepcopy(self._config) | {"fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and values of the model's weights and buffers, as they are now (hex).

        About a second per gigabyte of weights.
        """
        digest = hashlib.sha256()
        for key, value in sorted(self.model.state_dict().items()):
            digest.update(f"{key}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def train(self, mode: bool = True) -> FrozenClassifier:  # noqa: ARG002
        """Stay in eval mode, whatever a parent module asks for."""
        return super().train(False)

    def normalize(self, images: Tensor) -> Tensor:
        """Map images from [0, 1] to the model's own input space and precision, ``(batch, 3, H, W)`` both."""
        return ((images - self.mean) / self.std).to(self.mean.dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits ``(batch, classes)`` of images ``(batch, 3, H, W)`` in [0, 1]."""
        return self._tensor(self.model(self.normalize(images)))

    def forward_features(self, images: Tensor) -> ClassifierOutput:
        """Logits and feature maps of images ``(batch, 3, H, W)`` in [0, 1], from one pass."""
        x = self.normalize(images)
        if self._is_timm:
            final, maps = self.model.forward_intermediates(x, indices=self.feature_indices, output_fmt="NCHW")
            final = self._tensor(final, "final feature map")
            logits = self._tensor(self.model.forward_head(final))
            grid = (maps[-1].shape[-2], maps[-1].shape[-1])
            if self._layout is None:
                self._layout = self._layout_of(final, grid)
            return ClassifierOutput(logits, tuple(maps), self._to_nchw(final, grid))
        captured: dict[str, Tensor] = {}
        layers = {layer: self.model.get_submodule(layer) for layer in self.feature_layers}
        handles = [
            module.register_forward_hook(lambda _m, _i, out, layer=layer: captured.__setitem__(layer, out))
            for layer, module in layers.items()
        ]
        try:
            logits = self._tensor(self.model(x))
        finally:
            for handle in handles:
                handle.remove()
        missing = [layer for layer in self.feature_layers if layer not in captured]
        if missing:
            msg = f"Feature layers {missing} of {self.name} were not reached in its forward pass."
            raise ValueError(msg)
        outputs = [self._tensor(captured[layer], f"output of {layer}") for layer in self.feature_layers]
        maps = tuple(self._to_nchw(output, self._token_grid(output, x)) for output in outputs)
        return ClassifierOutput(logits, maps, maps[-1] if maps else x.new_zeros(len(x), 0, 1, 1))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Class probabilities ``(batch, classes)`` by the link, in float32 (float64 stays)."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.softmax(-1) if self.link == "softmax" else logits.sigmoid()

    def target_probability(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Probability of each sample's target, ``(batch,)``; targets ``(batch,)``."""
        return self.probabilities(logits).gather(-1, targets.view(-1, 1)).squeeze(-1)

    def resolve_targets(self, targets: int | Sequence[int] | Tensor | None, logits: Tensor) -> Tensor:
        """Turn what a user passes as targets into ``(batch,)`` class indices on the logits' device.

        Args:
            targets: None (the predicted class), one index for all, or one per sample.
            logits: ``(batch, classes)``.

        Raises:
            ValueError: wrong number of targets, or an index outside 0…classes−1.
        """
        batch, classes = logits.shape
        if targets is None:
            return logits.argmax(-1)
        try:
            resolved = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            msg = f"targets must be class indices (integers), got {targets!r}."
            raise ValueError(msg) from error
        if resolved.is_floating_point() or resolved.is_complex() or resolved.dtype == torch.bool:
            msg = f"targets must be class indices (integers), got {resolved.dtype}."
            raise ValueError(msg)
        resolved = resolved.long()
        if resolved.ndim == 0:
            resolved = resolved.expand(batch)
        if resolved.shape != (batch,):
            msg = f"targets must be one index or one per image ({batch}), got shape {tuple(resolved.shape)}."
            raise ValueError(msg)
        # Checked where the targets come from: no device has to be waited for unless they lie on one.
        outside = resolved[(resolved < 0) | (resolved >= classes)]
        if outside.numel():
            msg = f"target {int(outside[0])} is out of range: {self.name} has classes 0…{classes - 1}."
            raise ValueError(msg)
        return resolved.to(logits.device)

    @property
    def class_weight(self) -> Tensor:
        """The classifier's own weight rows, ``(classes, dimension)``."""
        if self._is_timm:
            layers = self.model.get_classifier()
            layers = layers if isinstance(layers, tuple | list) else (layers,)
        else:
            layers = (self.model.get_submodule(self.class_layer),) if self.class_layer else ()
        weights = [layer.weight.flatten(1) for layer in layers if hasattr(layer, "weight")]
        if not weights:
            msg = (
                f"{self.name} has no linear classifier to take class vectors from: "
                "use class_vector='embedding' and evidence=False."
            )
            raise ValueError(msg)
        return weights[0] if len(weights) == 1 else torch.stack(weights).mean(0)

    def class_vectors(self, targets: Tensor) -> Tensor:
        """The classifier's weight rows of the targets, ``(batch, dimension)``; targets ``(batch,)``."""
        return self.class_weight[targets]

    def evidence(self, final: Tensor, targets: Tensor) -> Tensor:
        """The classifier's own head applied at each position: a class activation map of the last features.

        Each position of ``final`` goes through the head's own pre-logit layers (norm, projection) as if it were the
        whole image, and is then multiplied by the target's class vector (Zhou et al. 2016, arXiv 1512.04150).

        Args:
            final: ``(batch, channels, h, w)`` from :class:`ClassifierOutput`.
            targets: ``(batch,)``.

        Returns:
            ``(batch, 1, h, w)``, signed, in logit units up to the class's bias.
        """
        batch, channels, height, width = final.shape
        positions = final.permute(0, 2, 3, 1).reshape(-1, channels)
        if self._is_timm:
            if self._layout == "tokens":
                # Copies of one token fill every slot, so that any pooling (first, mean, attention) returns that token.
                positions = positions[:, None].expand(-1, self.num_prefix_tokens + 1, -1)
            else:
                positions = positions[:, :, None, None] if self._layout == "NCHW" else positions[:, None, None, :]
            positions = self._tensor(self.model.forward_head(positions, pre_logits=True))
        vectors = self.class_vectors(targets).to(positions.dtype)
        if positions.shape[-1] != vectors.shape[-1]:
            msg = (
                f"The last feature layer of {self.name} has {positions.shape[-1]} channels, its class vectors have "
                f"{vectors.shape[-1]}: name the layer that the classifier pools as the last of feature_layers."
            )
            raise ValueError(msg)
        positions = positions.reshape(batch, height * width, -1)
        return torch.einsum("bnd,bd->bn", positions, vectors).view(batch, 1, height, width)

    def _probe(self) -> None:
        """Read geometry from one pass over a grey image; fail early on headless models and impossible sizes."""
        self.feature_indices = self._pick_depths() if self._is_timm else []
        self._layout: str | None = None
        height, width = self.image_size
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), self.mean)
        self.to(weight.device, weight.dtype)
        if getattr(self.model, "num_classes", None) == 0:
            msg = (
                f"{self.name} is a headless backbone (num_classes=0): there is no class to explain. Pass num_classes=… "
                "with checkpoint_path=… of a trained head, or use it as the encoder of an explainer instead."
            )
            raise ValueError(msg)
        self._check_patches()
        try:
            with torch.no_grad():
                output = self.forward_features(self.mean.expand(1, 3, height, width))
        except (AssertionError, RuntimeError, IndexError, ZeroDivisionError) as error:
            msg = f"{self.name} can't take images of {height}×{width}: {error}"
            raise ValueError(msg) from error
        if output.logits.ndim != 2:
            msg = f"{self.name} returned {tuple(output.logits.shape)}, expected logits (batch, classes)."
            raise ValueError(msg)
        self.num_classes = output.logits.shape[-1]
        if self.num_classes == 1 and self.link == "softmax":
            msg = f"{self.name} has a single logit, whose softmax is always 1: pass link='sigmoid'."
            raise ValueError(msg)
        self.feature_channels = tuple(f.shape[1] for f in output.features)
        self.feature_grids = tuple((f.shape[-2], f.shape[-1]) for f in output.features)
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            msg = f"{len(self.class_names)} class names for {self.num_classes} classes of {self.name}."
            raise ValueError(msg)

    def _check_patches(self) -> None:
        """A patch embedding drops the rows and columns that don't fill a patch: those pixels would not be seen."""
        embed = getattr(self.model, "patch_embed", None)
        if not isinstance(embed, PatchEmbed) or getattr(embed, "dynamic_img_pad", False):
            return
        if any(side % patch for side, patch in zip(self.image_size, embed.patch_size, strict=True)):
            height, width = self.image_size
            fits = "×".join(
                str(max(round(side / patch), 1) * patch)
                for side, patch in zip(self.image_size, embed.patch_size, strict=True)
            )
            msg = (
                f"{self.name} can't take images of {height}×{width}: sides must be multiples of its "
                f"{embed.patch_size[0]}×{embed.patch_size[1]} patches, for instance {fits}."
            )
            raise ValueError(msg)

    def _tensor(self, output: Any, what: str = "output") -> Tensor:
        """The tensor among what a module returned (the first of a tuple)."""
        first = output[0] if isinstance(output, tuple | list) and len(output) else output
        if isinstance(first, Tensor) and not (isinstance(output, list) and len(output) > 1):
            return first
        msg = (
            f"The {what} of {self.name} is no single tensor but {type(output).__name__}: "
            "wrap the model in a module that returns logits (batch, classes), and name its feature_layers."
        )
        raise ValueError(msg)

    def _pick_depths(self) -> list[int]:
        """Four evenly spaced blocks of a plain transformer; the last four stages of a hierarchical model."""
        info = self.model.feature_info
        info = info if isinstance(info, list) else info.info
        count = len(info)
        if len({entry["reduction"] for entry in info}) > 1:
            return list(range(max(count - NUM_DEPTHS, 0), count))
        return sorted({round((i + 1) * count / NUM_DEPTHS) - 1 for i in range(NUM_DEPTHS)} - {-1})

    def _to_nchw(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        layout = self._layout_of(x, grid)
        if layout == "tokens":
            patches = x[:, self.num_prefix_tokens :]
            if patches.shape[1] != grid[0] * grid[1]:
                msg = (
                    f"{self.name} ends in {x.shape[1]} tokens, {self.num_prefix_tokens} of them prefix tokens: the "
                    f"rest don't tile the {grid[0]}×{grid[1]} grid of its features. Pass num_prefix_tokens=…"
                )
                raise ValueError(msg)
            # x.shape[0], as len(x) would fix the batch size of an exported graph.
            return patches.transpose(1, 2).reshape(x.shape[0], -1, *grid)
        return x.permute(0, 3, 1, 2) if layout == "NHWC" else x

    def _layout_of(self, x: Tensor, grid: tuple[int, int]) -> str:
        if x.ndim == 3:
            return "tokens"
        last = getattr(self.model, "output_fmt", "NCHW") == "NHWC" or tuple(x.shape[-2:]) != tuple(grid)
        return "NHWC" if last else "NCHW"

    def _token_grid(self, tokens: Tensor, x: Tensor) -> tuple[int, int]:
        if tokens.ndim == 4:
            return tokens.shape[-2], tokens.shape[-1]
        count = tokens.shape[1] - self.num_prefix_tokens
        height, width = x.shape[-2:]
        rows = round((count * height / width) ** 0.5)
        if rows == 0 or rows * (count // max(rows, 1)) != count:
            msg = f"{count} patch tokens of {self.name} don't tile a {height}×{width} image: pass num_prefix_tokens=…"
            raise ValueError(msg)
        return rows, count // rows


def resolve_path(path: str | Path) -> Path:
    """A local path; ``package:NAME/inner/path`` is looked up inside the installed package NAME.

    Raises:
        FileNotFoundError: naming the path that is missing.
    """
    text = str(path)
    if text.startswith("package:"):
        package, _, inner = text.removeprefix("package:").partition("/")
        try:
            found = Path(str(resources.files(package).joinpath(inner)))
        except ModuleNotFoundError as error:
            msg = f"{text}: the package {package!r} is not installed."
            raise FileNotFoundError(msg) from error
    else:
        found = Path(text).expanduser()
    if not found.is_file():
        msg = f"There is no weights file {text!r}."
        raise FileNotFoundError(msg)
    return found


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(int(side) != side or side < 1 for side in sides):
        msg = f"image_size must be one side or (height, width) in pixels, got {size}."
        raise ValueError(msg)
    return int(sides[0]), int(sides[1])


def _check_name(name: str) -> None:
    """Refuse names that timm doesn't know, with the nearest that it does; other sources are left to timm."""
    if ":" in name:
        return
    base, _, tag = name.partition(".")
    if timm.is_model(base):
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{base}.*")]
        if tag and tag not in tags:
            msg = f"timm has no pretrained tag {tag!r} for {base}. Known: {', '.join(tags) or 'none'}."
            raise ValueError(msg)
        return
    near = difflib.get_close_matches(base.rpartition("/")[2], timm.list_models(), n=4, cutoff=0.4)
    hub = f" For a model on the Hugging Face hub write 'hf-hub:{name}'." if "/" in name else ""
    msg = f"timm has no model {name!r}. Nearest: {', '.join(near) or 'none'}. See timm.list_models('*vit*').{hub}"
    raise ValueError(msg)


def _create(name: str, *, pretrained: bool, size: tuple[int, int] | None, **kwargs: Any) -> nn.Module:
    try:
        # timm passes the size on to those models whose weights depend on it.
        options = resolve_model_input_args(name, {"img_size": size}, **kwargs)
        return timm.create_model(pretrained=pretrained, **options)
    except Exception as error:
        # The hub's clients raise OSError, or their HTTP library's own errors.
        remote = type(error).__module__.split(".")[0] in ("huggingface_hub", "httpx", "requests", "urllib3")
        if (isinstance(error, OSError) or remote) and (pretrained or ":" in name):
            msg = (
                f"The weights of {name} could not be fetched ({type(error).__name__}: {str(error)[:200]}). If the hub "
                "can't be reached and nothing is cached, pass checkpoint_path=… with a local weights file, or "
                "pretrained=False."
            )
            raise ConnectionError(msg) from error
        if isinstance(error, AssertionError | RuntimeError | TypeError | AttributeError | ValueError):
            msg = f"timm can't build {name} with {kwargs or 'its defaults'}: {error}"
            raise ValueError(msg) from error
        raise


def _load_weights(model: nn.Module, checkpoint_path: str | Path, name: str) -> None:
    path = resolve_path(checkpoint_path)
    # The filter that timm runs over weights from the hub: it resamples position embeddings to the model's size.
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        load_checkpoint(model, str(path), use_ema=False, strict=True, filter_fn=adapt, weights_only=True)
    except Exception as error:  # any of a dozen types, from a truncated file to a missing key
        msg = f"The weights in {checkpoint_path} don't fit {name}: {str(error)[:500]}"
        raise ValueError(msg) from error
