"""The model card of an artefact: what it explains, how to use it, what was measured."""

from __future__ import annotations

from typing import Any


def model_card(config: dict[str, Any]) -> str:
    """Markdown with the hub's front matter, from an artefact's config."""
    backbone, preprocessing, options = config["backbone"], config["preprocessing"], config["explainer"]
    height, width = preprocessing["image_size"]
    needs_classifier = config["classifier"] is None
    load = 'aha.load("PATH_OR_HUB_ID"' + (", classifier=classifier)" if needs_classifier else ")")
    sections = [
        "---\nlibrary_name: aha\ntags:\n- explainability\n- attribution\n---",
        f"# Attribution head for {backbone['name']}",
        (
            "A trained head that says, in one forward pass of the frozen classifier, which pixels made it say what it "
            "said. Maps are signed; within one image, higher means more important to the class."
        ),
        f"""```python
import aha

explainer = {load}
maps = explainer.attribute(images)  # (batch, 3, {height}, {width}), RGB, [0, 1] or uint8 -> (batch, 1, …)
maps = explainer.attribute(images, targets=3)  # for a class other than the predicted one
```""",
        "## Classifier",
        _table(
            {
                "timm name": backbone["name"],
                "weights (sha256)": backbone["fingerprint"],
                "classes": backbone["num_classes"],
                "image size": f"{height} × {width}",
                "mean (subtracted inside)": preprocessing["mean"],
                "deviation (divided by inside)": preprocessing["std"],
            }
            | ({"encoder of the head": config["encoder"]["name"]} if config.get("encoder") else {})
        ),
        "The folder holds the head"
        + (" and the backbone." if config["weights"].get("backbone_file") else "; the backbone comes from its source.")
        + " Loading verifies both by hash.",
        "## Head",
        _table({key.replace("_", " "): value for key, value in options.items()}),
        "## Training",
        _table(config["training"]) or "Not recorded.",
        "## Measured",
        _table(config["metrics"]) or "Nothing measured yet. Judge it by insertion and deletion before relying on it.",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in config["versions"].items()) + ".",
    ]
    return "\n\n".join(sections) + "\n"


def _table(values: dict[str, Any]) -> str:
    if not values:
        return ""
    rows = [f"| {key} | {_short(value)} |" for key, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_short(entry) for entry in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
