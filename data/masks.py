"""Files of images and annotated pixels: ADE20K's layout, or your own folder.

    tree = ade20k("data/ADEChallengeData2016", "training", num_classes=150)
    image, label = tree[0]                   # (3, H, W), (H, W), both uint8; label 255: ignored
"""

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from common import InputError, print0
from data.batches import progress
from data.decode import (IMAGE_EXTENSIONS, decoding, open_image, printable, read_bytes, read_image,
                         turn_upright)
from data.folders import divide, fill_flags, list_files, median_side, print_left_out

CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
                  "pedestrian", "bicyclist"]


def listed_classes(root):
    """Read class names from classes.txt, one per line, else ADE20K's objectInfo150.txt, else []."""
    plain, table = Path(root, "classes.txt"), Path(root, "objectInfo150.txt")
    path = plain if plain.exists() else table
    try:
        text = path.read_text("utf-8-sig") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(path)} is not UTF-8 text (byte {error.start + 1} is "
                         f"0x{error.object[error.start]:02x}): save it again as UTF-8") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines if path is plain else [line.split("\t")[-1].split(",")[0] for line in lines[1:]]


# --- annotations ----------------------------------------------------------------------------------

def read_annotation(path):
    """Read an annotation, a PNG of one channel and at most 8 bits, turned upright like its image.

    Returns the stored values, (H, W) uint8, and the palette's {value: colour} for the values that
    occur; {} if the file has no palette.
    """
    data = read_bytes(path).tobytes()
    with decoding(path):
        image = open_image(data)
        kind, mode, bits = image.format, image.mode, data[24]
        turn_upright(image)
        values, palette = np.array(image), image.getpalette() or []
    if kind != "PNG" or mode not in ("L", "P", "1"):
        raise InputError(f"{printable(path)} is a {kind} file of mode {mode}, expected an 8-bit "
                         f"PNG of one channel (mode L or P): each pixel's value is its class")
    if mode == "L" and bits < 8:                    # Pillow scales 2- and 4-bit grey values to 255
        values = values // (255 // (2 ** bits - 1))
    values = torch.from_numpy(values.astype(np.uint8))
    used = values.flatten().bincount(minlength=256).nonzero()[:, 0].tolist() if palette else []
    return values, {value: tuple(palette[3 * value:3 * value + 3]) for value in used}


def check_same_colours(path, colours, known):
    """Raise InputError if a value has one colour in `path` and another colour in an earlier file.

    colours: {value: colour} of path. known: {value: (colour, earlier path)}; new values are added.
    """
    for value, colour in colours.items():
        first, other = known.setdefault(value, (colour, path))
        if first != colour:
            raise InputError(f"value {value} is the colour {first} in the palette of "
                             f"{printable(other)} and {colour} in {printable(path)}, so a value "
                             f"does not mean one class: save all annotations with one palette, or "
                             f"as grey images")


def check_annotations(paths, ignore=None):
    """Count the pixels of each value in annotation files, (256,).

    InputError if the palettes of two files differ. Without `ignore`, InputError also if one file
    contains the values 0 and 255 only, and another file contains further values: then 255 can mean
    a class in one file and "ignored" in the other file.
    """
    counts, known, two_valued, other = torch.zeros(256, dtype=torch.int64), {}, None, None
    for path in progress(paths, "reading annotations", 200):
        values, colours = read_annotation(path)
        check_same_colours(path, colours, known)
        count = values.flatten().bincount(minlength=256)
        counts += count
        found = count.nonzero()[:, 0].tolist()
        if found == [0, 255]:
            two_valued = two_valued or path
        elif set(found) - {0, 255}:
            other = other or (path, found)
    if ignore is None and two_valued and other:
        raise InputError(f"{printable(two_valued)} contains the values 0 and 255, and "
                         f"{printable(other[0])} contains {other[1][:9]}: if 255 means no class, "
                         f"add --ignore 255; if 255 is a class, save all annotations with the same "
                         f"values")
    return counts


