"""Cut-out photographs pasted on photographs: images, labels and exact object masks, from folders that a user names.

The cut-outs are RGBA files, for instance the stamps of Debian's ``tuxpaint-stamps-default`` (GPL-2), whose photographs
of animals, plants and things :data:`STAMP_CLASSES` sorts into twelve classes; drawings are left out. Backgrounds are a
folder or shards of any photographs, or by default those that scikit-image and scikit-learn bring along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

Split = Literal["train", "val", "test"]
STAMPS = "/usr/share/tuxpaint/stamps"  # where Debian's package puts them
SHARE = 0.2  # of the cut-outs of each class, and of the backgrounds, for validation and again for testing
LONG_SIDE = (0.45, 0.95)  # of a cut-out, as a share of the image's side
ROOM = 1.4  # side of a background over that of the image cropped from it
OPAQUE = 127  # alpha above this is the object

_MAMMAL_KINDS = ("apes", "bears", "bovines", "camel", "cats", "deer", "dogs", "equines", "rodents")
_MAMMALS = ("badger", "elephant", "ferret", "giraffe", "hippopotamus", "pig*", "rabbit*", "rhino*", "wildboar")
_TOOLS = ("hammer", "mallet*", "paintbrush*", "plyers", "saw", "spade", "wrench*")
_INSECTS = ("bee", "fly", "grasshopper", "hornet", "hoverfly", "mantis", "xanthia")
STAMP_CLASSES: dict[str, tuple[str, ...]] = {
    "ball": ("sports/*ball.png", "sports/soccer.png"),
    "bird": ("animals/birds/*.png",),
    "fish": tuple(f"animals/fish/*{kind}.png" for kind in ("groper", "fish", "trout", "wrasse")),
    "flower": ("plants/flowers/*.png",),
    "fruit or vegetable": ("food/fruit/*.png", "food/vegetables/*.png"),
    "gravestone": ("seasonal/halloween/grave-*.png",),
    "insect": tuple(f"animals/insects/{kind}.png" for kind in _INSECTS),
    "mammal": tuple(f"animals/mammals/{kind}/*.png" for kind in _MAMMAL_KINDS)
    + tuple(f"animals/mammals/{kind}.png" for kind in _MAMMALS)
    + ("animals/marsupials/*.png",),
    "motor vehicle": ("vehicles/auto/*.png", "vehicles/emergency/firetruck.png", "vehicles/masstransit/*.png")
    + ("vehicles/garbagetruck.png", "vehicles/race/*.png"),
    "planet": ("space/planets/[1-9]_*.png", "space/moon/*.png"),
    "string instrument": ("hobbies/music/string/*.png",),
    "tool": tuple(f"household/tools/{kind}.png" for kind in _TOOLS),
}


class CutoutDataset(Dataset[dict[str, Any]]):
    """One cut-out on one background, with its class and exact mask.

    Sample i depends on (split, seed, i) and the two folders alone: not on workers, order, length or global random
    state. Classes are drawn evenly, then one of the class's cut-outs, its size, place and side, and a background. No
    cut-out and no background is in two splits: each class's files, and the backgrounds, are shared out by a hash of
    their names, 20 % for validation, 20 % for testing, one of each at least. Near-duplicates (a gnu from two sides)
    can fall apart.

    An item is ``{"image": uint8 (3, size, size), "label": int, "mask": bool (1, size, size), "key": str}``; the mask is
    where the pasted alpha exceeds one half. What the background shows has no say in the label.

    Args:
        split: which cut-outs and backgrounds to draw from.
        stamps: folder of RGBA cut-outs.
        backgrounds: folder or shards of photographs; default: those of scikit-image and scikit-learn.
        size: side in pixels.
        length: number of samples; a longer set starts with the samples of a shorter one.
        seed: another seed gives other scenes of the same cut-outs.
        classes: glob patterns below ``stamps`` for each class, in the order of the labels.

    Raises:
        FileNotFoundError: there is no such folder of cut-outs.
        ValueError: a class with fewer than three cut-outs, or fewer than three backgrounds.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        stamps: str | Path = STAMPS,
        backgrounds: str | None = None,
        size: int = 112,
        length: int = 512,
        seed: int = 0,
        classes: Mapping[str, Sequence[str]] = STAMP_CLASSES,
    ) -> None:
        if split not in get_args(Split):
            msg = f"split must be one of {', '.join(map(repr, get_args(Split)))}, got {split!r}."
            raise ValueError(msg)
        if length < 1 or size < 16:
            msg = f"length must be at least 1 and size at least 16 pixels, got {length} and {size}."
            raise ValueError(msg)
        self.split, self.size, self.length, self.seed = split, size, length, seed
        self.classes = list(classes)
        files = find_cutouts(stamps, classes)
        self.files = [share(files[name], split) for name in self.classes]
        self.cutouts = [[_load(Path(stamps).expanduser() / name, size) for name in names] for names in self.files]
        known = photographs(backgrounds, round(size * ROOM))
        if len(known) < 3:
            msg = f"Only {len(known)} backgrounds in {backgrounds or 'the packages'}: three splits need three."
            raise ValueError(msg)
        self.background_keys = share(list(known), split)
        self.backgrounds = [known[key] for key in self.background_keys]
        digest = hashlib.sha256(f"cutout/{split}/{seed}".encode()).digest()
        self._stream = int.from_bytes(digest[:8], "little")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(self.length)[index]  # raises IndexError, understands negative indices
        rng = np.random.default_rng([self._stream, index])
        label = int(rng.integers(len(self.classes)))
        cutout = self.cutouts[label][rng.integers(len(self.cutouts[label]))]
        background = self.backgrounds[rng.integers(len(self.backgrounds))]
        side = rng.uniform(*LONG_SIDE) * self.size / max(cutout.size)
        width, height = (max(round(side * edge), 2) for edge in cutout.size)
        top, left = (int(rng.integers(room + 1)) for room in (background.shape[1] - self.size,) * 2)
        y, x = (int(rng.integers(self.size - edge + 1)) for edge in (height, width))
        turned, mirrored = rng.random(2) < 0.5
        # Premultiplied, so that colours under transparent pixels can't bleed in.
        pasted = (ImageOps.mirror(cutout) if turned else cutout).convert("RGBa").resize((width, height), _FILTER)
        layer = torch.from_numpy(np.array(pasted)).permute(2, 0, 1)  # colours times alpha, and alpha
        image = background[:, top : top + self.size, left : left + self.size].clone()
        image = image.flip(2) if mirrored else image
        there = image[:, y : y + height, x : x + width]
        there.copy_((layer[:3] + there * (1 - layer[3:].float() / 255)).round().clamp(0, 255).byte())
        mask = torch.zeros(1, self.size, self.size, dtype=torch.bool)
        mask[:, y : y + height, x : x + width] = layer[3:] > OPAQUE
        return {"image": image, "label": label, "mask": mask, "key": f"cutout-{self.split}-{index:06d}"}


