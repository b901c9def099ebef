"""The parts that need no classifier: store, hard samples, saved maps, specifications."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aha.evaluation.data import read_keys
from aha.evaluation.explainers import short_labels, split_specs
from aha.evaluation.hard import HardOptions, hard_csv, hard_samples
from aha.evaluation.saved_maps import SavedMaps
from aha.evaluation.store import ResultStore, decode_bytes, decode_floats, encode_bytes, encode_floats


def test_store_keeps_whole_lines_and_passes_over_torn_ones(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.append({"kind": "a", "x": 1})
    store.append({"kind": "b"})
    store.close()
    (path,) = store.parts.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"kind":"torn","ke')  # killed while writing
    later = ResultStore(tmp_path, rank=3)
    later.append({"kind": "c"})
    assert [record["kind"] for record in later.read()] == ["a", "b", "c"]
    with pytest.raises(ValueError):
        later.append({"value": math.nan})


def test_floats_and_bytes_survive_json_exactly() -> None:
    values = np.array([0.1, np.nan, np.float32(1 / 3), -0.0])
    assert np.array_equal(decode_floats(encode_floats(values)), values, equal_nan=True)
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert np.array_equal(decode_bytes(encode_bytes(array)), array)


def sample(key: str, score: float, *, label: int = 1, predicted: int = 1, margin: float = 0.9) -> dict:
    about = {"explainer": "e", "protocol": "aha", "target": predicted, "probability": 0.5}
    return {"key": key, "score": score, "label": label, "predicted": predicted, "margin": margin, **about}


def test_hard_samples_are_ranked_worst_first_with_reasons(tmp_path: Path) -> None:
    samples = [
        sample("fine", 0.8),
        sample("low", -0.2),
        sample("lower", -0.3, predicted=2),
        sample("wrong", 0.7, predicted=2),
        sample("unknown", 0.75, label=-1, predicted=2),
        sample("close", 0.6, margin=0.01),
        sample("excluded", math.nan),
    ]
    hard = hard_samples(samples, HardOptions(share=0.3, threshold=-0.25))
    assert [(s["rank"], s["key"]) for s in hard] == [
        (1, "lower"),
        (2, "low"),
        (3, "close"),
        (4, "wrong"),
        (5, "excluded"),
    ]
    assert hard[0]["reasons"] == ["lowest share", "below threshold", "misclassified"]
    assert hard[3]["reasons"] == ["misclassified"] and hard[4]["reasons"] == ["no score"]
    path = tmp_path / "hard.csv"
    path.write_text(hard_csv(hard))
    assert read_keys(path) == {"low", "lower", "wrong", "close", "excluded"}
    assert next(csv.DictReader(path.open()))["reasons"] == "lowest share; below threshold; misclassified"


def test_keys_from_a_plain_list_and_from_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("a/b.png\n\nc,d.png\n")
    assert read_keys(path) == {"a/b.png", "c,d.png"}
    path.write_text("rank,key\n")
    with pytest.raises(ValueError, match="names no samples"):
        read_keys(path)


def test_saved_maps_in_every_format(tmp_path: Path) -> None:
    maps = {key: np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32) for i, key in enumerate("abcde")}
    (tmp_path / "sub").mkdir()
    np.save(tmp_path / "sub/a.npy", maps["a"])
    np.savez(tmp_path / "b.npz", map=maps["b"][None])
    save_file({"map": torch.from_numpy(maps["c"][None, None])}, tmp_path / "c.safetensors")
    np.savez(tmp_path / "many.npz", d=maps["d"], e=maps["e"])
    saved = SavedMaps(tmp_path)
    for key, name in {"a": "sub/a.png", "b": "b", "c": "c", "d": "d", "e": "e"}.items():
        assert torch.equal(saved.get(name, (4, 6))[0], torch.from_numpy(maps[key]))


def test_saved_maps_that_do_not_serve(tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.zeros((3, 3)))
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}]), allow_pickle=True)
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    (tmp_path / "broken.safetensors").write_bytes(b"123")
    saved = SavedMaps(tmp_path)
    for key, reason in {
        "small": "wrong size",
        "pickled": "unreadable",
        "broken": "unreadable",
        "x": "no saved",
    }.items():
        with pytest.raises(LookupError, match=reason):
            saved.get(key, (4, 6))
    with pytest.raises(ValueError, match="no .npy"):
        SavedMaps(tmp_path / "nowhere")


def test_specifications() -> None:
    assert split_specs(" a, rise(x=1,y=[2,3]) ,runs/demo/explainer") == [
        "a",
        "rise(x=1,y=[2,3])",
        "runs/demo/explainer",
    ]
    assert split_specs(["a,b", "c(d=1,e=2)"]) == ["a", "b", "c(d=1,e=2)"]
    assert short_labels(["runs/a/explainer", "runs/b/explainer", "cdam"]) == ["a/explainer", "b/explainer", "cdam"]
    assert short_labels(["runs/a/explainer", "captum:Saliency"]) == ["explainer", "captum:Saliency"]
