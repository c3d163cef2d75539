"""Images with a class for every pixel: scenes, ADE20K's layout, a folder of one's own; pictures.

    tree = SegTree("data/ADEChallengeData2016", "training", num_classes=150)
    image, label = tree[0]                   # (3, H, W), (H, W), both uint8; label 255: ignored

The transforms of training are those of mmsegmentation 0.14.1 as
`rstrudel/segmenter:segm/data/config/ade20k.py` lists them. What changes the shape (resize, crop,
flip) runs per image in DataLoader workers, the rest (distortion, padding with the mean colour) on
whole batches, on any device. Every random number is a function of (seed, sample), see rng.uniform.

    views = TrainingViews(source, size=512)        # views[position, index] is one training sample
"""

import io
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from tqdm import tqdm

from data.files import IMAGE_EXTENSIONS, decode, name_hash, read_bytes, same_folder, shown
from data.rng import uniform
from data.shapes import colour, load_shapes

IGNORE = 255                                 # label of pixels that do not count
SHARE = 0.2                                  # of a flat folder's images is held out
CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
                  "pedestrian", "bicyclist"]
VIEW, DISTORT = 30, 31                       # what a random number is for: the last part of its key
REDRAWS = 10                                 # of a crop without variety
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale; top and left of each crop; flip?
DISTORT_COLUMNS = 9


# --- source[i] -> image (3, H, W), label (H, W), both uint8; source.classes ----------------------

class Scenes(Dataset):
    """Hold rendered scenes in memory; 11 classes: background is 0, no pixel is ignored."""

    def __init__(self, split, num_images, size):
        self.images, _, classes, self.labels = load_shapes(split, num_images, size)
        self.classes = ["background", *classes]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def listed_classes(root):
    """Read (names, file) of classes.txt or ADE20K's objectInfo150.txt; neither: ([], None)."""
    for path in (Path(root, "classes.txt"), Path(root, "objectInfo150.txt")):
        if path.exists():
            try:
                text = path.read_text("utf-8-sig")
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
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
        raise ValueError(f"how many classes has --data_dir {root}? There is no classes.txt in it; "
                         f"give --num_classes")
    if names and num_classes not in (None, len(names)):
        raise ValueError(f"--num_classes {num_classes}: {path} lists {len(names)} classes")
    if not names and num_classes == len(likely):
        names = likely
    names = names or [f"class {k}" for k in range(num_classes)]
    if not 2 <= len(names) <= 254:
        raise ValueError(f"{len(names)} classes, expected 2 to 254: labels are 8-bit, 255 is "
                         f"ignored")
    return names


