"""Images with annotated pixels in files: ADE20K's layout, a folder of one's own.

    tree = SegTree("data/ADEChallengeData2016", "training", num_classes=150)
    image, label = tree[0]                   # (3, H, W), (H, W), both uint8; label 255: ignored
"""

import io
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from common import InputError
from data.files import IMAGE_EXTENSIONS, decode, name_hash, read_bytes, shown

SHARE = 0.2                                  # of a flat folder's images is held out
CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
                  "pedestrian", "bicyclist"]


def listed_classes(root):
    """Read (names, file) of classes.txt or ADE20K's objectInfo150.txt; neither: ([], None)."""
    for path in (Path(root, "classes.txt"), Path(root, "objectInfo150.txt")):
        if path.exists():
            try:
                text = path.read_text("utf-8-sig")
            except ValueError as error:
                raise InputError(f"{path}: {error}") from None
            lines = [line.strip() for line in text.split("\n") if line.strip()]
            if path.stem == "objectInfo150":                        # a table with a headline
                lines = [line.split("\t")[-1].split(",")[0] for line in lines[1:]]
            return lines, path
    return [], None


def class_names(root, num_classes=None, likely=()):
    """Name the classes of a data folder; where it lists none, those likely or made up.

    num_classes: how many there must be; None: as many as are listed. Raises ValueError where that
    cannot be, or 8 bits cannot hold them.
    """
    names, path = listed_classes(root)
    if not names and num_classes is None:
        raise InputError(f"how many classes has --data_dir {root}? There is no classes.txt in it; "
                         f"give --num_classes")
    if names and num_classes not in (None, len(names)):
        raise InputError(f"--num_classes {num_classes}: {path} lists {len(names)} classes")
    if not names and num_classes == len(likely):
        names = likely
    names = names or [f"class {k}" for k in range(num_classes)]
    if not 2 <= len(names) <= 254:
        raise InputError(f"{len(names)} classes, expected 2 to 254: labels are 8-bit, 255 is "
                         f"ignored")
    return names


def shift_labels(label):
    """Turn a file's values into classes: 0 (unlabelled), 255 -> 255 (ignored), v -> v - 1."""
    label = label - 1                                               # uint8: 0 wraps round to 255
    return torch.where(label == 254, 255, label)


def read_pair(image_path, label_path):
    """Read an image (3, H, W) and its annotation's values (H, W), uint8; errors name the file.

    Images may be grey, have an alpha channel (dropped) or 16 bits; annotations are 8-bit PNG of one
    channel, palettes included: there the numbers count, not their colours.
    """
    from PIL import Image
    image = decode(read_bytes(image_path), image_path)
    content = io.BytesIO(read_bytes(label_path))
    try:
        file = Image.open(content)
        mode, pixels = file.mode, np.array(file)
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"cannot decode {shown(label_path)}: {error}") from None
    if mode not in ("L", "P"):
        raise InputError(f"{shown(label_path)} is of mode {mode}, expected an 8-bit PNG of one "
                         f"channel")
    if pixels.shape != image.shape[1:]:
        (h, w), (H, W) = pixels.shape, image.shape[1:]
        raise InputError(f"{shown(label_path)} is {w} x {h} pixels, its image {W} x {H}")
    return image, torch.from_numpy(pixels)


class SegTree(Dataset):
    """Read root/images/<split>/<stem>.jpg, root/annotations/<split>/<stem>.png, as of ADE20K.

    num_classes: see class_names. Raises FileNotFoundError and ValueError, one line that names the
    folder or file.
    """
    layout = "{images,annotations}/{training,validation} as in ADE20K"

    def __init__(self, root, split, num_classes=None):
        root = str(root)
        self.folders = [os.path.join(root, part, split) for part in ("images", "annotations")]
        images, labels = self.list_files(root)
        self.classes = class_names(root, num_classes, likely=CAMVID_CLASSES)
        for what, lonely in (("annotation of image", images.keys() - labels),
                             ("image of annotation", labels.keys() - images)):
            if lonely:
                raise InputError(f"--data_dir {root} has no {what} {min(lonely)} in {split} "
                                 f"({len(lonely)} such files)")
        if not images:
            raise InputError(f"{self.folders[0]} has no images (.jpg, .png)")
        self.names, self.files = list(images), [(images[name], labels[name]) for name in images]

    def list_files(self, root):
        """List [images, annotations], {stem: path} each, in the order of their names."""
        found = []
        for folder, extensions in zip(self.folders, (IMAGE_EXTENSIONS, ".png")):
            if not os.path.isdir(folder):
                raise InputError(f"--data_dir {root} has no folder {folder}; expected "
                                        f"{self.layout}")
            found.append({os.path.splitext(name)[0]: os.path.join(folder, name)
                          for name in sorted(os.listdir(folder))
                          if name.lower().endswith(extensions) and name[0] != "."})
        return found

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image, values = read_pair(*self.files[i])
        K = len(self.classes)
        wrong = values[(values > K) & (values < 255)]
        if len(wrong):
            raise InputError(f"{self.files[i][1]} holds the value {wrong.max()}, expected 0 "
                             f"(ignored) to {K} (--num_classes)")
        return image, shift_labels(values)


