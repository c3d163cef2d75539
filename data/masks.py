"""Images with a class per pixel: scenes, ADE20K's layout, your own folder; training views of them.

    views = TrainingViews(load_segmentation(args, "train"), size=512)
    image, label, (_, h, w) = views[position, index]      # (3, S, S), (S, S), uint8; 255: ignored

The training transforms come from mmsegmentation 0.14.1, in the order of
`rstrudel/segmenter:segm/data/config/ade20k.py`. Resize, crop and flip change the shape, so they run
per image in DataLoader workers. Distortion (augment.py) and padding with the mean colour run on
whole batches, on any device. Every random number is a function of (seed, sample), see rng.uniform.
"""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from common import InputError, bar, print0
from data.augment import DISTORT_COLUMNS, distort
from data.images import composed, divide, file_hash, list_files, part_folders, read_image
from data.rng import DISTORT, VIEW, uniform
from data.shapes import colour, load_shapes

CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
                  "pedestrian", "bicyclist"]
IGNORE = 255                                 # label of pixels that belong to no class
REDRAWS = 10                                 # tries to replace a crop that is not `varied`
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale, top and left of each crop, flip


# --- sources --------------------------------------------------------------------------------------

def load_segmentation(args, part, seen=None):
    """Load one part of the images that train_seg.py's flags select, as Scenes or a SegTree.

    part: "train"; "test", for the reported scores; or "val", which chooses best.pt in your own
    folder, and is the test part of other data.
    args: flags of a command or of a checkpoint: data, data_dir, num_classes; for --data shapes
    num_images and size; for --data folder values.
    seen: in an evaluation, the hashes of the images that the training used, as the checkpoint
    stores them. With --data folder, every other image is tested.
    """
    if args.data == "shapes":
        n = args.num_images if part == "train" else max(args.num_images // 10, 1)
        return Scenes(part, n, args.size)
    if args.data == "folder":
        return own_folder(args.data_dir, part if seen is None else "all", args.values, seen or ())
    names = CAMVID_CLASSES if args.data == "camvid" else ()
    return ade20k(args.data_dir, "training" if part == "train" else "validation", args.num_classes,
                  names)


class Scenes(Dataset):
    """Rendered scenes in memory. 11 classes: background is 0, and no pixel is ignored."""
    hashes = []

    def __init__(self, split, num_images, size):
        self.images, _, classes, self.labels, _ = load_shapes(split, num_images, size)
        self.classes = ["background", *classes]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]

    def content(self):
        """Return what `fingerprint` hashes."""
        return self.images, self.labels, self.classes


class SegTree(Dataset):
    """Pairs of image and annotation. tree[i]: image (3, H, W) and label (H, W), both uint8.

    files: [(image path, annotation path)]. classes: names. values: the pixel value of each class.
    ignore: pixel values that belong to no class. hashes: of your own image files. A label contains
    an index into `classes` per pixel, or 255 for an ignored pixel.
    """

    def __init__(self, files, classes, values, ignore, hashes=()):
        self.files, self.classes, self.hashes = files, list(classes), list(hashes)
        self.values, self.ignore = list(values), list(ignore)
        self.label_of = torch.full((256,), 254, dtype=torch.uint8)          # 254: unknown
        self.label_of[self.ignore] = 255
        self.label_of[self.values] = torch.arange(len(self.values), dtype=torch.uint8)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image_path, path = self.files[i]
        image, values = read_image(image_path), read_annotation(path)[0]
        if values.shape != image.shape[1:]:
            (h, w), (H, W) = values.shape, image.shape[1:]
            raise InputError(f"{path} has {w} x {h} pixels, but its image has {W} x {H}")
        label = self.label_of[values.long()]
        if (label == 254).any():
            raise InputError(f"{path} contains the value {values[label == 254].max()}, expected "
                             f"{self.values[0]} to {self.values[-1]}, or {self.ignore} for pixels "
                             f"of no class")
        return image, label

    def content(self):
        """Return what `fingerprint` hashes: your own files, or names and sizes of other files."""
        files = [path for pair in self.files for path in pair]
        return self.classes, self.values, [
            file_hash(path) if self.hashes else [composed(os.path.basename(path)),
                                                 os.path.getsize(path)] for path in files]


def read_annotation(path):
    """Read an annotation, an 8-bit PNG of one channel, turned upright like its image.

    Returns the stored values, (H, W) uint8, and the palette as bytes (b"" without one).
    """
    from PIL import Image, ImageOps
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        mode, values, palette = image.mode, np.array(image), bytes(image.getpalette() or [])
    except Exception as error:                          # Pillow raises many types
        raise InputError(f"cannot read {path}: {error}") from None
    if mode not in ("L", "P"):
        raise InputError(f"{path} has the mode {mode}, expected an 8-bit PNG of one channel (mode "
                         f"L or P): each pixel's value is its class")
    return torch.from_numpy(values), palette