class SegTree(Dataset):
    """Pairs of image and annotation. tree[i]: image (3, H, W) and label (H, W), both uint8.

    files: [(image path, annotation path)]. classes: names. values: the pixel value of each class.
    ignore: pixel values that belong to no class. A label contains an index into `classes` per
    pixel, or 255 for an ignored pixel.
    """

    def __init__(self, files, classes, values, ignore):
        self.files, self.classes, self.known_colours = files, list(classes), {}
        self.values, self.ignore = list(values), list(ignore)
        self.label_of = torch.full((256,), 254, dtype=torch.uint8)          # 254: unknown
        self.label_of[self.ignore] = 255
        self.label_of[self.values] = torch.arange(len(self.values), dtype=torch.uint8)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image_path, path = self.files[i]
        image, (values, colours) = read_image(image_path), read_annotation(path)
        check_same_colours(path, colours, self.known_colours)
        if values.shape != image.shape[1:]:
            (h, w), (H, W) = values.shape, image.shape[1:]
            raise InputError(f"{printable(path)} has {w} x {h} pixels, but its image has {W} x {H}")
        label = self.label_of[values.long()]
        if (label == 254).any():
            raise InputError(f"{printable(path)} contains the value {values[label == 254].max()}, "
                             f"expected {self.values[0]} to {self.values[-1]}, or {self.ignore} "
                             f"for pixels of no class")
        return image, label


# --- folders --------------------------------------------------------------------------------------

def pairs(root, split=""):
    """List {stem: (image path, annotation path)} of root/images/<split>, root/annotations/<split>.

    Files without a partner, files with another ending and hidden files are left out; printed lines
    name some of these.
    """
    found = {}
    for part, endings in (("images", IMAGE_EXTENSIONS), ("annotations", (".png",))):
        folder, found[part] = os.path.join(root, part, split), {}
        names, others = list_files(folder, endings)
        print_left_out(folder, others, f"the name does not end in {' or '.join(endings)}")
        for name in names:
            path, stem = os.path.join(folder, name), os.path.splitext(name)[0]
            first = found[part].setdefault(stem, path)
            if first != path:
                raise InputError(f"{printable(first)} and {printable(name)} have the same name "
                                 f"before the ending: rename or delete one of them")
    images, labels = found.values()
    alone = [f"{stem}.*" for stem in sorted(images.keys() ^ labels.keys())]
    if images.keys().isdisjoint(labels):
        example = f"; {printable(alone[0])} has no partner" if alone else ""
        raise InputError(f"--data_dir {printable(root)}: {len(images)} images in "
                         f"{printable(Path(root, 'images', split))} and {len(labels)} .png files "
                         f"in {printable(Path(root, 'annotations', split))}, but no image and "
                         f".png file have the same name{example}")
    print_left_out(Path(root, "*", split), alone, "there is no partner of the same name")
    return {stem: (path, labels[stem]) for stem, path in images.items() if stem in labels}


def ade20k(root, split, num_classes=None, names=()):
    """Load "training" or "validation" of ADE20K's layout as a SegTree: values 1 to K are classes.

    num_classes: K (default: the number of listed classes). names: K class names, which are used if
    no file in the folder lists names.
    """
    if len(names) != num_classes:
        names = [f"class {k}" for k in range(num_classes or 0)]
    names = listed_classes(root) or names
    if num_classes not in (None, len(names)):
        raise InputError(f"--num_classes {num_classes}: {printable(root)} lists {len(names)} "
                         f"classes")
    return SegTree(list(pairs(root, split).values()), names, range(1, len(names) + 1), (0, 255))


def find_pairs(root, keep_best):
    """List your folder's pairs: {"train", "val", "test", "all": [(image path, label path)]}.

    If images/ and annotations/ contain training/ and validation/, "test" is validation/. Otherwise
    "test" is a tenth of all pairs. With keep_best, "val" is another tenth, which chooses best.pt;
    see hold_out_by_name. "train" contains the other pairs. "all" is for networks that were not
    trained on this folder: validation/ if it exists, otherwise all pairs.
    """
    given = any(Path(root, "images", part).is_dir() for part in ("training", "validation"))
    found = pairs(root, "training" if given else "")
    reported = list(pairs(root, "validation").values()) if given else None
    return divide(found, [found], "", keep_best, reported)


