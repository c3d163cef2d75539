"""Images with a class per pixel: scenes, ADE20K's layout, your own folder; training views of them.

    train, val = load_segmentation(args, ["train", "val"])
    image, label = train[0]                               # (3, H, W), (H, W), uint8; 255: ignored
    views = TrainingViews(train, size=512)
    image, label, (h, w) = views[position, index]         # (3, S, S), (S, S)

The training transforms and their order come from mmsegmentation 0.14.1 and
`rstrudel/segmenter:segm/data/config/ade20k.py`; torchvision distorts the colours.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import Dataset, TensorDataset

from common import InputError, bar
from data.images import (IMAGE_EXTENSIONS, File, choose_part, composed_name, file_entries,
                         image_hashes, part_folders, read_image, send)
from data.rng import DISTORT, VIEW, seed_from, uniform
from data.shapes import load_shapes

CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence",
                  "car", "pedestrian", "bicyclist"]
IGNORE = 255                                 # label of pixels that belong to no class
REDRAWS = 10                                 # tries to replace a crop with little variety
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale, top and left of each crop, flip


# --- sources --------------------------------------------------------------------------------------

def load_segmentation(args, parts, classes=None, seen=(), rules=None):
    """Load parts of the images that train_seg.py's flags select: a list of Scenes or SegTrees.

    parts: "train" or "test"; in your own folder also "val" or "all", see data.images.choose_part.
    classes, seen, rules: see own_folder.
    """
    if args.data != "shapes" and not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    if args.data == "folder":
        trees = own_folder(args.data_dir, parts, classes, seen, rules)
        count = len(trees[0].classes)
        if args.num_classes not in (None, count):
            raise InputError(f"--num_classes {args.num_classes}: {args.data_dir} has "
                             f"{count} classes")
        return trees
    names = CAMVID_CLASSES if args.data == "camvid" else ()
    sources = []
    for part in parts:
        if args.data == "shapes":
            num_images = args.num_images
            if part != "train":
                num_images = max(args.num_images // 10, 1)
            source = Scenes(part, num_images, args.size)
        else:
            split = "training" if part == "train" else "validation"
            source = ade20k(args.data_dir, split, args.num_classes, names)
        sources.append(source)
    return sources


class Scenes(TensorDataset):
    """Rendered scenes in memory. 11 classes: background is 0, and no pixel is ignored."""
    hashes = []
    rules = None

    def __init__(self, split, num_images, size):
        scenes = load_shapes(split, num_images, size)
        self.images = scenes.images
        self.labels = scenes.masks
        self.classes = ["background", *scenes.classes]
        super().__init__(self.images, self.labels)


class MaskRules(NamedTuple):
    """The meaning of the values in your own masks. A checkpoint stores it for evaluations."""
    palette: str                      # colours of the values in hex digits; "": grey images
    label_of_255: int | None          # 1 or IGNORE; None: the value 255 does not occur


class SegTree(Dataset):
    """Pairs of image (3, H, W) and label (H, W): indices into `classes`; 255: ignored pixels.

    files: [(image path, annotation path)]. value_of_class_0: 0; or 1, then the value 0 is ignored.
    label_of_255: the label of the value 255. hashes: `image_hashes` of your own images. rules: the
    MaskRules of your own images.
    """

    def __init__(self, files, classes, value_of_class_0=0, label_of_255=IGNORE, hashes=(),
                 rules=None):
        self.files = files
        self.classes = list(classes)
        self.hashes = list(hashes)
        self.rules = rules
        values = torch.arange(256, dtype=torch.uint8)
        self.label_of = values - value_of_class_0           # uint8: 0 - 1 is 255, which is IGNORE
        self.label_of[255] = label_of_255

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image_path, mask_path = self.files[i]
        image = read_image(image_path)
        values, _ = read_annotation(mask_path)
        if values.shape != image.shape[1:]:
            h, w = values.shape
            H, W = image.shape[1:]
            raise InputError(f"{mask_path} has {w} x {h} pixels, but its image has {W} x {H}")
        label = self.label_of[values.long()]
        wrong = (label >= len(self.classes)) & (label != IGNORE)
        if wrong.any():
            raise InputError(f"{mask_path} contains the value {values[wrong].max()}, but there "
                             f"are only {len(self.classes)} classes")
        return image, label


def read_annotation(path):
    """Read an 8-bit PNG of one channel, upright. Returns values (H, W) uint8, and palette bytes.

    The palette is b"" if the values are grey values.
    """
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        mode = image.mode
        values = np.array(image)
        palette = bytes(image.getpalette() or [])
        bits = np.fromfile(path, np.uint8, 25)[24]      # a PNG's byte 24: bits per value
    except Exception as error:                          # Pillow raises many types
        raise InputError(f"cannot read {path}: {error}") from None
    # Pillow scales grey values of fewer bits to 0 to 255, so they are no classes any more.
    if mode != "P" and (mode, bits) != ("L", 8):
        raise InputError(f"{path} has the mode {mode} and {bits} bits per value, expected a "
                         f"PNG of one channel (mode P, or mode L with 8 bits); save each "
                         f"pixel's class as its value")
    return torch.from_numpy(values), palette


def list_pairs(root, split=""):
    """List (image path, annotation path) in root/images/<split> and root/annotations/<split>."""
    images = files_by_name(root, "images", split, IMAGE_EXTENSIONS)
    annotations = files_by_name(root, "annotations", split, (".png",))
    alone = sorted(images.keys() ^ annotations.keys())
    if alone:
        raise InputError(f"{root}: {len(alone)} files have no partner in images/ or "
                         f"annotations/, for example {alone[0]}.*")
    return [(path, annotations[name]) for name, path in images.items()]


def files_by_name(root, kind, split, endings):
    """Return {name without ending: path} of the files in root/<kind>/<split>."""
    folder = os.path.join(root, kind, split)
    paths = [entry.path for entry in file_entries(folder, endings)]
    files = {composed_name(Path(path).stem): path for path in paths}
    if len(files) < len(paths):
        raise InputError(f"{root}: two files in {kind}/{split} have one name, expected "
                         f"different names without the endings")
    return files


def listed_classes(root):
    """Read class names from classes.txt, one per line; without this file, return []."""
    path = Path(root, "classes.txt")
    lines = path.read_text("utf-8-sig").splitlines() if path.exists() else []
    names = [composed_name(line.strip()) for line in lines if line.strip()]
    if len({*names}) < len(names):
        raise InputError(f"{path} lists a name twice, expected different names: "
                         f"{names[:9]}")
    return names


def ade20k(root, split, num_classes=None, names=()):
    """Load "training" or "validation" of ADE20K's layout as a SegTree: values 1 to K are classes.

    num_classes: K (default: the number of names in classes.txt). names: the names of K classes if
    there is no classes.txt.
    """
    classes = listed_classes(root)
    if classes and num_classes not in (None, len(classes)):
        raise InputError(f"--num_classes {num_classes}: {root}/classes.txt lists "
                         f"{len(classes)} classes")
    if not classes and len(names) == num_classes:
        classes = names
    elif not classes:
        classes = [f"class {k}" for k in range(num_classes or 0)]
    return SegTree(list_pairs(root, split), classes, value_of_class_0=1)


def own_folder(root, parts, classes=None, seen=(), rules=None):
    """Load parts of your own folder, root/images and root/annotations: a list of SegTrees.

    parts: as in load_segmentation, "train" first: later parts have no copies of its images.
    The value k is class k, and 255 is ignored; but if only 0 and 255 occur, 255 is class 1.
    seen: `image_hashes` of images that trained the network or its backbone. All parts except
    "train" leave them out.
    For an evaluation only; a training has neither: classes, the network's class names, of which
    some may be missing in the folder; rules, its MaskRules, which the folder must follow (None for
    networks of an earlier version).
    """
    groups = mask_groups(root)
    mask_paths = [file.mask_path for files in groups.values() for file in files]
    values, palette = read_values(mask_paths, rules)
    needs_every_class = False
    if rules is None:
        # In a training's masks, every class must occur. A network of an earlier version has no
        # rules: masks of 0 and 255 fit it only if it has two classes.
        needs_every_class = not classes or values == {0, IGNORE}
        rules = rules_of_masks(values, palette)
    else:
        check_255(root, values, rules)
    label_of_255 = IGNORE if rules.label_of_255 is None else rules.label_of_255
    names = folder_classes(root, values, label_of_255, classes, needs_every_class)

    seen = {*seen}
    trees = []
    for part in parts:
        pairs, hashes = unseen_pairs(root, groups, part, seen)
        if part == "train":                     # a copy of a training image is in no other part
            seen.update(hashes)
        tree = SegTree(pairs, names, label_of_255=label_of_255, hashes=hashes, rules=rules)
        trees.append(tree)
    return trees


def mask_groups(root):
    """List your own images with masks: {folder: [File]}, see data.images.choose_part."""
    groups = {}
    for part, path in part_folders(os.path.join(root, "images")).items():
        split = os.path.basename(path) if part else ""
        files = []
        for image_path, mask_path in list_pairs(root, split):
            files.append(File(image_path, Path(image_path).stem, mask_path=mask_path))
        groups[part] = files
    return groups


def rules_of_masks(values, palette):
    """Return the MaskRules of a training's masks. values: all their values. palette: bytes."""
    if values == {0, IGNORE}:
        label_of_255 = 1
    elif IGNORE in values:
        label_of_255 = IGNORE
    else:
        label_of_255 = None
    return MaskRules(palette.hex(), label_of_255)


