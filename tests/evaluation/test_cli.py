"""``python evaluate.py``: options, the config file, the short form of --classifier, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from aha.cli.evaluate import build_parser, main


def test_config_file_does_the_same_as_options(classifier_options, tmp_path: Path, capsys) -> None:
    common = {"data": "demo", "limit": 2, "device": "cpu", "report": False, "protocols": "aha(fractions=[0,0.5,1])"}
    classifier = {
        "name": classifier_options.name,
        "checkpoint_path": classifier_options.checkpoint_path,
        "image_size": 64,
        "model_kwargs": {"num_classes": 10},
    }
    config = tmp_path / "evaluate.yaml"
    config.write_text(
        yaml.safe_dump(
            common | {"explainers": ["random", "rise(num_masks=4)"], "classifier": classifier, "output": "?"}
        )
    )
    assert main(["--config", str(config), "--output", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "deletion ↓" in printed and "Report:" not in printed and "results.json" in printed
    arguments = [f"--{key}={str(value).lower()}" for key, value in common.items()]
    arguments += ["--explainers", "random,rise(num_masks=4)", "--output", str(tmp_path / "b")]
    arguments += [
        "--classifier",
        "test_vit",
        "--classifier.image_size",
        "64",
        "--classifier.model_kwargs.num_classes=10",
    ]
    arguments += ["--classifier.checkpoint_path", classifier_options.checkpoint_path]
    assert main(arguments) == 0
    a, b = (json.loads((tmp_path / name / "results.json").read_text()) for name in "ab")
    assert a["rows"] == b["rows"]


def test_a_wrong_name_is_one_line(classifier_options, tmp_path: Path, capsys) -> None:
    arguments = ["--explainers", "cdm", "--output", str(tmp_path), "--classifier", "test_vit", "--device", "cpu"]
    arguments += ["--classifier.image_size=64", "--classifier.pretrained=false"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("evaluate: ") and "cdam" in error and error.count("\n") == 1


def test_help_explains_every_option(capsys) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for option in ("--only", "--limit", "--chunk_size", "--refine.steps", "--hard.share", "--classifier.name"):
        assert option in text


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs/evaluation").glob("*.yaml")))
def test_configs_name_what_there_is(path: Path) -> None:
    from aha.baselines import BASELINES
    from aha.evaluation.evaluate import EvaluateOptions
    from aha.evaluation.protocols import get_protocol

    parser = build_parser()
    values = parser.instantiate(parser.parse_args(["--config", str(path)])).as_dict()
    values.pop("config")
    options = EvaluateOptions(**values)
    names = {spec.split("(")[0] for spec in options.explainers[1:]}
    assert {name for name in names if not name.startswith("captum:")} <= set(BASELINES)
    assert all(get_protocol(name) for name in options.protocols)
