"""Read image files and decode them; a broken file is an error that names the file."""

import io
import os
import warnings
import zlib
from contextlib import contextmanager, suppress

import numpy as np
import torch

from common import InputError

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
PNG = b"\x89PNG\r\n\x1a\n"
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"eXIf", b"IEND")    # pixels depend on them


def printable(path):
    """Return a path as UTF-8 text. A byte that is not UTF-8 becomes text such as \\xe9."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_bytes(path):
    """Read a whole file, (n,) uint8."""
    if not os.path.isfile(path):
        raise InputError(f"file not found: {printable(path)}; restore it and, if this was a "
                         f"training, resume the run")
    return np.fromfile(path, np.uint8)


@contextmanager
def decoding(path):
    """Turn every exception of a decoder inside the block into an InputError that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # about large images and unreadable EXIF data
            yield
    except Exception as error:                      # Pillow and torchvision raise many types
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"cannot decode {printable(path)}: {words}") from None


def checked_png(data):
    """Return the bytes of a PNG file, reduced to the chunks that its pixels depend on.

    Raises ValueError if a checksum is wrong or the file ends early, because Pillow does not check
    the checksums of pixels. Drops texts and colour profiles, because a bad one can make Pillow
    reject a file whose pixels are intact.
    """
    kept, start = [PNG], len(PNG)
    while kept[-1][4:8] != b"IEND":
        end = start + 12 + int.from_bytes(data[start:start + 4], "big")
        if end > len(data):
            raise ValueError("the file ends before its last chunk")
        chunk, start = data[start:end], end
        if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:], "big"):
            raise ValueError("a checksum is wrong, so the file is corrupted")
        if chunk[4:8] in PIXEL_CHUNKS:
            kept.append(chunk)
    return b"".join(kept)


def open_image(data):
    """Open a JPEG, PNG, WebP or GIF file (bytes) with Pillow; the pixels are decoded later."""
    from PIL import Image, UnidentifiedImageError
    if data.startswith(PNG):
        data = checked_png(data)
    try:
        return Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP", "GIF"))
    except UnidentifiedImageError:
        raise ValueError("expected a JPEG, PNG, WebP or GIF file") from None


def turn_upright(image):
    """Turn a Pillow image upright in place, by its EXIF orientation if that can be read."""
    from PIL import ImageOps
    image.load()
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def decode(data, path):
    """Decode the bytes of an image file, uint8 (n,) -> (3, H, W) uint8 RGB, upright.

    path: for messages. InputError if the file is broken, truncated or no image. torchvision decodes
    JPEG, because it is faster than Pillow and returns the same pixels. Pillow decodes PNG, WebP and
    GIF, because torchvision's libpng kills the process at a broken PNG file. An animation gives its
    first frame. 16-bit values become 8-bit values.
    """
    with decoding(path):
        if bytes(data[:3]) == b"\xff\xd8\xff":                              # JPEG
            from torchvision.io import ImageReadMode, decode_image
            return decode_image(torch.from_numpy(data), ImageReadMode.RGB,
                                apply_exif_orientation=True)
        image = open_image(data.tobytes())
        turn_upright(image)
        if image.mode.startswith("I"):                                      # 16-bit grey
            grey = torch.from_numpy(np.array(image).astype(np.int32))
            return (grey / 257).round().to(torch.uint8).expand(3, -1, -1).contiguous()
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def read_image(path):
    """Read an image file: (3, H, W) uint8."""
    return decode(read_bytes(path), path)
