"""Images with annotated pixels in files: ADE20K's layout, a folder of one's own.

    tree = ade20k("data/ADEChallengeData2016", "training", num_classes=150)
    image, label = tree[0]                   # (3, H, W), (H, W), both uint8; label 255: ignored
"""

import io
import math
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from common import InputError, print0
from data.decode import IMAGE_EXTENSIONS, name_hash, read_bytes, read_image

SHARE = 0.2                                  # of a flat folder's images is held out
CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
                  "pedestrian", "bicyclist"]


def listed_classes(root):
    """Read the class names in classes.txt, a line each, or in ADE20K's objectInfo150.txt; or []."""
    plain, table = Path(root, "classes.txt"), Path(root, "objectInfo150.txt")
    if plain.exists():
        return [line.strip() for line in plain.read_text("utf-8-sig").split("\n") if line.strip()]
    lines = table.read_text("utf-8-sig").strip().split("\n")[1:] if table.exists() else []
    return [line.split("\t")[-1].split(",")[0].strip() for line in lines]


def read_annotation(path):
    """Read an 8-bit PNG of one channel, (H, W) uint8; of a palette the numbers, not the colours.

    Upright, as its EXIF says: like the image that it annotates.
    """
    from PIL import Image, ImageOps
    data = io.BytesIO(read_bytes(path))
    try:
        with Image.open(data) as file:
            mode, pixels = file.mode, np.array(ImageOps.exif_transpose(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"cannot decode {path}: {error}") from None
    if mode not in ("L", "P", "1"):
        raise InputError(f"{path} is of mode {mode}, expected an 8-bit PNG of one channel: each "
                         f"pixel's value is its class")
    return torch.from_numpy(pixels.astype(np.uint8))


class SegTree(Dataset):
    """Pairs of image and annotation. values: those of the classes, in order; ignore: of no class.

    tree[i]: image (3, H, W), label (H, W), uint8: the place in `values`, or 255 where ignored.
    files: [(image path, annotation path)].
    """

    def __init__(self, files, classes, values, ignore):
        self.files, self.classes = files, list(classes)
        self.values, self.ignore = list(values), list(ignore)
        self.label_of = torch.full((256,), 254, dtype=torch.uint8)          # 254: neither
        self.label_of[self.ignore] = 255
        self.label_of[self.values] = torch.arange(len(self.values), dtype=torch.uint8)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image_path, path = self.files[i]
        image, values = read_image(image_path), read_annotation(path)
        if values.shape != image.shape[1:]:
            (h, w), (H, W) = values.shape, image.shape[1:]
            raise InputError(f"{path} is {w} x {h} pixels, its image {W} x {H}")
        label = self.label_of[values.long()]
        if (label == 254).any():
            raise InputError(f"{path} holds the value {values[label == 254].max()}, expected "
                             f"{self.values[0]} to {self.values[-1]}, or {self.ignore} for pixels "
                             f"of no class")
        return image, label


def pairs(root, split=""):
    """List {stem: (image path, annotation path)} of root/images/<split>, root/annotations/<split>.

    Files without a partner are left out, and counted in a line.
    """
    def files(part, endings):
        return {path.stem: str(path) for path in sorted(Path(root, part, split).glob("*"))
                if path.name.lower().endswith(endings) and path.name[0] != "."}
    images, labels = files("images", IMAGE_EXTENSIONS), files("annotations", ".png")
    both = {stem: (images[stem], labels[stem]) for stem in images if stem in labels}
    if not both:
        raise InputError(f"--data_dir {root}: no image in {Path(root, 'images', split)} has an "
                         f"annotation of its name in {Path(root, 'annotations', split)}")
    alone = images.keys() ^ labels.keys()
    if alone:
        print0(f"{root} {split}: {len(alone)} files have no partner, {min(alone)} among them")
    return both


def ade20k(root, split, num_classes=None):
    """Load "training" or "validation" of ADE20K's layout: 0 is no class, 1 to K are."""
    names = listed_classes(root) or (
        CAMVID_CLASSES if num_classes == 11 else [f"class {k}" for k in range(num_classes or 0)])
    if num_classes not in (None, len(names)):
        raise InputError(f"--num_classes {num_classes}: {root} lists {len(names)} classes")
    return SegTree(list(pairs(root, split).values()), names, range(1, len(names) + 1), (0, 255))


def own_folder(root, split, values, ignore):
    """Load "training", "validation" or "all" of a folder of one's own: a SegTree.

    root/images/<stem>.jpg, root/annotations/<stem>.png: a fifth is "validation", chosen by the
    files' names. With training/ and validation/ in both, those are the splits.
    """
    if Path(root, "images", "training").is_dir() or Path(root, "images", "validation").is_dir():
        files = list(pairs(root, "validation" if split == "all" else split).values())
    else:
        found = pairs(root)
        held = sorted(found, key=name_hash)[:max(round(SHARE * len(found)), 1)]
        files = [found[stem] for stem in found
                 if split == "all" or (stem in held) == (split == "validation")]
    names = listed_classes(root) or [f"value {v}" for v in values]
    return SegTree(files, names, values, ignore)


def find_values(root, ignore=None):
    """Find which values the annotations of a folder give to classes: (values, ignored ones).

    All that occur but 255, or, where 0 and 255 alone do, both. ignore: those to leave out instead
    of 255. classes.txt, where there is one, names the values from 0 on; from 1, if 0 is ignored.
    What is hardly there, as the edges of anti-aliased masks are, is named in a line.
    """
    paths = [path for path in Path(root, "annotations").rglob("*.png") if path.name[0] != "."]
    bar = tqdm(paths, "reading annotations", leave=False, disable=len(paths) < 200)
    counts = sum(read_annotation(path).flatten().bincount(minlength=256) for path in bar)
    found = counts.nonzero()[:, 0].tolist() if paths else []
    if ignore is None:
        ignore = [] if found == [0, 255] else [255]
    values, listed = [value for value in found if value not in ignore], listed_classes(root)
    if listed:
        values = list(range(0 in ignore, len(listed) + (0 in ignore)))
    if len(values) < 2 or set(found) - {*values, *ignore}:
        raise InputError(f"--data_dir {root}: the annotations hold the values {found[:9]}; each is "
                         f"a class, two or more are needed, and classes.txt, where there is one, "
                         f"names them all; --ignore says which values are none (without it 255)")
    print0(f"{root}: {len(paths)} annotations, {len(values)} classes: values {values[:9]}; "
           f"ignored: {ignore}")
    rare = [value for value in values if 0 < 1000 * counts[value] < counts.sum()]
    if rare:
        print0(f"{root}: {len(rare)} of these values have less than a thousandth of the pixels "
               f"each: {rare[:9]}; if they come from smoothed edges (anti-aliasing, a resize), "
               f"make the masks again with hard edges (nearest neighbour), or leave the values "
               f"out: --ignore {' '.join(map(str, [*ignore, *rare][:9]))}")
    return values, ignore


def folder_recipe(n, side):
    """Choose flags for a small set: n training images, their median short side in pixels.

    About 3,000 steps of 64 to 144 patches an image, so that a CPU takes minutes.
    """
    patches = {32: 4, 64: 8, 96: 8, 160: 16}                        # size: patch size
    size = max(s for s in patches if s == 32 or s <= side)
    epochs = min(max(3000 * 8 // n, 8), 400)
    return dict(size=size, patch_size=patches[size], batch_size=8, epochs=epochs,
                eval_every=math.ceil(epochs / 10))


def choose(args):
    """Choose what args leave open (None) for masks of one's own: {flag: value}; prints it.

    Also values: those of the classes, in order; ignore: those of no class.
    """
    values, ignore = find_values(args.data_dir, args.ignore)
    train = own_folder(args.data_dir, "training", values, ignore)
    sides = sorted(min(read_annotation(label).shape) for _, label in train.files[:200])
    chosen = folder_recipe(len(train), sides[len(sides) // 2])
    if args.backbone:
        del chosen["patch_size"]                                    # is the backbone's
    chosen = {name: value for name, value in chosen.items() if getattr(args, name) is None}
    if chosen:
        print0(f"chosen for them: {' '.join(f'{k}={v}' for k, v in chosen.items())}")
    return chosen | dict(values=values, ignore=ignore, num_classes=len(values))
