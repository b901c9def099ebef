"""The artefact: a folder with the head's weights, a config that rebuilds the explainer, and a model card.

``config.json`` is the commit point of a save: it names the SHA-256 of the weights that belong to it, and carries one of
itself. New weights wait beside the old ones until the new config is in place, so a process killed at any moment leaves
either the old artefact or the new one. Nothing here unpickles.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError
from timm.data import resolve_model_data_config
from torch import Tensor

from aha.backbone import FrozenBackbone
from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer
from aha.export.atomic import replace, write_atomically
from aha.export.card import model_card

FORMAT_VERSION = 1
KIND = "aha-explainer"
CONFIG, WEIGHTS, PENDING, CARD = "config.json", "model.safetensors", "model.safetensors.pending", "README.md"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def explainer_config(
    explainer: AmortizedExplainer, *, training: dict[str, Any] | None = None, metrics: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Plain values from which :func:`build_from_config` rebuilds an explainer, its weights aside.

    Args:
        explainer: trained or not.
        training: summary of the training (steps, data, objective …), plain values; default: the loaded one.
        metrics: measured figures by name, plain values; default: the loaded ones.
    """
    classifier = explainer.classifier
    try:
        rebuild = classifier.config()
    except ValueError:  # a user's own module: only its owner can build it, and passes it to load again
        rebuild = None
    fingerprint = classifier.fingerprint() if rebuild is None else rebuild["fingerprint"]
    known = resolve_model_data_config(classifier.model) if hasattr(classifier.model, "pretrained_cfg") else {}
    side = classifier.image_size[0]
    return {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "explainer": dict(explainer.options),
        "classifier": rebuild,
        "encoder": None if explainer.encoder is None else explainer.encoder.config(),
        "backbone": {
            "name": classifier.name,
            "fingerprint": fingerprint,
            "link": classifier.link,
            "num_classes": classifier.num_classes,
            "class_names": classifier.class_names,
            "feature_channels": list(classifier.feature_channels),
            "feature_strides": [round(side / grid[0]) for grid in classifier.feature_grids],
        },
        "preprocessing": {
            "mean": classifier.mean.flatten().tolist(),
            "std": classifier.std.flatten().tolist(),
            "image_size": list(classifier.image_size),
            "interpolation": known.get("interpolation", "bicubic"),
            "crop_pct": known.get("crop_pct", 1.0),
        },
        "training": explainer.record.get("training", {}) if training is None else training,
        "metrics": explainer.record.get("metrics", {}) if metrics is None else metrics,
        "versions": {"aha": _release(), "torch": str(torch.__version__), "timm": timm.__version__},
    }


def build_from_config(
    config: dict[str, Any],
    head: dict[str, Tensor],
    *,
    classifier: FrozenClassifier | None = None,
    checkpoint_path: str | Path | None = None,
    encoder_path: str | Path | None = None,
    device: torch.device | str | None = None,
) -> AmortizedExplainer:
    """Rebuild an explainer; artefacts and training checkpoints both come through here.

    Args:
        config: as from :func:`explainer_config`.
        head: the head's state dict, without a prefix.
        classifier: the explained classifier, if it's at hand already; else it is rebuilt from the config.
        checkpoint_path: local backbone weights in place of the recorded source.
        encoder_path: likewise for a separate encoder.
        device: where to put it; default: where the classifier is.

    Raises:
        ValueError: another format, a classifier other than the recorded one, or a head that doesn't fit.
        FileNotFoundError: the recorded local weights aren't on this machine.
    """
    check_format(config)
    backbone = config["backbone"]
    if classifier is None:
        classifier = _rebuild_classifier(config, checkpoint_path)  # verifies the hash
    elif (found := classifier.fingerprint()) != backbone["fingerprint"]:
        msg = (
            f"This explainer was trained for {backbone['name']} (weights of sha256 {backbone['fingerprint'][:12]}…), "
            f"but got {classifier.name} with {found[:12]}…. Load it with its own classifier."
        )
        raise ValueError(msg)
    preprocessing = config["preprocessing"]
    for name, here in (("mean", classifier.mean), ("std", classifier.std)):
        if not torch.equal(here.flatten().cpu(), torch.tensor(preprocessing[name], dtype=torch.float32)):
            msg = f"The classifier normalises with {name} {here.flatten().tolist()}, recorded: {preprocessing[name]}."
            raise ValueError(msg)
    if classifier.link != backbone["link"]:
        msg = f"The classifier's link is {classifier.link!r}, the explainer was trained for {backbone['link']!r}."
        raise ValueError(msg)
    encoder = None
    if config.get("encoder"):
        encoder = FrozenBackbone.from_config(config["encoder"], checkpoint_path=encoder_path)
        encoder.to(classifier.mean.device)
    explainer = AmortizedExplainer(classifier, encoder=encoder, **{"upsampling": "bilinear"} | config["explainer"])
    try:
        explainer.head.load_state_dict(head, strict=True)
    except (RuntimeError, AttributeError, TypeError) as error:
        msg = f"The head's weights don't fit {backbone['name']} with {config['explainer']}: {str(error)[:600]}"
        raise ValueError(msg) from error
    explainer.head.eval()
    explainer.record = {"training": config["training"], "metrics": config["metrics"]}
    return explainer if device is None else explainer.to(device)