def unseen_pairs(root, groups, part, seen):
    """Return the pairs (image path, mask path) of a part, and the hashes of their images.

    groups: `mask_groups`. seen: a set of `image_hashes`; all parts except "train" leave out the
    images with a hash in it. InputError if no image is left.
    """
    files = choose_part(groups, part)
    if not files:
        raise InputError(f"--data_dir {root}: there are no images for the part {part!r}")
    pairs = []
    hashes = []
    for file in files:
        own_hashes = image_hashes(file.path, read_image(file.path))
        if part == "train" or own_hashes.isdisjoint(seen):
            pairs.append((file.path, file.mask_path))
            hashes += sorted(own_hashes)
    if not pairs:
        raise InputError(f"--data_dir {root}: all images of the part {part!r} were used "
                         f"in training, or are copies of training images")
    return pairs, hashes


def read_values(paths, rules):
    """Read annotations. Returns the set of all their values, and their common palette.

    rules: the MaskRules of a network's training, or None. InputError if palettes differ.
    """
    values = set()
    palettes = {}                               # {palette: a file that has it}
    if rules is not None:
        palettes[bytes.fromhex(rules.palette)] = "the network's training masks"
    for path in bar(paths, "reading annotations", leave=False):
        stored, palette = read_annotation(path)
        values.update(stored.unique().tolist())
        palettes.setdefault(palette, path)
    if len(palettes) > 1:
        first, second, *_ = palettes.values()
        raise InputError(f"{first} and {second} have different palettes; save all "
                         f"annotations with one palette, or as grey images")
    palette = next(iter(palettes), b"")         # b"": there are no annotations
    return values, palette