def own_folder(root, part, values, ignore, keep_best=False):
    """Load "train", "val", "test" or "all" of your folder as a SegTree; see find_pairs."""
    names = listed_classes(root) or [f"value {v}" for v in values]
    if len(names) != len(values):
        raise InputError(f"{printable(Path(root, 'classes.txt'))} lists {len(names)} classes, "
                         f"expected {len(values)}, for the values {list(values)[:9]}")
    files = find_pairs(root, keep_best)
    if part == "all":                               # no training has checked these files
        counts = check_annotations([label for _, label in files["all"]],
                                   None if len(values) == 2 else ignore)
        if (counts[list(values)] > 0).sum() < 2:
            raise InputError(f"--data_dir {printable(root)}: the annotations contain the values "
                             f"{counts.nonzero()[:9, 0].tolist()}, expected two or more classes "
                             f"of the network, which has the values {list(values)[:9]}")
    if not files[part]:
        raise InputError(f"--data_dir {printable(root)} has {len(files['all'])} pair of image and "
                         f"annotation, expected 2 or more: one to train on, one to evaluate on")
    return SegTree(files[part], names, values, ignore)


# --- flags that fit a folder ----------------------------------------------------------------------

def find_values(root, ignore=None):
    """Find the pixel values that are classes in a folder's annotations: (values, ignored values).

    The classes are all values that occur except 255. If only 0 and 255 occur, both are classes.
    ignore: the values that belong to no class, instead of 255. If there is a classes.txt, its lines
    name the values from 0 on, or from 1 on if 0 is ignored. A printed line names rare values, which
    often come from smoothed edges of masks.
    """
    files = find_pairs(root, keep_best=False)
    paths = [label for _, label in files["train"] + files["test"]]
    counts, shown = check_annotations(paths, ignore), printable(root)
    found = counts.nonzero()[:, 0].tolist()
    if ignore is None:
        ignore = [] if found == [0, 255] else [255]
    values, listed = [value for value in found if value not in ignore], listed_classes(root)
    if listed:
        values = list(range(0 in ignore, len(listed) + (0 in ignore)))
    if len(values) < 2 or set(found) - {*values, *ignore}:
        raise InputError(f"--data_dir {shown}: the annotations contain the values {found[:9]}, "
                         f"expected two or more classes, and a line per class in classes.txt if "
                         f"that file exists; --ignore sets the values that belong to no class "
                         f"(default: 255)")
    print0(f"{shown}: {len(paths)} annotations, {len(values)} classes: values {values[:9]}; "
           f"ignored: {ignore}")
    rare = [value for value in values if 0 < 1000 * counts[value] < counts.sum()]
    if rare:
        print0(f"{shown}: {len(rare)} of these values have less than a thousandth of the pixels "
               f"each: {rare[:9]}. If they come from smoothed edges (anti-aliasing, a resize), "
               f"make the masks again with hard edges (nearest neighbour), or ignore these values: "
               f"--ignore {' '.join(map(str, [*ignore, *rare][:9]))}")
    return values, ignore


def mask_recipe(n, side):
    """Choose flags to train on n images. side: their median short side in pixels.

    A run has about 3,000 steps and 64 to 144 patches per image, so it takes minutes on a CPU.
    """
    patches = {32: 4, 64: 8, 96: 8, 160: 16}                        # size: patch size
    size = max(s for s in patches if s == 32 or s <= side)
    epochs = min(max(3000 * 8 // n, 8), 400)
    return dict(size=size, patch_size=patches[size], batch_size=8, epochs=epochs,
                eval_every=math.ceil(epochs / 10))


def mask_flags(args):
    """Choose values that fit a folder of masks for the flags that are None: {flag: value}.

    Prints the choices. The result also contains `values`, the pixel value of each class, and
    `ignore`, the values that belong to no class.
    """
    values, ignore = find_values(args.data_dir, args.ignore)
    keep_best, root = args.keep_best, printable(args.data_dir)
    if keep_best is None:
        keep_best = bool(find_pairs(args.data_dir, True)["val"])
        if not keep_best:
            print0(f"{root} has too few pairs to hold one out to choose best.pt (expected 3, or 2 "
                   f"in training/), so last.pt is reported")
    files = find_pairs(args.data_dir, keep_best)
    side = median_side([label for _, label in files["train"]])
    recipe = dict(mask_recipe(len(files["train"]), side), keep_best=keep_best)
    if args.backbone:
        del recipe["patch_size"]                                    # the backbone has its own
    chosen = fill_flags(args, recipe, files, "pairs")
    return chosen | dict(values=values, ignore=ignore, num_classes=len(values))