def pairs(root, split=""):
    """List (image path, annotation path) in root/images/<split> and root/annotations/<split>.

    The two files of a pair have the same name before the ending. InputError if an image has no
    annotation, or if two files have the same name.
    """
    images, labels = os.path.join(root, "images", split), os.path.join(root, "annotations", split)
    found = [[(composed(Path(path).stem), path) for path in files]
             for files in (list_files(images), list_files(labels, (".png",)))]
    for folder, files in zip((images, labels), found):
        name, count = Counter(stem for stem, _ in files).most_common(1)[0] if files else ("", 0)
        if count != 1:
            raise InputError(f"{folder} has {count} files {name}.*, expected one" if count else
                             f"{folder} has no images")
    paths, partners = map(dict, found)
    alone = sorted(paths.keys() ^ partners.keys())
    if alone:
        raise InputError(f"{root}: {len(alone)} files have no partner in images/ or annotations/, "
                         f"for example {alone[0]}.*")
    return [(path, partners[stem]) for stem, path in paths.items()]


def listed_classes(root):
    """Read class names from classes.txt, one per line, else ADE20K's objectInfo150.txt, else [].

    InputError if a name occurs twice.
    """
    plain, table = Path(root, "classes.txt"), Path(root, "objectInfo150.txt")
    path = plain if plain.exists() else table
    lines = path.read_text("utf-8-sig").splitlines() if path.exists() else []
    names = [composed(line.strip()) for line in lines if line.strip()]
    if path is table:
        return [line.split("\t")[-1].split(",")[0] for line in names[1:]]
    if len(set(names)) < len(names):
        raise InputError(f"{path} lists {Counter(names).most_common(1)[0][0]!r} twice, expected "
                         f"different names")
    return names


def ade20k(root, split, num_classes=None, names=()):
    """Load "training" or "validation" of ADE20K's layout as a SegTree: values 1 to K are classes.

    num_classes: K (default: the number of listed classes). names: K class names, which are used if
    no file in the folder lists names.
    """
    if len(names) != num_classes:
        names = [f"class {k}" for k in range(num_classes or 0)]
    names = listed_classes(root) or names
    if num_classes not in (None, len(names)):
        raise InputError(f"--num_classes {num_classes}: {root} lists {len(names)} classes")
    return SegTree(pairs(root, split), names, range(1, len(names) + 1), (0, 255))


# --- your own folder ------------------------------------------------------------------------------

def find_pairs(root):
    """List the pairs of a folder: {"train", "val", "test", "all"}, see `data.images.divide`.

    root/images and root/annotations contain the files, or both contain training/, validation/ and
    test/, of which the last two are optional. "all" is test/ if it exists, else validation/, else
    all pairs.
    """
    folders = part_folders(os.path.join(root, "images"))
    found = {part: pairs(root, "" if part == "" else os.path.basename(path))
             for part, path in folders.items()}
    reported = next(part for part in ("test", "val", "train", "") if part in found)
    parts = divide({part: {"": files} for part, files in found.items()},
                   lambda pair: Path(pair[0]).stem)
    return {**parts, "all": found[reported]}


def find_values(root):
    """Return the pixel values that are classes in a folder's annotations.

    The classes are all values that occur except 255; but if only 0 and 255 occur, both are classes.
    InputError if the palettes of two files differ, or if classes.txt does not list one name per
    value.
    """
    counts, palettes = torch.zeros(256, dtype=torch.int64), {}
    paths = sorted({label for files in find_pairs(root).values() for _, label in files})
    for path in bar(paths, "reading annotations", leave=False):
        values, palette = read_annotation(path)
        counts += values.flatten().bincount(minlength=256)
        palettes.setdefault(palette, path)
    if len(palettes) > 1:
        one, other = [*palettes.values()][:2]
        raise InputError(f"{one} and {other} have different palettes, so a value may not mean one "
                         f"class: save all annotations with one palette, or as grey images")
    found = counts.nonzero()[:, 0].tolist()
    values = found if found == [0, 255] else [value for value in found if value != IGNORE]
    names = listed_classes(root)
    if len(values) < 2 or names and len(names) != len(values):
        raise InputError(f"--data_dir {root}: the annotations contain the values {found[:9]} and "
                         f"classes.txt lists {len(names)} names; expected two or more classes, and "
                         f"one name per value (255 needs none)")
    print0(f"{root}: {len(paths)} annotations, {len(values)} classes: values {values[:9]}")
    return values


def own_folder(root, part, values, seen=()):
    """Load "train", "val", "test" or "all" of your folder as a SegTree; see find_pairs.

    values: of find_values. seen: hashes of images that are left out, because a network was trained
    on them.
    """
    names = listed_classes(root) or [f"value {value}" for value in values]
    files = [(file_hash(pair[0]), pair) for pair in find_pairs(root)[part]]
    files = [(name, pair) for name, pair in files if name not in seen]
    if not files:
        raise InputError(f"--data_dir {root}: the network was trained on all images")
    hashes, files = zip(*files)
    return SegTree(list(files), names, values, [] if IGNORE in values else [IGNORE], hashes)


# --- sizes ----------------------------------------------------------------------------------------

def resize(x, size):
    """Resize (C, h, w) to (C, *size), bilinear without antialiasing; uint8 stays uint8."""
    if x.shape[1:] == tuple(size):
        return x
    x = x[None]
    if x.dtype == torch.uint8:
        x = x.contiguous(memory_format=torch.channels_last)         # 4 x as fast as contiguous
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)[0]