def check_255(root, values, rules):
    """Raise InputError if the value 255 has another meaning than in the network's training.

    values: all values of the masks in the folder `root`. rules: the MaskRules of the training.
    """
    start = f"--data_dir {root}: the annotations contain the values {sorted(values)[:9]}"
    if rules.label_of_255 == 1 and {1, IGNORE} <= values:
        raise InputError(f"{start}, but the network was trained on masks in which 255 is "
                         f"class 1; expected the values 0 and 255")
    if rules.label_of_255 is None and values == {0, IGNORE}:
        raise InputError(f"{start}, but the network was trained on masks without 255; "
                         f"expected 1 for class 1")


def folder_classes(root, values, label_of_255, classes, needs_every_class):
    """Return the class names of your own folder. InputError if the values do not fit.

    values: all values of the annotations. label_of_255: the label of the value 255. classes: of the
    network that is evaluated, or None. needs_every_class: whether every class must occur.
    """
    names = listed_classes(root)
    labels = values - {IGNORE}
    if IGNORE in values and label_of_255 != IGNORE:
        labels = labels | {label_of_255}
    count = 1 + max(labels, default=0)                  # the classes are numbered from 0
    expected = len(classes or names) or count           # without any names, all values fit
    if count > expected or (needs_every_class and count < expected):
        raise InputError(f"--data_dir {root}: the annotations contain the values "
                         f"{sorted(values)[:9]}, expected {expected} classes, 0 to "
                         f"{expected - 1}")
    return names or [f"value {k}" for k in range(expected)]


