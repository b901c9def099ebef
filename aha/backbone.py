"""Any vision backbone, frozen, in [0, 1] pixel space: feature maps from one pass, geometry read from the model."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from torch import Tensor, nn

from aha.loading import check_name, create, load_weights, pair

NUM_DEPTHS = 4


class BackboneOutput(NamedTuple):
    """Feature maps of one pass.

    Attributes:
        features: intermediate maps, shallow to deep, each ``(batch, channels, h, w)``.
        final: the last map, as it enters the model's own head, ``(batch, channels, h, w)``.
    """

    features: tuple[Tensor, ...]
    final: Tensor


class FrozenBackbone(nn.Module):
    """A frozen backbone that takes RGB images in [0, 1] and normalises them itself, once.

    It is always in eval mode and none of its parameters requires a gradient. Token grid, prefix tokens, layout and
    channels are read from the model, never assumed.

    Args:
        model: a timm model, or any module that takes normalised images ``(batch, 3, H, W)``.
        mean: per-channel mean subtracted inside; default: the timm model's own configuration.
        std: per-channel standard deviation divided by inside; default likewise.
        image_size: ``(height, width)`` or one side; default: the timm model's own configuration.
        feature_layers: for a module that is not a timm model, names of submodules whose outputs serve as features
            (NCHW maps, or tokens ``(batch, tokens, channels)``), shallow to deep.
        num_prefix_tokens: for a module that is not a timm model and yields tokens, how many precede the patches.
        name: how messages name the backbone; default: the model's type.
        copy_model: freeze a copy, so that the module passed in stays as it was.

    Attributes:
        feature_channels: channels of each depth.
        feature_grids: ``(h, w)`` of each depth at ``image_size``.

    Raises:
        ValueError: for a missing mean/std/size, or an image size that the model can't take.
    """

    OWN_OPTIONS: tuple[str, ...] = ()  # constructor arguments that from_timm takes and records

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        image_size: int | Sequence[int] | None = None,
        feature_layers: Sequence[str] = (),
        num_prefix_tokens: int | None = None,
        name: str | None = None,
        copy_model: bool = True,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model) if copy_model else model
        known = resolve_model_data_config(model) if hasattr(model, "pretrained_cfg") else {}
        self.name = name or type(model).__name__
        self.feature_layers = tuple(feature_layers)
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
        self.image_size: tuple[int, int] = pair(size)
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
        weights_by_order: bool = False,
        image_size: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a frozen timm model by name, for instance ``"vit_small_patch16_dinov3.lvd1689m"``.

        Args:
            name: a timm model name with an optional pretrained tag, ``hf-hub:owner/name``, or ``local-dir:folder``.
            pretrained: load the tag's weights from the hub (cached by timm).
            checkpoint_path: local weights (``.safetensors``, ``.pth``, …; never unpickled) in place of the hub's;
                ``package:NAME/inner/path`` names a file inside an installed package.
            weights_by_order: match the file's tensors with the model's by position in place of name, for weights of
                the same architecture from another library; numbers and shapes of all tensors must agree.
            image_size: side or ``(height, width)``; position embeddings are resampled where the model has them, those
                in a local file, too.
            kwargs: passed to ``timm.create_model``, for instance ``num_classes=10``.

        Raises:
            ValueError: unknown name (the nearest are offered), weights that don't fit, or a size that can't be taken.
            ConnectionError: the hub can't be reached and nothing is cached.
        """
        own = {key: kwargs.pop(key) for key in cls.OWN_OPTIONS if key in kwargs}
        name = name.removeprefix("timm/")
        check_name(name)
        if checkpoint_path is not None:
            pretrained = False
        size = None if image_size is None else pair(image_size)
        model = create(name, pretrained=pretrained, size=size, **kwargs)
        if checkpoint_path is not None:
            load_weights(model, checkpoint_path, name, by_order=weights_by_order)
        embedded = getattr(getattr(model, "patch_embed", None), "img_size", None)
        frozen = cls(model, image_size=size or embedded, name=name, copy_model=False, **own)
        frozen._config = {
            "name": name,
            "pretrained": pretrained,
            "checkpoint_path": None if checkpoint_path is None else str(checkpoint_path),
            "weights_by_order": weights_by_order,
            "image_size": None if size is None else list(size),
            "model_kwargs": copy.deepcopy(kwargs),
        } | copy.deepcopy(own)
        return frozen

    @classmethod
    def from_config(cls, config: dict[str, Any], *, checkpoint_path: str | Path | None = None) -> Self:
        """Rebuild a backbone from :meth:`config` and verify that its weights are the recorded ones.

        Args:
            config: plain values, as :meth:`config` returns them.
            checkpoint_path: local weights to use in place of the recorded source.

        Raises:
            ValueError: if the weights' hash differs from the recorded one.
        """
        options = {k: v for k, v in config.items() if k not in ("fingerprint", "model_kwargs")}
        if checkpoint_path is not None:
            options["checkpoint_path"] = checkpoint_path
        frozen = cls.from_timm(**options, **config.get("model_kwargs", {}))
        expected = config.get("fingerprint")
        if expected is not None and frozen.fingerprint() != expected:
            msg = (
                f"The weights of {config['name']} differ from those that the explainer was trained for "
                f"(sha256 {frozen.fingerprint()[:12]}…, expected {expected[:12]}…). "
                "Pass the original weights as checkpoint_path."
            )
            raise ValueError(msg)
        return frozen

    def config(self) -> dict[str, Any]:
        """Plain values (JSON-able) from which :meth:`from_config` rebuilds this backbone, weight hash included.

        Raises:
            ValueError: for a module that was not built by :meth:`from_timm`: only its owner can rebuild it.
        """
        if self._config is None:
            msg = (
                f"{self.name} was not built by from_timm, so nothing here can rebuild it. "
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

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in eval mode, whatever a parent module asks for."""
        return super().train(False)

    def normalize(self, images: Tensor) -> Tensor:
        """Map images from [0, 1] to the model's own input space and precision, ``(batch, 3, H, W)`` both."""
        return ((images - self.mean) / self.std).to(self.mean.dtype)

    def forward(self, images: Tensor) -> BackboneOutput:
        """Feature maps of images ``(batch, 3, H, W)`` in [0, 1]."""
        return self._run(images)[1]

    def _run(self, images: Tensor) -> tuple[Any, BackboneOutput]:
        """One pass: what enters the timm model's head, or what another module returned; and the feature maps."""
        x = self.normalize(images)
        if self._is_timm:
            raw, maps = self.model.forward_intermediates(x, indices=self.feature_indices, output_fmt="NCHW")
            raw = self._tensor(raw, "final feature map")
            grid = (maps[-1].shape[-2], maps[-1].shape[-1])
            if self._layout is None:
                self._layout = self._layout_of(raw, grid)
            return raw, BackboneOutput(tuple(maps), self._to_nchw(raw, grid))
        captured: dict[str, Tensor] = {}
        layers = {layer: self.model.get_submodule(layer) for layer in self.feature_layers}
        handles = [
            module.register_forward_hook(lambda _m, _i, out, layer=layer: captured.__setitem__(layer, out))
            for layer, module in layers.items()
        ]
        try:
            raw = self.model(x)
        finally:
            for handle in handles:
                handle.remove()
        missing = [layer for layer in self.feature_layers if layer not in captured]
        if missing:
            msg = f"Feature layers {missing} of {self.name} were not reached in its forward pass."
            raise ValueError(msg)
        outputs = [self._tensor(captured[layer], f"output of {layer}") for layer in self.feature_layers]
        maps = tuple(self._to_nchw(output, self._token_grid(output, x)) for output in outputs)
        return raw, BackboneOutput(maps, maps[-1] if maps else x.new_zeros(len(x), 0, 1, 1))

    def _probe(self) -> None:
        """Read geometry from one pass over a grey image; fail early on impossible sizes."""
        self.feature_indices = self._pick_depths() if self._is_timm else []
        self._layout: str | None = None
        height, width = self.image_size
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), self.mean)
        self.to(weight.device, weight.dtype)
        self._check_patches()
        try:
            with torch.no_grad():
                output = self._probe_pass(self.mean.expand(1, 3, height, width))
        except (AssertionError, RuntimeError, IndexError, ZeroDivisionError) as error:
            msg = f"{self.name} can't take images of {height}×{width}: {error}"
            raise ValueError(msg) from error
        self.feature_channels = tuple(f.shape[1] for f in output.features)
        self.feature_grids = tuple((f.shape[-2], f.shape[-1]) for f in output.features)

    def _probe_pass(self, image: Tensor) -> BackboneOutput:
        return self._run(image)[1]

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