def shift_labels(label):
    """Turn a file's values into classes: 0 (unlabelled), 255 -> 255 (ignored), v -> v - 1."""
    label = label - 1                                               # uint8: 0 wraps round to 255
    return torch.where(label == 254, IGNORE, label)


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
        raise ValueError(f"cannot decode {shown(label_path)}: {error}") from None
    if mode not in ("L", "P"):
        raise ValueError(f"{shown(label_path)} is of mode {mode}, expected an 8-bit PNG of one "
                         f"channel")
    if pixels.shape != image.shape[1:]:
        (h, w), (H, W) = pixels.shape, image.shape[1:]
        raise ValueError(f"{shown(label_path)} is {w} x {h} pixels, its image {W} x {H}")
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
        lonely = {f"{self.folders[1]} has no annotation of image": images.keys() - labels,
                  f"{self.folders[0]} has no image of annotation": labels.keys() - images}
        for what, names in lonely.items():
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ValueError(f"{what} {', '.join(sorted(names)[:3])}{more}")
        if not images:
            raise ValueError(f"{self.folders[0]} has no images (.jpg, .png)")
        self.names = list(images)
        self.files = [(images[name], labels[name]) for name in images]

    def list_files(self, root):
        """List [images, annotations], {stem: path} each, in the order of their names."""
        found = []
        for folder, extensions in zip(self.folders, (IMAGE_EXTENSIONS, ".png")):
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"--data_dir {root} has no folder {folder}; expected "
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
            raise ValueError(f"{self.files[i][1]} holds the value {wrong.max()}, expected 0 "
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
                raise ValueError(f"--data_dir {root}: no {what}")

        # the part that is asked for, as far as it can be read
        self.unmatched = len(images.keys() ^ labels.keys())
        if flat and split != "all":
            held = max(round(SHARE * len(names)), 1)
            order = sorted(names, key=name_hash)
            names = sorted(order[:held] if split == "validation" else order[held:])
        pairs = {name: (images[name], labels[name]) for name in names}
        self.names, self.files, self.sides = [], [], []
        self.pixels = torch.zeros(256, dtype=torch.int64)
        for name in tqdm(names, f"reading {split} images", leave=False, disable=len(names) < 200):
            try:
                image, values = read_pair(*pairs[name])
            except (ValueError, OSError) as error:
                tqdm.write(f"skipping: {error}")
                continue
            self.names.append(name)
            self.files.append(pairs[name])
            self.sides.append(min(values.shape))
            self.pixels += values.flatten().bincount(minlength=256)
        self.unreadable = len(names) - len(self.names)
        if not self.names:
            raise ValueError(f"--data_dir {root}: no {split} image is left: {len(images)} images, "
                             f"{self.unmatched} unmatched files, {self.unreadable} unreadable")
        self.classes = class_names(root, num_classes) if num_classes else []


def load_folder(root, num_classes=None):
    """Load a folder of one's own: (training, validation) OwnFolder and what was found, in words.

    The number of classes is num_classes, or that of classes.txt, or the highest value.
    """
    if not root:
        raise ValueError("--data folder needs --data_dir")
    train, val = OwnFolder(root, "training"), OwnFolder(root, "validation")
    pixels = train.pixels + val.pixels
    values = [value for value in range(1, 255) if pixels[value]]
    if len(values) < 2:
        raise ValueError(f"--data_dir {root}: the annotations hold {len(values)} classes, expected "
                         f"2 or more; values 0 and 255 are no class: they are ignored")
    K = num_classes or len(listed_classes(root)[0]) or values[-1]
    train.classes = val.classes = class_names(root, K)
    if values[-1] > K:
        raise ValueError(f"--data_dir {root}: the annotations hold the value {values[-1]}, "
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


def load_split(args, split, trained=None):
    """Load what train_seg.py trains on, "training", or is evaluated on, "validation".

    args: its flags, or those that its checkpoint holds: data ("shapes" or a kind of folder),
    data_dir, num_classes, num_images and size (of the scenes). Gives the same images each time.
    trained: in an evaluation, the flags of the run, a dict: nothing of another folder was held out.
    """
    if args.data == "shapes":
        if split == "training":
            return Scenes("train", args.num_images, args.size)
        return Scenes("test", max(args.num_images // 10, 1), args.size)
    if not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    if args.data != "folder":
        return SegTree(args.data_dir, split, args.num_classes)
    if trained is not None and not same_folder(trained.get("data_dir"), args.data_dir):
        split = "all"
    return OwnFolder(args.data_dir, split, args.num_classes)


# --- training: first half, one image, in a worker -------------------------------------------------

def resize(image, height, width):
    """Resize bilinearly without antialiasing, (3, H, W) uint8 -> (3, height, width) uint8."""
    if image.shape[1:] == (height, width):
        return image
    image = image[None].contiguous(memory_format=torch.channels_last)       # 4 x as fast as planes
    return F.interpolate(image, (height, width), mode="bilinear", align_corners=False)[0]


def varied(label):
    """Is a crop worth learning from: the commonest class on less than 3/4 of what is labelled?"""
    count = label.flatten().bincount(minlength=256)[:IGNORE]
    return bool(count.max() < 0.75 * count.sum())                   # so there is a second class too


def training_view(image, label, draw, size, scales=(0.5, 2.0)):
    """Resize by a random factor, crop, flip. draw: VIEW_COLUMNS numbers in [0, 1).

    The image is resized to fit in 4 size r by size r (long, short side), r uniform in scales, then
    cropped to size x size, a shorter side taken whole. A crop that is not `varied` is drawn again,
    at most REDRAWS times. Returns image (3, size, size) and label (size, size), uint8, padded right
    and below (0, and 255 in the label), and the height and width that are not padding.
    """
    r = scales[0] + (scales[1] - scales[0]) * draw[0]
    f = min(int(4 * size * r) / max(label.shape), int(size * r) / min(label.shape))
    H, W = (max(int(side * f + 0.5), 1) for side in label.shape)    # as segmenter.resized
    rows = torch.arange(H) * label.shape[0] // H                    # nearest: floor(i * old / new)
    columns = torch.arange(W) * label.shape[1] // W
    h, w = min(size, H), min(size, W)
    for i in range(1 + REDRAWS):
        top = int(draw[1 + 2 * i] * (H - h + 1))
        left = int(draw[2 + 2 * i] * (W - w + 1))
        crop = label[rows[top:top + h]][:, columns[left:left + w]]
        if (h, w) == (H, W) or varied(crop):                        # a whole image: no other crop
            break
    image = resize(image, H, W)[:, top:top + h, left:left + w]
    if draw[-1] < 0.5:
        image, crop = image.flip(2), crop.flip(1)
    padding = (0, size - w, 0, size - h)
    return F.pad(image, padding).contiguous(), F.pad(crop, padding, value=IGNORE), h, w


class TrainingViews(Dataset):
    """Give views[position, index], a sample (image, label, (position, h, w)): training_view.

    `index` says which image of the source, `position` (the sample's number in the whole run) which
    view of it.
    """

    def __init__(self, source, size, scales=(0.5, 2.0), seed=0):
        self.source, self.size, self.scales, self.seed = source, size, scales, seed

    def __getitem__(self, key):
        position, index = key
        draw = uniform(torch.tensor([position]), VIEW_COLUMNS, self.seed, VIEW)[0].tolist()
        image, label, h, w = training_view(*self.source[index], draw, self.size, self.scales)
        return image, label, (position, h, w)


# --- training: second half, batches, on any device ------------------------------------------------

def scale_and_shift(x, factor, amount=0.0):
    """Compute factor * x + amount in grey levels, clipped, cut to whole ones; x stays float."""
    return (x * factor + amount).clamp(0, 255).floor()


def scale_hsv(x, saturation, turn):
    """Multiply S of HSV, add `turn` half degrees to H. x: (B, 3, H, W) float, grey levels.

    H is kept in whole half degrees and S in 256 levels, as OpenCV's 8-bit images do.
    """
    # to hue, in sixths of the circle, and saturation; grey: all numerators are 0
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    span = (value - low).clamp(min=1)
    hue = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    hue = torch.where(value == red, (green - blue) / span, hue)
    s = (255 * (value - low) / value.clamp(min=1) + 0.5).floor()

    # changed, and back: R, G, B = V - V S (0 to 1)
    hue = ((hue * 30 + 0.5).floor()[:, None] + turn) % 180
    s, value = scale_and_shift(s[:, None], saturation) / 255, value[:, None]
    k = (hue / 30 + torch.tensor([5, 3, 1], device=x.device).view(3, 1, 1)) % 6
    return (value - value * s * torch.minimum(k, 4 - k).clamp(0, 1)).floor()


def distort(images, u):
    """Distort brightness, contrast, saturation, hue, each with probability 0.5.

    images: (B, 3, H, W) uint8. u: (B, DISTORT_COLUMNS). Returns uint8. Contrast comes second or
    last, by a fair coin. Where saturation and hue both change, HSV is entered once, not twice as in
    the source.
    """
    u = u.to(images.device, non_blocking=True)[:, :, None, None, None]

    def drawn(j, low, high, neutral):
        return torch.where(u[:, j] < 0.5, low + (high - low) * u[:, j + 1], neutral)

    contrast, saturation = drawn(2, 0.5, 1.5, 1.0), drawn(5, 0.5, 1.5, 1.0)
    turn = torch.where(u[:, 7] < 0.5, (u[:, 8] * 36).floor() - 18, 0.0)
    early, coloured = u[:, 4] < 0.5, (u[:, 5] < 0.5) | (u[:, 7] < 0.5)
    x = scale_and_shift(images.float(), 1.0, drawn(0, -32, 32, 0.0))            # brightness
    x = scale_and_shift(x, torch.where(early, contrast, 1.0))
    x = torch.where(coloured, scale_hsv(x, saturation, turn), x)
    return scale_and_shift(x, torch.where(early, 1.0, contrast)).byte()


def finish_views(images, height, width, positions, seed, mean, distorted=True):
    """Distort, then pad: uint8 views to float32 in [0, 1].

    images: (B, 3, S, S) uint8. height, width, positions: (B,) int64 on the CPU. mean: (3, 1, 1) in
    [0, 1], the colour of the padding: the one that the model subtracts, so that its first layer
    sees 0.
    """
    if distorted:
        images = distort(images, uniform(positions, DISTORT_COLUMNS, seed, DISTORT))
    height, width = (t.view(-1, 1, 1, 1).to(images.device, non_blocking=True)
                     for t in (height, width))
    axis = torch.arange(images.shape[-1], device=images.device)
    return torch.where((axis[:, None] < height) & (axis < width), images / 255, mean)


# --- pictures ------------------------------------------------------------------------------------

def palette(num_classes):
    """Choose a colour per class, (256, 3) uint8: hues a golden angle apart; 255 is black."""
    k = torch.arange(256.0)
    hue, luminance = (0.6 + k * 0.618034) % 1, 0.3 + 0.22 * (k % 3)
    rgb = colour(hue, torch.full_like(k, 0.85), luminance)[:, :, 0, 0]
    rgb[num_classes:] = 0
    return (rgb * 255).round().byte()


def save_pictures(path, triples, classes):
    """Draw a PNG, a row per image: image, truth, prediction; below, the classes' colours.

    triples: image (3, H, W), truth and prediction (H, W), uint8, as iou.predictions yields them; H
    and W may vary.
    """
    from PIL import Image, ImageDraw
    triples = [[t.cpu() for t in triple] for triple in triples]
    colours = palette(len(classes))
    zoom = max(1, 160 // max(image.shape[2] for image, _, _ in triples))
    rows = []
    for image, label, prediction in triples:
        row = [image.permute(1, 2, 0), colours[label.long()], colours[prediction.long()]]
        rows.append(torch.cat(row, 1).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1))
    width = max(row.shape[1] for row in rows)
    rows = [F.pad(row, (0, 0, 0, width - row.shape[1], 0, 4), value=255) for row in rows]
    pixels = torch.cat(rows)

    seen = sorted({k for _, *labels in triples for t in labels for k in t.unique().tolist()})
    across = max(1, width // 150)
    picture = Image.new("RGB", (width, len(pixels) + 16 * math.ceil(len(seen) / across)), "white")
    picture.paste(Image.fromarray(pixels.numpy()))
    pen = ImageDraw.Draw(picture)
    for i, k in enumerate(seen):
        x, y = 150 * (i % across), len(pixels) + 16 * (i // across)
        pen.rectangle((x, y + 2, x + 12, y + 13), fill=tuple(colours[k].tolist()))
        pen.text((x + 18, y + 2), classes[k] if k < len(classes) else "ignored", fill="black")
    picture.save(path)
