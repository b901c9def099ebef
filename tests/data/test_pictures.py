"""Pictures in every mode against the pixels they should give."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from aha.data.pictures import BadPicture, read_mask, read_picture
from tests.data.pictures_on_the_fly import encode


@pytest.fixture
def ramp() -> np.ndarray:
    """Smooth, asymmetric, not square: survives JPEG, shows any flip. Shape (24, 40, 3)."""
    y, x = np.mgrid[0:24, 0:40]
    return np.stack([x * 6, y * 10, 255 - x * 3 - y * 2], -1).astype(np.uint8)


def test_rgb_is_untouched(ramp):
    assert np.array_equal(read_picture(encode(ramp)), ramp)
    assert np.array_equal(read_picture(encode(ramp, "WEBP", lossless=True)), ramp)


def test_path_and_bytes_agree(ramp, tmp_path):
    (tmp_path / "fünf 猫.png").write_bytes(encode(ramp))
    assert np.array_equal(read_picture(tmp_path / "fünf 猫.png"), ramp)
    assert np.array_equal(read_picture(str(tmp_path / "fünf 猫.png")), ramp)


def test_grey(ramp):
    grey = ramp[..., 0]
    assert np.array_equal(read_picture(encode(grey)), np.stack([grey] * 3, -1))


def test_one_bit():
    bits = np.array([[0, 255], [255, 0]], np.uint8)
    assert np.array_equal(read_picture(encode(Image.fromarray(bits).convert("1")))[..., 1], bits)


def test_cmyk_jpeg(ramp):
    cmyk = Image.fromarray(ramp).convert("CMYK")
    got = read_picture(encode(cmyk, "JPEG", quality=98, subsampling=0))
    assert np.abs(got.astype(int) - ramp).mean() < 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey(kind):
    wide = np.array([[0, 257, 128 * 257], [65535, 300, 65000]], np.uint16)
    expected = np.rint(wide / 257).astype(np.uint8)
    assert np.array_equal(read_picture(encode(wide, kind)), np.stack([expected] * 3, -1))


def test_sixteen_bit_rgb_png():
    raw = np.array([[[0, 128 * 257, 65535]]], ">u2").repeat(2, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in raw)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 1, 2, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert read_picture(png).tolist() == [[[0, 128, 255]], [[0, 128, 255]]]


def test_palette_and_first_frame_of_an_animation():
    red, blue = (Image.new("RGB", (4, 3), colour) for colour in ("red", "blue"))
    assert read_picture(encode(red.quantize()))[0, 0].tolist() == [255, 0, 0]
    assert read_picture(encode(red, "GIF", save_all=True, append_images=[blue]))[0, 0].tolist() == [255, 0, 0]


def test_transparency_lies_on_white():
    rgba = np.array([[[200, 10, 0, 0], [200, 10, 0, 255], [0, 0, 0, 128]]], np.uint8)
    assert read_picture(encode(rgba)).tolist() == [[[255, 255, 255], [200, 10, 0], [127, 127, 127]]]
    grey = Image.fromarray(rgba).convert("LA")
    assert read_picture(encode(grey))[0, 0].tolist() == [255, 255, 255]
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.putdata([0, 1])
    assert read_picture(encode(palette, transparency=0)).tolist() == [[[255] * 3, [9] * 3]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [None, (20, 10)])
def test_exif_orientation(ramp, orientation, size):
    stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }[orientation](ramp)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(np.ascontiguousarray(stored), "JPEG", quality=98, subsampling=0, exif=exif)
    expected = read_picture(encode(ramp), size=size)
    got = read_picture(data, size=size)
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).mean() < 3


def test_squash_keeps_the_whole_and_crop_the_middle():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255  # the middle third
    assert read_picture(encode(wide), size=(10, 10), resize="crop").min() == 255
    squashed = read_picture(encode(wide), size=(10, 10))[5, :, 0].astype(int)
    assert squashed[0] < 30 and squashed[-1] < 30 and squashed[5] > 225


def test_reduced_decoding_stays_close_to_the_full_one(ramp):
    large = Image.fromarray(ramp).resize((1600, 960), Image.Resampling.BICUBIC)
    data = encode(large, "JPEG", quality=95)
    for resize in ("squash", "crop"):
        got = read_picture(data, size=(64, 64), resize=resize)
        slow = read_picture(encode(large), size=(64, 64), resize=resize)
        assert np.abs(got.astype(int) - slow).mean() < 2


def test_a_single_pixel_is_stretched():
    assert np.unique(read_picture(encode(np.full((1, 1, 3), 77, np.uint8)), size=(5, 6))).tolist() == [77]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"no picture at all", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),  # would start another program
        (b"\xff\xd8\xff\xe0" + bytes(40), "picture"),
    ],
)
def test_what_is_no_picture(data, reason):
    with pytest.raises(BadPicture, match=reason):
        read_picture(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated(ramp, kind):
    noisy = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = encode(noisy, kind)
    with pytest.raises(BadPicture):
        read_picture(data[: len(data) // 2])


def test_bombs_are_refused_before_decoding(ramp):
    with pytest.raises(BadPicture, match="bomb"):
        read_picture(encode(ramp), max_pixels=24 * 40 - 1)
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = b"IHDR" + header
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    with pytest.raises(BadPicture):
        read_picture(png + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT")))


def test_no_white_level():
    with pytest.raises(BadPicture, match="white level"):
        read_picture(encode(np.zeros((3, 3), np.float32), "TIFF"))


def test_our_own_type_errors_pass():
    with pytest.raises(TypeError):
        read_picture(5)


def test_missing_file(tmp_path):
    with pytest.raises(BadPicture, match="No such file"):
        read_picture(tmp_path / "none.png")


def test_mask():
    values = np.array([[0, 1], [255, 0]], np.uint8)
    expected = [[False, True], [True, False]]
    assert read_mask(encode(values)).tolist() == expected
    assert read_mask(encode(np.stack([values] * 3, -1))).tolist() == expected
    indices = Image.fromarray((values > 0).astype(np.uint8) * 2, "P")
    indices.putpalette([0] * 9)
    assert read_mask(encode(indices)).tolist() == expected
    assert read_mask(encode(values), size=(4, 2)).tolist() == [[False, True]] * 2 + [[True, False]] * 2
    with pytest.raises(BadPicture, match="differ in size"):
        read_mask(encode(values), of=(3, 2))
