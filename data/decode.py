"""Image files, whatever they are for: found and decoded."""

import io
import os
import zlib

import numpy as np
import torch

from common import InputError, print0

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")


def read_bytes(path):
    """Read a whole file, (n,) uint8."""
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}; a run whose image is gone goes on once it is "
                         f"put back")
    return np.fromfile(path, np.uint8)


def decode(data, name):
    """Decode the bytes of a JPEG, PNG or WebP file, uint8 (n,) -> (3, H, W) uint8 RGB, upright.

    Upright: turned as its EXIF says. Raises InputError with the file's name for broken, truncated
    or foreign files. torchvision's decoder gives the same pixels as PIL in less time, and refuses
    what PIL refuses.
    """
    from torchvision.io import ImageReadMode, decode_image
    try:
        image = decode_image(torch.from_numpy(data), ImageReadMode.RGB,
                             apply_exif_orientation=True)
    except RuntimeError as error:
        name = os.fsencode(name).decode("utf-8", "backslashreplace")        # can be printed
        raise InputError(f"cannot decode {name}: {str(error).splitlines()[0]}") from None
    if bytes(data[8:12]) == b"WEBP":        # torchvision does not look for EXIF there
        from PIL import ExifTags, Image, ImageOps
        file = Image.open(io.BytesIO(data))
        if file.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            pixels = np.array(ImageOps.exif_transpose(file).convert("RGB"))
            image = torch.from_numpy(pixels).permute(2, 0, 1)
    if image.ndim == 4:                      # an animated GIF by another name: its first frame
        image = image[0]
    if image.dtype == torch.uint8:
        return image
    return (image.int() / 257).round().to(torch.uint8)              # 16 bit: 65535 -> 255


def read_image(path):
    """Read an image file: (3, H, W) uint8."""
    return decode(read_bytes(path), path)


def name_hash(name):
    """Hash a name: what is held out goes by it, so a file that comes or goes moves no other."""
    return zlib.crc32(os.fsencode(name))


def same_folder(one, other):
    """Tell whether two paths, or None, are the same folder."""
    return bool(one and other) and os.path.realpath(one) == os.path.realpath(other)


def scan_folders(root, quiet=False):
    """Find root/<class>/<image>: {class: paths of its images, sorted}, without empty classes.

    What is hidden (.git, ._a.jpg) does not count; how many other files there are is printed.
    """
    images, others = {}, 0
    for name in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        if name.startswith("."):
            continue
        files = sorted(file for file in os.listdir(os.path.join(root, name)) if file[0] != ".")
        found = [os.path.join(root, name, f) for f in files if f.lower().endswith(IMAGE_EXTENSIONS)]
        others += len(files) - len(found)
        if found:
            images[name] = found
    if others and not quiet:
        print0(f"{root}: left out in class folders, as neither {', '.join(IMAGE_EXTENSIONS[:-1])} "
               f"nor {IMAGE_EXTENSIONS[-1]}: {others} file{'s' * (others > 1)}")
    return images
