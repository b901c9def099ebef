"""Building timm models by name and loading local weights, with errors that name the remedy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import timm
from timm.models import load_checkpoint, load_state_dict, resolve_model_input_args
from torch import Tensor, nn

from aha.nearest import nearest


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


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(int(side) != side or side < 1 for side in sides):
        msg = f"image_size must be one side or (height, width) in pixels, got {size}."
        raise ValueError(msg)
    return int(sides[0]), int(sides[1])


def check_name(name: str) -> None:
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
    near = nearest(base.rpartition("/")[2], timm.list_models(), count=4)
    hub = f" For a model on the Hugging Face hub write 'hf-hub:{name}'." if "/" in name else ""
    msg = f"timm has no model {name!r}. Nearest: {', '.join(near) or 'none'}. See timm.list_models('*vit*').{hub}"
    raise ValueError(msg)


def create(name: str, *, pretrained: bool, size: tuple[int, int] | None, **kwargs: Any) -> nn.Module:
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


def load_weights(model: nn.Module, checkpoint_path: str | Path, name: str, *, by_order: bool = False) -> None:
    path = resolve_path(checkpoint_path)
    # The filter that timm runs over weights from the hub: it resamples position embeddings to the model's size.
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        if by_order:
            stored = load_state_dict(str(path), use_ema=False, device="cpu", weights_only=True)
            model.load_state_dict(_by_order(stored, model.state_dict()))
        else:
            load_checkpoint(model, str(path), use_ema=False, strict=True, filter_fn=adapt, weights_only=True)
    except Exception as error:  # any of a dozen types, from a truncated file to a missing key
        msg = f"The weights in {checkpoint_path} don't fit {name}: {str(error)[:500]}"
        raise ValueError(msg) from error


def _by_order(stored: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors under the wanted names, matched by position where names differ; all shapes must agree."""
    if stored.keys() == wanted.keys():
        return stored
    if len(stored) != len(wanted):
        msg = f"it holds {len(stored)} tensors, the model {len(wanted)}: they can't be matched by order."
        raise ValueError(msg)
    for (theirs, tensor), (ours, place) in zip(stored.items(), wanted.items(), strict=True):
        if tensor.shape != place.shape:
            msg = f"by order, its {theirs} {tuple(tensor.shape)} would become {ours} {tuple(place.shape)}."
            raise ValueError(msg)
    return dict(zip(wanted, stored.values(), strict=True))
