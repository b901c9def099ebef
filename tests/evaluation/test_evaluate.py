"""Whole evaluations on a handful of pictures."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aha.data.demo import DemoDataset
from aha.evaluation.evaluate import EvaluationRefinement, build_run, evaluate
from aha.evaluation.protocols import run_protocol
from aha.evaluation.runner import run_evaluation
from aha.evaluation.store import ResultStore
from aha.metrics.localization import pointing_game

ROW = [
    "explainer",
    "protocol",
    "metric",
    "value",
    "low",
    "high",
    "n",
    "excluded",
    "higher_is_better",
    "difference",
    "difference_low",
    "difference_high",
]


def figures(results: dict) -> dict:
    return {(row["explainer"], row["protocol"], row["metric"]): row for row in results["rows"]}


def bad_maps(images, targets):
    """A user's own function: fine maps, but for the first sample of each batch NaN, for the second constant."""
    maps = images.mean(1, keepdim=True).clone()
    maps[0] = math.nan
    maps[1:2] = 0.5
    return maps


def test_figures_are_those_of_the_protocol_and_files_say_what_they_mean(options) -> None:
    chosen = options(explainers="centre_prior,mine=random(seed=3)", protocols=["aha", "perturbation"])
    results = evaluate(chosen)
    run = build_run(chosen)
    batch = DemoDataset("test").batch(range(6))
    images, masks = batch["image"].float() / 255, batch["mask"]
    for entry in run.entries:
        maps = entry.source.attribute(images)
        for protocol in run.protocols:
            expected = run_protocol(protocol, run.classifier, images, maps, labels=batch["label"])
            for metric, values in expected.metrics.items():
                row = figures(results)[entry.label, protocol.name, metric]
                assert row["value"] == pytest.approx(float(values.mean()), abs=1e-6)
        row = figures(results)[entry.label, "maps", "pointing_game"]
        assert row["value"] == float(pointing_game(maps, masks).mean())
    assert all(list(row) == ROW for row in results["rows"])
    assert {row["explainer"] for row in results["rows"]} == {"centre_prior", "mine"}
    first, other = (figures(results)[name, "aha", "deletion"] for name in ("centre_prior", "mine"))
    assert first["difference"] is None and not first["higher_is_better"] and first["n"] == 6
    assert other["difference"] == pytest.approx(other["value"] - first["value"], abs=1e-12)
    assert other["difference_low"] <= other["difference"] <= other["difference_high"]
    assert results["classifier"]["weights_sha256"] == run.classifier.fingerprint()
    assert results["protocols"]["perturbation"]["scored_class"] == "label"
    assert results["protocols"]["aha"]["forwards_per_image"] == pytest.approx(
        38 + 1 / 12
    )  # the constant reference once in all
    assert [entry["classifier_forwards_per_image"] for entry in results["explainers"]] == [0, 0]
    with Path(chosen.output, "samples.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 12
    mine = [float(row["aha.deletion"]) for row in rows if row["explainer"] == "mine"]
    assert np.mean(mine) == pytest.approx(other["value"], abs=1e-12)


def test_forwards_are_counted_whatever_path_an_explainer_takes(options) -> None:
    results = evaluate(options(explainers="cdam,input_gradient,gradskip,rise(num_masks=10)", limit=4))
    forwards = {e["explainer"]: e["classifier_forwards_per_image"] for e in results["explainers"]}
    assert forwards == {"cdam": 1, "input_gradient": 1, "gradskip": 1, "rise(num_masks=10)": 10}
    assert all(e["seconds_per_image"] > 0 for e in results["explainers"])


def test_missing_and_constant_maps_are_counted(options) -> None:
    results = evaluate(options(explainers=f"centre_prior,{__name__}:bad_maps", batch_size=3))
    row = figures(results)[f"{__name__}:bad_maps", "aha", "insertion"]
    assert (row["n"], row["excluded"]) == (4, 2)
    about = results["explainers"][1]
    assert about["missing_maps"] == {"map not finite": 2} and about["constant_maps"] == 2


def test_saved_maps_and_their_faults(options, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for i in range(4):
        size = 32 if i == 3 else 64
        np.save(saved / f"demo-test-1-{i:06d}.npy", np.random.default_rng(i).normal(size=(size, size)))
    label = f"maps:{saved}"
    results = evaluate(options(explainers=f"centre_prior,{label}"))
    row = figures(results)[label, "aha", "deletion"]
    assert (row["n"], row["excluded"]) == (3, 3)
    reasons = results["explainers"][1]["missing_maps"]
    assert reasons["no saved map"] == 2 and any("wrong size" in reason for reason in reasons)


def test_a_stopped_run_goes_on_and_ends_the_same(options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(options(output=str(tmp_path / "whole")))
    stopped = options(output=str(tmp_path / "stopped"))
    calls = []

    def stop(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return run_protocol(*args, **kwargs)

    monkeypatch.setattr("aha.evaluation.runner.run_protocol", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(stopped)
    monkeypatch.undo()
    (part,) = Path(stopped.output, "parts").glob("*.jsonl")
    before = part.read_bytes()
    resumed = evaluate(stopped)
    assert part.read_bytes() == before
    assert resumed["rows"] == whole["rows"]
    # Nothing is left to do: no classifier call at all.
    run = build_run(stopped)
    monkeypatch.setattr("aha.evaluation.runner._run_block", lambda *_, **__: pytest.fail("computed again"))
    keys = run_evaluation(run, ResultStore(stopped.output))
    assert len(keys) == 6


def test_more_explainers_protocols_and_samples_later_reuse_what_is_there(options, tmp_path: Path) -> None:
    evaluate(options(explainers="random", limit=3))
    grown = options(explainers="random,centre_prior", protocols="aha(fractions=[0,0.5,1]),perturbation", limit=6)
    results = evaluate(grown)
    fresh = evaluate(replace(grown, output=str(tmp_path / "fresh")))
    assert len(results["rows"]) == len(fresh["rows"])
    for row, other in zip(results["rows"], fresh["rows"], strict=True):
        assert row["n"] == other["n"] and row["value"] == pytest.approx(other["value"], abs=1e-6)
    fewer = evaluate(replace(grown, limit=3))
    assert figures(fewer)["random", "aha", "deletion"]["n"] == 3


def test_figures_agree_on_1_2_and_4_processes(options, tmp_path: Path) -> None:
    runs = [
        evaluate(options(explainers="cdam,random", output=str(tmp_path / str(n)), processes=n, limit=7))
        for n in (1, 2, 4)
    ]
    for other in runs[1:]:
        assert other["data"]["samples"] == 7
        for row, same in zip(runs[0]["rows"], other["rows"], strict=True):
            assert row["n"] == same["n"]
            for name in ("value", "low", "high", "difference", "difference_low", "difference_high"):
                assert row[name] == pytest.approx(same[name], abs=1e-6), (row["metric"], name)


def test_only_the_hard_ones(options, tmp_path: Path) -> None:
    chosen = options()
    evaluate(chosen)
    hard = Path(chosen.output, "hard.csv")
    keys = [row["key"] for row in csv.DictReader(hard.open())]
    again = evaluate(replace(chosen, only=str(hard), limit=None, output=str(tmp_path / "again")))
    assert again["data"]["samples"] == len(keys)
    stranger = tmp_path / "stranger.txt"
    stranger.write_text("nobody\n")
    with pytest.raises(ValueError, match="'nobody'"):
        evaluate(replace(chosen, only=str(stranger), limit=None))


def test_pictures_without_labels_or_masks(options, pictures: Path) -> None:
    (pictures / "dog/f.png").write_bytes(b"not a picture")
    results = evaluate(
        options(data=str(pictures), protocols="perturbation", limit=None, explainers="random,centre_prior")
    )
    assert results["protocols"]["perturbation"]["scored_class"] == "explained"  # 2 folders, 10 classes: no labels
    row = figures(results)["random", "perturbation", "positive_perturbation"]
    assert (row["n"], row["excluded"]) == (5, 1)
    assert sum(results["data"]["failed"].values()) == 1 and "dog/f.png" in results["data"]["failed_keys"]
    assert not any(metric == "pointing_game" for _, _, metric in figures(results))


def test_refinement_stands_beside_the_unrefined(options) -> None:
    refine = EvaluationRefinement(steps=1, select="hard", grids=[4], num_fractions=2)
    results = evaluate(options(explainers="random,centre_prior", refine=refine))
    names = [entry["explainer"] for entry in results["explainers"]]
    assert names == ["random", "random + 1 steps", "centre_prior"]
    assert results["explainers"][1]["base"] == "random"
    assert figures(results)["random + 1 steps", "aha", "insertion"]["n"] == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocols": "ahah"}, "Unknown protocol 'ahah'"),
        ({"protocols": "aha,aha"}, "each once"),
        ({"explainers": "gradskp"}, "gradskip"),
        ({"explainers": "random,random"}, "called 'random'"),
        ({"explainers": ","}, "No explainers"),
        ({"explainers": "/nowhere/explainer"}, "no explainer at"),
        ({"data": "nowhere"}, "nowhere"),
        ({"limit": 0}, "limit"),
    ],
)
def test_wrong_names_are_said_before_anything_is_computed(options, changes: dict, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(options(**changes))


def test_one_evaluation_at_a_time_per_folder(options) -> None:
    import fcntl

    chosen = options()
    Path(chosen.output).mkdir()
    with Path(chosen.output, ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="Another evaluation"):
            evaluate(chosen)


def test_results_are_plain_json(options) -> None:
    chosen = options(explainers="object_mask,random", limit=2)
    evaluate(chosen)
    text = Path(chosen.output, "results.json").read_text()
    assert "NaN" not in text and json.loads(text)["settings"]["explainers"] == "object_mask,random"
    assert torch.__version__.split("+")[0] in text
