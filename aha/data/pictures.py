"""Any picture file to upright RGB uint8, or a clear error: the one door by which files become arrays."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

Resize = Literal["squash", "crop"]
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none that starts another program (EPS does)
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 89_478_485  # Pillow's own warning level (a 256 MB RGB picture); beyond it, refused
BACKGROUND = (255, 255, 255)  # under transparent pixels, as viewers show them
REDUCING_GAP = 2.0  # decode JPEGs at a reduced scale that stays at least this many times above the target
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_ORIENTATION = 0x0112  # EXIF tag; values above 4 swap the sides
_OUR_BUGS = (TypeError, AttributeError, NameError, ImportError, MemoryError, NotImplementedError)


class BadPicture(ValueError):
    """A file that can't serve as a picture (corrupt, truncated, empty, too large, not a picture)."""


def read_picture(
    source: bytes | str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    resize: Resize = "squash",
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode a file to upright RGB.

    Grey, palette, CMYK and 16-bit pictures are converted, EXIF orientation is applied, transparent pixels are laid on
    white, and of an animation the first frame is taken.

    Args:
        source: encoded bytes, or a path.
        size: ``(height, width)`` of the result; ``None`` keeps the picture's own.
        resize: ``"squash"`` to ``size`` without crop (as the paper trains), or ``"crop"``: the largest central part
            of the right aspect, resized. Bicubic, antialiased.
        max_pixels: refuse pictures with more pixels, before decoding them.

    Returns:
        uint8 array. Shape: ``(height, width, 3)``.

    Raises:
        BadPicture: if the file can't be read as a whole picture, naming the reason.
    """
    pixels, _ = read_sized(source, size=size, resize=resize, max_pixels=max_pixels)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def read_sized(
    source: bytes | str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    resize: Resize = "squash",
    max_pixels: int = MAX_PIXELS,
) -> tuple[Tensor, tuple[int, int]]:
    """:func:`read_picture` as a tensor, channels first, and the picture's own upright ``(height, width)``."""
    with _reasons():
        picture = _open(source, max_pixels)
        width, height = picture.size
        if size is not None and picture.format in ("JPEG", "MPO"):
            turned = picture.getexif().get(_ORIENTATION, 1) > 4
            picture.draft(None, _draft_size(picture.size, size[::-1] if turned else size, resize))
        drawn = picture.size
        picture = _to_rgb(picture)
        if picture.size != drawn:  # turned upright
            width, height = height, width
        pixels = torch.from_numpy(np.asarray(picture)).permute(2, 0, 1)  # read-only, and only read
        if size is not None:
            left, top, right, bottom = _box(picture.size, size, resize)
            pixels = pixels[:, top:bottom, left:right]
            if pixels.shape[1:] != tuple(size):  # within one grey level of Pillow's, in a quarter of its time
                pixels = F.interpolate(pixels[None], size=tuple(size), mode="bicubic", antialias=True)[0]
        return pixels.contiguous(), (height, width)


def read_mask(
    source: bytes | str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    resize: Resize = "squash",
    of: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode an object mask: zero is background, every other value (grey level or palette index) the object.

    Args:
        source: encoded bytes, or a path.
        size: ``(height, width)`` of the result, nearest neighbour; ``None`` keeps the mask's own.
        resize: as in :func:`read_picture`, so that the mask stays on its picture.
        of: ``(height, width)`` that the mask must have, its picture's own.
        max_pixels: refuse masks with more pixels.

    Returns:
        bool array. Shape: ``(height, width)``.

    Raises:
        BadPicture: if the file can't be read as a whole picture.
    """
    with _reasons():
        mask = _open(source, max_pixels)
        if of is not None and mask.size != (of[1], of[0]):
            msg = "mask and picture differ in size"
            raise BadPicture(msg)
        if mask.mode not in ("1", "L", "P", "I", *_SIXTEEN_BIT):
            mask = mask.convert("RGB").convert("L")
        values = np.asarray(mask) != 0
        if size is not None and values.shape != tuple(size):
            box = _box((values.shape[1], values.shape[0]), size, resize)
            picture = Image.fromarray(values.astype(np.uint8))
            values = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.NEAREST, box=box)) != 0
        return values


class _reasons:
    """Turns whatever Pillow raises over broken bytes into :class:`BadPicture`; our own bugs pass through."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata, thousands a day

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._caught.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, (BadPicture, *_OUR_BUGS)):
            msg = f"unreadable picture: {str(error).split(' <')[0] or type(error).__name__}"
            raise BadPicture(msg) from error


def _open(source: bytes | str | os.PathLike[str], max_pixels: int) -> Image.Image:
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    if not data:
        msg = "empty file (0 bytes)"
        raise BadPicture(msg)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        msg = f"not a picture of a supported format ({', '.join(FORMATS)})"
        raise BadPicture(msg) from error
    if picture.width * picture.height > max_pixels:
        msg = f"decompression bomb? {picture.width}×{picture.height} pixels, above the limit of {max_pixels}"
        raise BadPicture(msg)
    return picture


def _to_rgb(picture: Image.Image) -> Image.Image:
    file_format = picture.format
    picture.load()  # raises when the file is truncated
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode in _SIXTEEN_BIT or (picture.mode == "I" and file_format in ("PNG", "PPM")):
        wide = np.asarray(picture).astype(np.float32)
        picture = Image.fromarray(np.rint(wide / 257.0).clip(0, 255).astype(np.uint8))  # 65535 → 255
    elif picture.mode in ("I", "F"):
        msg = f"{file_format} of mode {picture.mode!r} has no agreed white level; save it with 8 or 16 bits"
        raise BadPicture(msg)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, (*BACKGROUND, 255))
        return Image.alpha_composite(ground, picture).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _draft_size(own: tuple[int, int], size: tuple[int, int], resize: Resize) -> tuple[int, int]:
    """The least ``(width, height)`` that a JPEG may be decoded at without harm to the resize that follows."""
    height, width = size
    if resize == "crop":  # the cropped part, not the whole, must stay large enough
        scale = max(width / own[0], height / own[1])
        width, height = own[0] * scale, own[1] * scale
    return int(width * REDUCING_GAP), int(height * REDUCING_GAP)


def _box(own: tuple[int, int], size: tuple[int, int], resize: Resize) -> tuple[int, int, int, int]:
    """The part ``(left, top, right, bottom)`` of a picture of ``own`` ``(width, height)`` that is kept."""
    if resize == "squash":
        return (0, 0, *own)
    scale = min(own[0] / size[1], own[1] / size[0])
    width, height = max(1, round(size[1] * scale)), max(1, round(size[0] * scale))
    left, top = (own[0] - width) // 2, (own[1] - height) // 2
    return (left, top, left + width, top + height)