class OwnFolder(SegTree):
    """Read a folder of one's own: root/images/<stem>.jpg, root/annotations/<stem>.png, any number.

    If there is root/images/training or validation, it is laid out as SegTree's; otherwise
    "validation" is a fifth of the pairs, the same ones each time, and "all" are all. Files that
    cannot be read or have no partner are left out. pixels: (256,) int64, how many have each value.
    Raises ValueError where nothing is left.
    """
    layout = "images/*.jpg and annotations/*.png, or training/ and validation/ in each"

    def __init__(self, root, split, num_classes=None):
        root = str(root)
        self.folders = [os.path.join(root, part) for part in ("images", "annotations")]
        flat = not any(os.path.isdir(os.path.join(self.folders[0], name))
                       for name in ("training", "validation"))
        if not flat:
            split = "validation" if split == "all" else split
            self.folders = [os.path.join(folder, split) for folder in self.folders]
        images, labels = self.list_files(root)
        names = [name for name in images if name in labels]
        for files, what in ((images, f"image (.jpg, .png) in {self.folders[0]}"),
                            (labels, f"annotation (.png) in {self.folders[1]}"),
                            (names, f"annotation with the name of an image in {self.folders[1]}")):
            if not files:
                raise InputError(f"--data_dir {root}: no {what}")

        # the part that is asked for, as far as it can be read
        self.unmatched = len(images.keys() ^ labels.keys())
        if flat and split != "all":
            held = max(round(SHARE * len(names)), 1)
            order = sorted(names, key=name_hash)
            names = sorted(order[:held] if split == "validation" else order[held:])
        self.names, self.files, self.sides = [], [], []
        self.pixels = torch.zeros(256, dtype=torch.int64)
        for name in tqdm(names, f"reading {split} images", leave=False, disable=len(names) < 200):
            try:
                _, values = read_pair(images[name], labels[name])
            except (ValueError, OSError) as error:
                tqdm.write(f"skipping: {error}")
                continue
            self.names.append(name)
            self.files.append((images[name], labels[name]))
            self.sides.append(min(values.shape))
            self.pixels += values.flatten().bincount(minlength=256)
        self.unreadable = len(names) - len(self.names)
        if not self.names:
            raise InputError(f"--data_dir {root}: no {split} image is left: {len(images)} images, "
                             f"{self.unmatched} unmatched files, {self.unreadable} unreadable")
        self.classes = class_names(root, num_classes) if num_classes else []


def load_folder(root, num_classes=None):
    """Load a folder of one's own: (training, validation) OwnFolder and what was found, in words.

    The number of classes is num_classes, or that of classes.txt, or the highest value.
    """
    if not root:
        raise InputError("--data folder needs --data_dir")
    train, val = OwnFolder(root, "training"), OwnFolder(root, "validation")
    pixels = train.pixels + val.pixels
    values = [value for value in range(1, 255) if pixels[value]]
    if len(values) < 2:
        raise InputError(f"--data_dir {root}: the annotations hold {len(values)} classes, expected "
                         f"2 or more; values 0 and 255 are no class: they are ignored")
    K = num_classes or len(listed_classes(root)[0]) or values[-1]
    train.classes = val.classes = class_names(root, K)
    if values[-1] > K:
        raise InputError(f"--data_dir {root}: the annotations hold the value {values[-1]}, "
                         f"expected 0 (ignored) to {K} (--num_classes)")
    ignored = 100 * (pixels[0] + pixels[255]) / pixels.sum()
    flat = train.folders == val.folders
    unmatched = train.unmatched if flat else train.unmatched + val.unmatched
    return train, val, (f"{len(train)} training, {len(val)} {'held-out' if flat else 'validation'} "
                        f"images, {K} classes, {ignored:.1f} % of the pixels ignored, "
                        f"{train.unreadable + val.unreadable} unreadable, {unmatched} unmatched "
                        f"files")


def folder_recipe(n, side):
    """Choose flags for a small set: n training images, their median short side in pixels.

    About 3,000 steps of 64 to 144 patches an image, so that a CPU takes minutes.
    """
    patches = {32: 4, 64: 8, 96: 8, 160: 16}                        # size: patch size
    size = max(s for s in patches if s == 32 or s <= side)
    epochs = min(max(3000 * 8 // n, 8), 400)
    return dict(size=size, patch_size=patches[size], batch_size=8, epochs=epochs,
                eval_every=math.ceil(epochs / 10))


