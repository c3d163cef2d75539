"""Images with a class per pixel: scenes, your own masks, ADE20K's layout; training views of them.

    train, val = load_segmentation(["train", "val"], args)
    image, label = train[0]                               # (3, H, W), (H, W), uint8; 255: ignored
    views = TrainingViews(train, size=512)
    image, label, (h, w) = views[position, index]         # (3, S, S), (S, S)

Files are in data_dir/images/ and data_dir/annotations/. A mask is an 8-bit PNG of one channel. Its
values 0 to K - 1 are the classes, and 255 is ignored. In the layout of ADE20K and CamVid, 0 is
ignored, and the values 1 to K are the classes.

The training transforms and their order come from mmsegmentation 0.14.1 and
`rstrudel/segmenter:segm/data/config/ade20k.py`; torchvision distorts the colours.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import Dataset, TensorDataset

from common import InputError, bar, print0, send
from data.images import (ENDINGS, divide, entries, files_below, print_parts, print_passed,
                         read_image)
from data.rng import DISTORT, VIEW, seed_from, uniform
from data.shapes import load_shapes

CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence",
                  "car", "pedestrian", "bicyclist"]
IGNORE = 255                                 # label of pixels that belong to no class
REDRAWS = 10                                 # tries to replace a crop with little variety
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale, top and left of each crop, flip
# {folder of your own masks: its part}
PART_OF = dict(test="test", testing="test", val="val", valid="val", validation="val",
               train="train", training="train")


# --- sources --------------------------------------------------------------------------------------

def load_segmentation(parts, args, classes=None):
    """Load parts of the images that train_seg.py's flags select: a list of Scenes or SegTrees.

    parts: "train"; "val", which a training evaluates; "test", which --eval_only evaluates. In
    ADE20K's layout, val and test are the same images. classes: the class names of the network that
    is evaluated; None in a training.
    All files are read once, so an error in a file is found before the first step.
    """
    if args.data == "shapes":
        few = max(args.num_images // 10, 1)
        number = dict(train=args.num_images, val=few, test=few)
        return [Scenes(part, number[part], args.size) for part in parts]
    if args.data == "folder":
        first = 0
        pairs = own_masks(args.data_dir)
    else:
        first = 1
        split = dict(train="training", val="validation", test="validation")
        pairs = {part: list_pairs(args.data_dir, split[part]) for part in parts}
        for part in parts:
            others = other_files(args.data_dir, split[part], pairs[part])
            print_passed({f"other files of {split[part]}": others})
    for part in parts:
        if not pairs[part] and part != "val":
            raise InputError(f"{args.data_dir}: there is no {part} image; make the "
                             f"folders images/{part} and annotations/{part}")
    read = parts
    if not classes:             # a training: the values of the masks of all parts are its classes
        read = list(pairs)
    trees = {part: SegTree(pairs[part], part, first, args.num_workers) for part in read}
    names = class_names(args, classes, trees.values(), first)
    for part in parts:
        trees[part].classes = names
        occurring = trees[part].values
        missing = [name for k, name in enumerate(names, first) if k not in occurring]
        if pairs[part] and len(missing) == len(names):
            raise InputError(f"{args.data_dir}: no {part} image has a labelled pixel")
        if missing and pairs[part]:
            print0(f"no {part} image contains {len(missing)} of {len(names)} classes: "
                   f"{', '.join(missing[:9])}")
    return [trees[part] for part in parts]


class Scenes(TensorDataset):
    """Rendered scenes in memory. 11 classes: background is 0, and no pixel is ignored."""
    num_workers = 0
    values = {}                                 # scenes have no mask files, so no palette

    def __init__(self, part, num_images, size):
        scenes = load_shapes(part, num_images, size)
        self.images = scenes.images
        self.labels = scenes.masks
        self.classes = ["background", *scenes.classes]
        self.crc = zlib.crc32(self.images.numpy())
        super().__init__(self.images, self.labels)


class SegTree(Dataset):
    """Images and masks in files: tree[i] is an image (3, H, W) and a label (H, W), both uint8.

    pairs: [(image path, mask path)]. part: the name of the tree. first: the value of class 0 in the
    masks, 0 or 1; with 1, the value 0 is ignored. num_workers: processes that decode the files.
    The constructor reads all files once. It sets values, {value: (colour, a mask that has it)}, and
    crc, a CRC-32 of all bytes. load_segmentation adds classes, the names.
    """

    def __init__(self, pairs, part="train", first=0, num_workers=0):
        self.pairs = pairs
        self.first = first
        self.num_workers = num_workers
        self.values = {}
        crcs = []
        with ThreadPoolExecutor() as pool:      # after an error it waits for its threads
            read = pool.map(read_pair, pairs)
            for values, crc in bar(read, f"reading {part}", total=len(pairs), leave=False):
                add_values(self.values, values)
                crcs.append(crc)
        self.crc = zlib.crc32(repr(crcs).encode())

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        image_path, mask_path = self.pairs[i]
        values, _ = read_mask(mask_path)
        label = values - self.first                     # uint8: 0 - 1 is 255, which is ignored
        label[values == IGNORE] = IGNORE
        return read_image(image_path), label


# --- files ----------------------------------------------------------------------------------------

def read_mask(path):
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
    # Pillow scales grey values of fewer bits to 0 to 255, so the values in the file are lost.
    if mode != "P" and (mode, bits) != ("L", 8):
        raise InputError(f"{path} has the mode {mode} and {bits} bits per value, expected "
                         f"a PNG of one channel (mode P, or mode L with 8 bits); save "
                         f"each pixel's class as its value")
    return torch.from_numpy(values), palette


def read_pair(pair):
    """Read an image and its mask. Returns {value: (colour, mask path)}, and a CRC-32 of the files.

    pair: (image path, mask path). A colour is "#ff0000", or "grey" without a palette.
    """
    image_path, mask_path = pair
    image = read_image(image_path)
    mask, palette = read_mask(mask_path)
    if mask.shape != image.shape[1:]:
        h, w = mask.shape
        H, W = image.shape[1:]
        raise InputError(f"{mask_path} has {w} x {h} pixels, but its image has {W} x "
                         f"{H}; save both in one size")
    values = {}
    for value in mask.unique().tolist():
        colour = "grey"
        if palette:
            colour = "#" + palette[3 * value:3 * value + 3].hex()
        values[value] = (colour, mask_path)
    crc = zlib.crc32(image_path.read_bytes())
    return values, zlib.crc32(mask_path.read_bytes(), crc)


def add_values(values, more):
    """Add more to values, both {value: (colour, source)}. InputError if a value has two colours."""
    for value, (colour, source) in more.items():
        known, other = values.setdefault(value, (colour, source))
        if colour != known:
            raise InputError(f"{other} and {source} have different palettes: the value "
                             f"{value} is {known} and {colour}; save all masks with one "
                             f"palette, or as grey images")


def list_pairs(root, folder=""):
    """List (image path, mask path) in root/images/<folder> and root/annotations/<folder>."""
    images = files_by_name(Path(root, "images", folder), ENDINGS)
    masks = files_by_name(Path(root, "annotations", folder), (".png",))
    alone = sorted(images.keys() ^ masks.keys())
    if alone:
        raise InputError(f"{root}: {len(alone)} files have no partner, for example "
                         f"{alone[0]}.*; expected an image in images/{folder} and a PNG "
                         f"of the same name in annotations/{folder}")
    return [(path, masks[name]) for name, path in images.items()]


def other_files(root, folder, pairs):
    """List the files below root/images/<folder> and root/annotations/<folder> in no pair."""
    known = set().union(*pairs)
    files = files_below(Path(root, "images", folder))
    files += files_below(Path(root, "annotations", folder))
    return [path for path in files if path not in known]


def files_by_name(folder, endings):
    """Return {name without ending: path} of the files in a folder, without hidden files."""
    return {path.stem: path for path in entries(folder) if path.suffix.lower() in endings}


# --- the parts and classes of your own masks ------------------------------------------------------

def own_masks(root):
    """Divide your own masks: {part: [(image path, mask path)]}. Prints the counts.

    PART_OF has the names of the parts' folders in images/ and annotations/. Without a folder for
    train, the training images are in images/ itself. `divide` draws the parts without a folder.
    """
    names = {"train": ""}                       # {part: the name of its folder}
    for path in entries(Path(root, "images")):
        if path.name.lower() in PART_OF:
            names[PART_OF[path.name.lower()]] = path.name
    folders = {part: dict(list_pairs(root, name)) for part, name in names.items()}
    parts, copies = divide(folders)             # the keys of folders[part] are the images
    mask_of = {}                                # {image path: mask path}
    for pairs in folders.values():
        mask_of |= pairs
    others = other_files(root, "", mask_of.items())
    print_parts(root, parts, {"copies": list(copies), "other files": others})
    divided = {}
    for part, images in parts.items():
        divided[part] = [(image, mask_of[image]) for image in images]
    return divided


def class_names(args, classes, trees, first):
    """Return the class names: of classes.txt, of the network, of CamVid, or numbers.

    classes: the names of the network that is evaluated, or None. first: the value of class 0.
    InputError unless the values of all masks are classes.
    """
    values = {}
    for tree in trees:
        add_values(values, tree.values)
    found = sorted(value for value in values if first <= value < IGNORE)
    # Test masks of one class are fine, but the values 0 and 255 are probably two classes.
    needed = 1 if classes and IGNORE not in values else 2
    if len(found) < needed:
        raise InputError(f"{args.data_dir}: the masks have the values {sorted(values)}; "
                         f"expected two classes or more, {first}, {first + 1}, ...; 255 is "
                         f"ignored, so save a second class as {first + 1}")
    largest = found[-1]
    path = Path(args.data_dir, "classes.txt")
    if path.exists():
        lines = path.read_text("utf-8-sig", errors="replace").splitlines()
        names = [line.strip() for line in lines if line.strip()]
        if not classes and args.num_classes not in (0, len(names)):     # in a training
            print0(f"{path} names {len(names)} classes, so --num_classes is not used")
    elif classes:
        names = list(classes)
    elif args.data == "camvid" and args.num_classes == len(CAMVID_CLASSES):
        names = CAMVID_CLASSES
    elif args.num_classes:
        names = [f"class {k}" for k in range(args.num_classes)]
    else:
        missing = set(range(first, largest)).difference(found)
        if missing:
            raise InputError(f"no mask has the value {min(missing)}, but "
                             f"{values[largest][1]} has {largest}; expected all values "
                             f"from {first} to the largest, and 255 where no class is; "
                             f"or list all classes in {path}")
        names = [f"class {k}" for k in range(len(found))]
    if largest >= first + len(names):
        raise InputError(f"{values[largest][1]} has the value {largest}; expected the "
                         f"classes {first} to {first + len(names) - 1}, and 255 where "
                         "no class is")
    return names


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
    tries = 1 + REDRAWS
    if (h, w) == (H, W):                                            # a whole image has one crop
        tries = 1
    for i in range(tries):
        top = int(draw[1 + 2 * i] * (H - h + 1))
        left = int(draw[2 + 2 * i] * (W - w + 1))
        crop = label[rows[top:top + h]][:, columns[left:left + w]]
        count = crop.flatten().bincount(minlength=256)[:IGNORE]     # pixels per class
        if count.max() < 0.75 * count.sum():
            break
    # Take the last crop, even if one class covers most of it.
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
        """Change the colours of an image (3, h, w) uint8 at random, by (seed, position)."""
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