def save_artifact(
    explainer: AmortizedExplainer,
    folder: str | Path,
    *,
    training: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    with_backbone: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an artefact; an older one in the folder is replaced in one step.

    Args:
        explainer: what to save.
        folder: created if missing.
        training: see :func:`explainer_config`.
        metrics: see :func:`explainer_config`.
        with_backbone: also store the classifier's weights, so that loading needs no other source.
        dtype: of the stored head; it computes in float32 all the same.

    Returns:
        The folder.
    """
    folder = Path(folder)
    config = explainer_config(explainer, training=training, metrics=metrics)
    folder.mkdir(parents=True, exist_ok=True)
    head = {key: _storable(value, dtype) for key, value in explainer.head.state_dict().items()}
    data = safetensors.torch.save(head, metadata={"format": "pt", "kind": KIND})
    config["weights"] = {"file": WEIGHTS, "sha256": hashlib.sha256(data).hexdigest(), "dtype": str(dtype)[6:]}
    if with_backbone:
        if config["classifier"] is None:
            msg = f"{explainer.classifier.name} was not built by FrozenClassifier.from_timm: it can't be stored along."
            raise ValueError(msg)
        parts = {"backbone": explainer.classifier, "encoder": explainer.encoder}
        for part, module in parts.items():
            if module is not None:
                fingerprint = config[part]["fingerprint"]
                config["weights"][f"{part}_file"] = name = f"{part}-{fingerprint[:16]}.safetensors"
                state = {key: _storable(value) for key, value in module.model.state_dict().items()}
                write_atomically(folder / name, safetensors.torch.save(state, metadata={"format": "pt"}))
    config["sha256"] = config_hash(config)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"

    _finish_interrupted_save(folder)
    write_atomically(folder / PENDING, data)
    write_atomically(folder / CONFIG, text)
    replace(folder / PENDING, folder / WEIGHTS)
    write_atomically(folder / CARD, model_card(config))
    return folder


def load_artifact(
    folder: str | Path,
    *,
    classifier: FrozenClassifier | None = None,
    checkpoint_path: str | Path | None = None,
    device: torch.device | str | None = None,
) -> AmortizedExplainer:
    """Load an artefact's folder; see :func:`load_explainer`."""
    folder = Path(folder)
    config = read_config(folder)
    data = _read_weights(folder, config)
    try:
        head = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        msg = f"{folder / WEIGHTS} is not a safetensors file: {error}"
        raise ValueError(msg) from error
    stored = {
        part: folder / Path(config["weights"][f"{part}_file"]).name
        for part in ("backbone", "encoder")
        if f"{part}_file" in config["weights"]
    }
    return build_from_config(
        config,
        head,
        classifier=classifier,
        checkpoint_path=checkpoint_path or stored.get("backbone"),
        encoder_path=stored.get("encoder"),
        device=device,
    )


def load_explainer(
    source: str | Path,
    *,
    classifier: FrozenClassifier | None = None,
    checkpoint_path: str | Path | None = None,
    device: torch.device | str | None = None,
) -> AmortizedExplainer:
    """Load a trained explainer. ``aha.load`` is this function.

    Args:
        source: an artefact's folder, a training checkpoint (``.ckpt``), or a Hugging Face hub id ``owner/name``.
        classifier: the explained classifier, if it's at hand already; its weights are verified.
        checkpoint_path: a local file with the backbone's weights; nothing is then fetched.
        device: where to put the explainer.

    Raises:
        FileNotFoundError: nothing there, or a part is missing.
        ValueError: damaged, foreign or newer files, or another backbone than the one trained for.
    """
    path = Path(source).expanduser()
    options = {"classifier": classifier, "checkpoint_path": checkpoint_path, "device": device}
    if path.is_dir():
        return load_artifact(path, **options)
    if path.is_file():
        if path.name in (CONFIG, WEIGHTS):
            return load_artifact(path.parent, **options)
        return _load_checkpoint(path, **options)
    if HUB_ID.fullmatch(str(source)):
        return load_artifact(_download(str(source)), **options)
    msg = f"There is no explainer at {str(source)!r}: expected an artefact's folder, a .ckpt file or a hub id."
    raise FileNotFoundError(msg)


def read_config(folder: Path) -> dict[str, Any]:
    """Read and verify an artefact's ``config.json``."""
    path = folder / CONFIG
    if not path.is_file():
        inner = [str(p.parent) for p in sorted(folder.glob("*/" + CONFIG))][:3]
        inner += [str(p) for p in sorted(folder.glob("**/*.ckpt"))][:3]
        hint = f" Did you mean {' or '.join(inner)}?" if inner else ""
        msg = f"{folder} holds no {CONFIG}: it is not an explainer's artefact.{hint}"
        raise FileNotFoundError(msg)
    try:
        config = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        msg = f"{path} is damaged (no valid JSON): {error}"
        raise ValueError(msg) from error
    check_format(config, path)
    if config.get("sha256") != config_hash(config):
        msg = f"{path} was changed or damaged after it was saved: its content doesn't match its own sha256."
        raise ValueError(msg)
    return config


def check_format(config: Any, path: Path | str = "The config") -> None:
    """Refuse what isn't an explainer's config, or one of a format that this release doesn't know."""
    if not isinstance(config, dict) or config.get("kind") != KIND:
        msg = f"{path} does not describe an aha explainer (its 'kind' is not {KIND!r})."
        raise ValueError(msg)
    if config.get("format_version") != FORMAT_VERSION:
        msg = (
            f"{path} has format version {config.get('format_version')!r}; this release of aha ({_release()}) "
            f"reads version {FORMAT_VERSION}. It was written by aha {config.get('versions', {})}."
        )
        raise ValueError(msg)


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON without the field ``sha256``."""
    content = {key: value for key, value in config.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_weights(folder: Path, config: dict[str, Any]) -> bytes:
    """The weights that the config names, from where a save put them or, if it was interrupted, from where they wait."""
    present = [folder / name for name in (WEIGHTS, PENDING) if (folder / name).is_file()]
    for path in present:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == config["weights"]["sha256"]:
            return data
    if not present:
        msg = f"{folder / WEIGHTS} is missing."
        raise FileNotFoundError(msg)
    msg = f"{folder / WEIGHTS} is truncated, damaged or of another artefact: its sha256 is not the one in {CONFIG}."
    raise ValueError(msg)


def _finish_interrupted_save(folder: Path) -> None:
    pending = folder / PENDING
    if not pending.is_file():
        return
    try:
        expected = read_config(folder)["weights"]["sha256"]
    except (ValueError, FileNotFoundError):
        return
    if hashlib.sha256(pending.read_bytes()).hexdigest() == expected:
        replace(pending, folder / WEIGHTS)


def _load_checkpoint(path: Path, **options: Any) -> AmortizedExplainer:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen types for damaged, foreign and unsafe files
        msg = (
            f"{path} is not a readable training checkpoint (damaged, foreign, or it asks for code): {str(error)[:300]}"
        )
        raise ValueError(msg) from error
    if not isinstance(checkpoint, dict) or not {"explainer", "state_dict"} <= checkpoint.keys():
        msg = f"{path} is a checkpoint of something else: it has no 'explainer' entry."
        raise ValueError(msg)
    state = checkpoint["state_dict"]
    head = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    return build_from_config(checkpoint["explainer"], head, **options)


def _rebuild_classifier(config: dict[str, Any], checkpoint_path: str | Path | None) -> FrozenClassifier:
    if config["classifier"] is None:
        msg = (
            f"The explained classifier {config['backbone']['name']} was not a timm model by name: build it, and pass "
            "it as aha.load(path, classifier=FrozenClassifier(…))."
        )
        raise ValueError(msg)
    path = None if checkpoint_path is None else str(checkpoint_path)
    try:
        return FrozenClassifier.from_config(config["classifier"], checkpoint_path=path)
    except FileNotFoundError as error:
        msg = f"{error} It holds the backbone of this explainer: pass a copy as checkpoint_path=…"
        raise FileNotFoundError(msg) from error


def _download(repository: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        msg = f"There is no folder {repository!r}, and to fetch it from the hub, install huggingface_hub (aha[hub])."
        raise FileNotFoundError(msg) from error
    try:
        return snapshot_download(
            repository, allow_patterns=[CONFIG, WEIGHTS, CARD, "backbone-*.safetensors", "encoder-*.safetensors"]
        )
    except Exception as error:  # offline, no such repository, no access: the hub has a type for each
        msg = f"There is no folder {repository!r}, and the hub did not yield it: {str(error)[:200]}"
        raise FileNotFoundError(msg) from error


def _storable(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    value = value.detach().cpu()
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return value.contiguous().clone()


def _release() -> str:
    from aha import __version__  # the package imports this module

    return __version__