# --- training views -------------------------------------------------------------------------------

def resize(x, size):
    """Resize (C, h, w) to (C, *size), bilinear without antialiasing; uint8 stays uint8."""
    size = tuple(size)
    return F.interpolate(x[None], size=size, mode="bilinear", align_corners=False)[0]


def scaled_size(height, width, long, short):
    """Scale (height, width) by the largest factor with long side <= long, short side <= short."""
    f = min(long / max(height, width), short / min(height, width))
    return max(int(height * f + 0.5), 1), max(int(width * f + 0.5), 1)


def training_view(image, label, draw, size, scales=(0.5, 2.0)):
    """Resize an image by a random factor, crop, flip and pad it.

    draw: VIEW_COLUMNS random numbers in [0, 1): they determine the factor r, which is uniform in
    `scales`, the place of each crop, and the flip. The short side becomes at most size * r, and the
    long side at most 4 * size * r. A crop is drawn again, at most REDRAWS times, if one class
    covers 3/4 or more of its labelled pixels. Padding is on the right and below. Returns image
    (3, size, size), label (size, size), both uint8, and height and width without padding.
    """
    r = scales[0] + (scales[1] - scales[0]) * draw[0]
    H, W = scaled_size(*label.shape, int(4 * size * r), int(size * r))
    rows = torch.arange(H) * label.shape[0] // H                    # nearest: floor(i * old / new)
    columns = torch.arange(W) * label.shape[1] // W
    h = min(size, H)
    w = min(size, W)
    for i in range(1 + REDRAWS):
        top = int(draw[1 + 2 * i] * (H - h + 1))
        left = int(draw[2 + 2 * i] * (W - w + 1))
        crop = label[rows[top:top + h]][:, columns[left:left + w]]
        count = crop.flatten().bincount(minlength=256)[:IGNORE]     # pixels per class
        if (h, w) == (H, W) or count.max() < 0.75 * count.sum():    # a whole image has one crop
            break
    image = resize(image, (H, W))[:, top:top + h, left:left + w]
    if draw[-1] < 0.5:
        image = image.flip(2)
        crop = crop.flip(1)
    padding = (0, size - w, 0, size - h)
    return F.pad(image, padding).contiguous(), F.pad(crop, padding, value=IGNORE), h, w


class TrainingViews(Dataset):
    """Training views of a source: views[position, index] is (image, label, (h, w)).

    `index` chooses the image. `position`, the sample's number in the whole run, chooses the view.
    distorted: change brightness, contrast, saturation and hue, each with probability 0.5.
    """

    def __init__(self, source, size, scales=(0.5, 2.0), seed=0, distorted=True):
        self.source = source
        self.size = size
        self.scales = scales
        self.seed = seed
        self.distorted = distorted

    def __getitem__(self, key):
        position, index = key
        image, label = self.source[index]
        draws = uniform(torch.tensor([position]), VIEW_COLUMNS, self.seed, VIEW)
        draw = draws[0].tolist()
        image, label, h, w = training_view(image, label, draw, self.size, self.scales)
        if self.distorted:
            image[:, :h, :w] = self.distort(image[:, :h, :w], position)
        return image, label, (h, w)

    def distort(self, image, position):
        """Change the colours of an image (3, h, w) uint8 at random; position is the seed."""
        from torchvision.transforms.v2 import ColorJitter, RandomApply
        changes = (ColorJitter(brightness=32 / 255), ColorJitter(contrast=0.5),
                   ColorJitter(saturation=0.5), ColorJitter(hue=0.1))
        with torch.random.fork_rng(devices=[]):         # torchvision has no argument `generator`
            torch.manual_seed(seed_from(self.seed, DISTORT, position))
            for change in changes:
                image = RandomApply([change], p=0.5)(image)
        return image


def finish_views(images, height, width, mean):
    """Turn uint8 views (B, 3, S, S) into float32 in [0, 1], and fill their padding.

    height, width: without padding, (B,) on the CPU. mean: (3, 1, 1), the colour of the padding,
    which the model subtracts.
    """
    height = send(height, images.device).view(-1, 1, 1, 1)
    width = send(width, images.device).view(-1, 1, 1, 1)
    axis = torch.arange(images.shape[-1], device=images.device)
    return torch.where((axis[:, None] < height) & (axis < width), images / 255, mean)