def resized(height, width, long, short):
    """Scale (height, width) by the largest factor with long side <= long, short side <= short."""
    f = min(long / max(height, width), short / min(height, width))
    return max(int(height * f + 0.5), 1), max(int(width * f + 0.5), 1)


# --- training: first half, one image, in a worker -------------------------------------------------

def varied(label):
    """Return True if no class covers 3/4 or more of a crop's labelled pixels."""
    count = label.flatten().bincount(minlength=256)[:IGNORE]
    return bool(count.max() < 0.75 * count.sum())       # so the crop has at least two classes


def training_view(image, label, draw, size, scales=(0.5, 2.0)):
    """Resize an image by a random factor, crop and flip it. draw: VIEW_COLUMNS numbers in [0, 1).

    The image is resized to a long side of at most 4 * size * r and a short side of at most
    size * r, with r uniform in `scales`. Then the image is cropped to size x size; a side shorter
    than size is not cropped. A crop that is not `varied` is drawn again, at most REDRAWS times.

    Returns:
        image (3, size, size) uint8, padded with 0 on the right and below
        label (size, size) uint8, padded with 255
        height and width without padding
    """
    r = scales[0] + (scales[1] - scales[0]) * draw[0]
    H, W = resized(*label.shape, int(4 * size * r), int(size * r))
    rows = torch.arange(H) * label.shape[0] // H                    # nearest: floor(i * old / new)
    columns = torch.arange(W) * label.shape[1] // W
    h, w = min(size, H), min(size, W)
    for i in range(1 + REDRAWS):
        top = int(draw[1 + 2 * i] * (H - h + 1))
        left = int(draw[2 + 2 * i] * (W - w + 1))
        crop = label[rows[top:top + h]][:, columns[left:left + w]]
        if (h, w) == (H, W) or varied(crop):                        # a whole image has one crop
            break
    image = resize(image, (H, W))[:, top:top + h, left:left + w]
    if draw[-1] < 0.5:
        image, crop = image.flip(2), crop.flip(1)
    padding = (0, size - w, 0, size - h)
    return F.pad(image, padding).contiguous(), F.pad(crop, padding, value=IGNORE), h, w


class TrainingViews(Dataset):
    """Training views of a source: views[position, index] is (image, label, (position, h, w)).

    `index` chooses the image. `position`, the sample's number in the whole run, chooses its view,
    see training_view.
    """

    def __init__(self, source, size, scales=(0.5, 2.0), seed=0):
        self.source, self.size, self.scales, self.seed = source, size, scales, seed

    def __getitem__(self, key):
        position, index = key
        draw = uniform(torch.tensor([position]), VIEW_COLUMNS, self.seed, VIEW)[0].tolist()
        image, label, h, w = training_view(*self.source[index], draw, self.size, self.scales)
        return image, label, (position, h, w)


# --- training: second half, batches, on any device ------------------------------------------------

def finish_views(images, height, width, positions, seed, mean, distorted=True):
    """Distort and pad uint8 views; return float32 in [0, 1].

    images: (B, 3, S, S) uint8. height, width: without padding, (B,) int64 on the CPU. positions:
    the samples' numbers in the whole run, (B,) int64 on the CPU. mean: (3, 1, 1) in [0, 1], the
    colour of the padding. The model subtracts this colour, so its first layer gets 0 there.
    """
    if distorted:
        images = distort(images, uniform(positions, DISTORT_COLUMNS, seed, DISTORT))
    height, width = (t.view(-1, 1, 1, 1).to(images.device, non_blocking=True)
                     for t in (height, width))
    axis = torch.arange(images.shape[-1], device=images.device)
    return torch.where((axis[:, None] < height) & (axis < width), images / 255, mean)


# --- pictures ------------------------------------------------------------------------------------

def palette(num_classes):
    """Return one colour per class, (256, 3) uint8: hues a golden angle apart, the rest black."""
    k = torch.arange(256.0)
    hue, luminance = (0.6 + k * 0.618034) % 1, 0.3 + 0.22 * (k % 3)
    rgb = colour(hue, torch.full_like(k, 0.85), luminance)[:, :, 0, 0]
    rgb[num_classes:] = 0
    return (rgb * 255).round().byte()


def save_pictures(path, triples, num_classes):
    """Draw a PNG with one row per image: image, truth, prediction.

    triples: image (3, H, W), truth and prediction (H, W), uint8, from segmenter.predictions. H and
    W can vary.
    """
    from PIL import Image
    colours, rows = palette(num_classes), []
    for image, label, prediction in ([t.cpu() for t in triple] for triple in triples):
        row = [image.permute(1, 2, 0), colours[label.long()], colours[prediction.long()]]
        rows.append(torch.cat(row, 1))
    width = max(row.shape[1] for row in rows)
    rows = [F.pad(row, (0, 0, 0, width - row.shape[1], 0, 4), value=255) for row in rows]
    Image.fromarray(torch.cat(rows).numpy()).save(path)