_FILTER = Image.Resampling.BICUBIC


def find_cutouts(stamps: str | Path, classes: Mapping[str, Sequence[str]] = STAMP_CLASSES) -> dict[str, list[str]]:
    """Files of each class below a folder, relative to it, sorted; mirror images of another file are left out."""
    root = Path(stamps).expanduser()
    if not root.is_dir():
        msg = (
            f"There is no folder of cut-outs {str(root)!r}: install Debian's tuxpaint-stamps-default, or unpack it "
            "(dpkg -x) and name its folder usr/share/tuxpaint/stamps."
        )
        raise FileNotFoundError(msg)
    found: dict[str, list[str]] = {}
    for name, patterns in classes.items():
        paths = {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}
        found[name] = sorted(path for path in paths if not path.endswith(("_mirror.png", "_flip.png")))
    short = [f"{name} {len(files)}" for name, files in found.items() if len(files) < 3]
    if short:
        msg = f"Too few cut-outs below {str(root)!r} (three splits need three of each class): {', '.join(short)}."
        raise ValueError(msg)
    return found


def share(names: Sequence[str], split: Split) -> list[str]:
    """One split's share of names, by their hashes: fixed, whatever the seed; no name is in two splits."""
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    held = max(round(SHARE * len(order)), 1)
    parts = {"val": order[:held], "test": order[held : 2 * held], "train": order[2 * held :]}
    return sorted(parts[split])


@lru_cache(maxsize=2)
def photographs(where: str | None, side: int) -> dict[str, Tensor]:
    """Photographs by key: the central square of each, uint8 ``(3, side, side)``; kept in memory."""
    from aha.data.folder import FolderDataset
    from aha.data.pictures import BadPicture
    from aha.data.pipeline import Recipe, Slot, decode
    from aha.data.shards import ShardSource
    from aha.data.sources import expand_urls

    if where is None:
        return {key: _square(array, side) for key, array in _installed().items()}
    path = Path(where).expanduser()
    folder = path.is_dir() and not any(path.glob("*.tar"))
    source = FolderDataset(path) if folder else ShardSource(shards=tuple(expand_urls(where)))
    recipe = Recipe(image_size=(side, side), batch_size=1, resize="crop")
    found = {}
    for sample in source.evaluate(Slot()):
        try:
            found[sample.key] = decode(sample, recipe)["image"]
        except BadPicture as error:
            msg = f"Background {sample.key} in {where!r} can't be read: {error}."
            raise ValueError(msg) from error
    return found


def _installed() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_sample_images

    bunch = load_sample_images()
    found = {Path(name).name: image for name, image in zip(bunch.filenames, bunch.images, strict=True)}
    try:
        from skimage import data
    except ModuleNotFoundError as error:
        msg = "The default backgrounds need scikit-image: pip install -e '.[cutouts]', or name a folder of photographs."
        raise ImportError(msg) from error
    found |= {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    return found | {"motorcycle": data.stereo_motorcycle()[0]}


def _square(array: np.ndarray, side: int) -> Tensor:
    picture = ImageOps.fit(Image.fromarray(array), (side, side), _FILTER)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


@lru_cache(maxsize=2048)
def _load(path: Path, size: int) -> Image.Image:
    """A cut-out, cropped to what is not transparent, no larger than it can ever be pasted."""
    with Image.open(path) as picture:
        cutout = picture.convert("RGBA")
    box = cutout.getchannel("A").getbbox()
    if box is None:
        msg = f"{path} is transparent all over: no cut-out."
        raise ValueError(msg)
    cutout = cutout.crop(box)
    cutout.thumbnail((size, size))
    return cutout
