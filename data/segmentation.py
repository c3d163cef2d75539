"""Images with a class for every pixel: folders laid out like ADE20K, the rendered scenes, the training transforms.

The transforms are those of mmsegmentation 0.14.1 as `rstrudel/segmenter:segm/data/config/ade20k.py` lists them. What
changes the shape (resize, crop, flip) runs per image in DataLoader workers, what follows (photometric distortion,
padding with the mean colour) on whole batches, on any device. Every random number is a function of (seed, sample), see
common.uniform: no worker, batch or process matters.

    tree = SegTree("data/ADEChallengeData2016", "training", num_classes=150)
    image, label = tree[0]                     # (3, H, W), (H, W), both uint8; label 255: no class, ignored
    views = TrainingViews(tree, size=512)      # views[position, index] is one training sample
"""

import os

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

import data
from data.augment import replace, send
from data.rng import uniform
from segmenter import IGNORE, resized

VIEW, DISTORT = 30, 31                       # what a random number is for: the last part of its key
REDRAWS = 10                                 # of a crop without variety
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale; top and left of each crop; flip?
DISTORT_COLUMNS = 9
CAMVID_CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian",
                  "bicyclist"]


# --- where images come from: source[i] -> image (3, H, W) uint8, label (H, W) uint8; source.classes ------------------

class Scenes(Dataset):
    """The scenes of data.render_scenes in memory; 11 classes: background is class 0, no pixel is ignored."""

    def __init__(self, split, num_images, size, seed=0):
        self.images, _, classes, self.labels = data.load_shapes(split, num_images, size, seed)
        self.classes = ["background", *classes]
        self.names = [f"scene {i}" for i in range(num_images)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def class_names(root, num_classes=None):
    """Class names of a data folder: of classes.txt (one a line), else of ADE20K's objectInfo150.txt, else made up.

    num_classes: how many there must be; None: as many as the file has. Raises ValueError if it has another number, or
    if there is neither a file nor a number.
    """
    lists, table = os.path.join(root, "classes.txt"), os.path.join(root, "objectInfo150.txt")
    names, path = [], lists if os.path.exists(lists) else table
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
        names = lines if path == lists else [line.split("\t")[-1].split(",")[0] for line in lines[1:]]
    if not names and num_classes is None:
        raise ValueError(f"how many classes has --data_dir {root}? There is no classes.txt in it; give --num_classes")
    if names and num_classes not in (None, len(names)):
        raise ValueError(f"--num_classes {num_classes}: {path} lists {len(names)} classes")
    return names or (CAMVID_CLASSES if num_classes == 11 else [f"class {k}" for k in range(num_classes)])


def shift_labels(label):
    """ADE20K's file values to classes: 0 (unlabelled) -> 255 (ignored), v -> v - 1; 255 stays. uint8, any shape."""
    label = label - 1                                                                    # uint8: 0 wraps round to 255
    return torch.where(label == 254, IGNORE, label)


class SegTree(Dataset):
    """root/images/<split>/<stem>.jpg with root/annotations/<split>/<stem>.png, as ADE20K is laid out.

    tree[i]: image (3, H, W) and label (H, W), uint8, classes from 0, 255 for pixels to be ignored. Images may be grey,
    have an alpha channel (dropped) or 16 bits; annotations are 8-bit single-channel PNG. num_classes: see class_names.
    Raises FileNotFoundError and ValueError, one line that names the folder or file.
    """

    def __init__(self, root, split, num_classes=None):
        self.folders = [os.path.join(str(root), part, split) for part in ("images", "annotations")]
        for folder in self.folders:
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"--data_dir {root} has no folder {folder}; expected "
                                        f"{{images,annotations}}/{{training,validation}} as in ADE20K")
        self.classes = class_names(str(root), num_classes)
        if not 2 <= len(self.classes) <= 254:
            raise ValueError(f"{len(self.classes)} classes, expected 2 to 254: labels are 8-bit, 255 is ignored")
        images, labels = ({os.path.splitext(file)[0]: file for file in sorted(os.listdir(folder))
                           if file.lower().endswith(extensions)}
                          for folder, extensions in zip(self.folders, (data.IMAGE_EXTENSIONS, ".png")))
        for here, there, folder, of in ((images, labels, self.folders[1], "annotation of image"),
                                        (labels, images, self.folders[0], "image of annotation")):
            missing = sorted(set(here) - set(there))
            if missing:
                raise ValueError(f"{folder} has no {of} {', '.join(missing[:3])}"
                                 + f" and {len(missing) - 3} more" * (len(missing) > 3))
        if not images:
            raise ValueError(f"{self.folders[0]} has no images (.jpg, .png)")
        self.names = sorted(images)
        self.files = [(images[name], labels[name]) for name in self.names]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image_path, label_path = (os.path.join(folder, file) for folder, file in zip(self.folders, self.files[i]))
        image = data.decode(np.fromfile(image_path, np.uint8), image_path)
        try:
            with Image.open(label_path) as file:
                mode, pixels = file.mode, np.array(file)                        # mode P: the numbers, not their colours
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"cannot decode {label_path}: {error}") from None
        if mode not in ("L", "P"):
            raise ValueError(f"{label_path} is of mode {mode}, expected an 8-bit single-channel PNG")
        if pixels.shape != image.shape[1:]:
            (h, w), (H, W) = pixels.shape, image.shape[1:]
            raise ValueError(f"{label_path} is {w} x {h} pixels, its image {image_path} {W} x {H}")
        wrong = pixels[(pixels > len(self.classes)) & (pixels < 255)]
        if len(wrong):
            raise ValueError(f"{label_path} holds the value {wrong.max()}, expected 0 (ignored) to {len(self.classes)} "
                             f"(--num_classes)")
        return image, shift_labels(torch.from_numpy(pixels))


def load_split(args, split):
    """What a run of train_seg.py trains on, "training", or is evaluated on, "validation".

    args: its flags, or those that its checkpoint holds: data ("shapes" or a kind of folder),
    data_dir, num_classes, num_images and size (of the scenes). Gives the same images each time.
    """
    if args.data == "shapes":
        few = max(args.num_images // 10, 1)
        name, n = dict(training=("train", args.num_images), validation=("test", few))[split]
        return Scenes(name, n, args.size)
    if not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    return SegTree(args.data_dir, split, args.num_classes)


# --- training transforms, first half: one image, in a worker ---------------------------------------------------------

def resize(image, height, width):
    """Bilinear without antialiasing, (3, H, W) uint8 -> (3, height, width) uint8."""
    if image.shape[1:] == (height, width):
        return image
    image = image[None].contiguous(memory_format=torch.channels_last)                    # 4 x as fast as planes
    return F.interpolate(image, (height, width), mode="bilinear", align_corners=False)[0]


def varied(label):
    """Is a crop worth learning from: two classes or more, the commonest on less than 3/4 of the labelled pixels?"""
    count = label.flatten().bincount(minlength=256)[:IGNORE]
    return bool(count.max() < 0.75 * count.sum())                # 0.75 of n < n: then there is a second class as well


def training_view(image, label, draw, size, scales=(0.5, 2.0)):
    """Resize by a random factor, crop, flip. draw: VIEW_COLUMNS numbers in [0, 1).

    The image is resized to fit in 4 size r by size r (long, short side), r uniform in scales, then cropped to
    size x size, a shorter side taken whole. A crop that is not `varied` is drawn again, at most REDRAWS times.
    Returns image (3, size, size) and label (size, size), uint8, padded right and below (0, and 255 in the label), and
    the height and width that are not padding.
    """
    r = scales[0] + (scales[1] - scales[0]) * draw[0]
    H, W = resized(*label.shape, int(4 * size * r), int(size * r))
    rows, columns = (torch.arange(n) * old // n for n, old in zip((H, W), label.shape))  # nearest: floor(i * old / new)
    h, w = min(size, H), min(size, W)
    for i in range(1 + REDRAWS):
        top, left = int(draw[1 + 2 * i] * (H - h + 1)), int(draw[2 + 2 * i] * (W - w + 1))
        crop = label[rows[top:top + h]][:, columns[left:left + w]]
        if (h, w) == (H, W) or varied(crop):                                              # a whole image: no other crop
            break
    image = resize(image, H, W)[:, top:top + h, left:left + w]
    if draw[-1] < 0.5:
        image, crop = image.flip(2), crop.flip(1)
    padding = (0, size - w, 0, size - h)
    return F.pad(image, padding).contiguous(), F.pad(crop, padding, value=IGNORE), h, w


class TrainingViews(Dataset):
    """views[position, index]: one sample (image, label, (position, height, width)), see training_view.

    `index` says which image of the source, `position` (the sample's number in the whole run) which view of it.
    """

    def __init__(self, source, size, scales=(0.5, 2.0), seed=0):
        self.source, self.size, self.scales, self.seed = source, size, scales, seed

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """DataLoader asks for a whole batch here: its random numbers are drawn in one call."""
        draws = uniform(torch.tensor([position for position, _ in keys]), VIEW_COLUMNS, self.seed, VIEW).tolist()
        views = (training_view(*self.source[index], draw, self.size, self.scales)
                 for (_, index), draw in zip(keys, draws))
        return [(image, label, (position, h, w)) for (image, label, h, w), (position, _) in zip(views, keys)]


# --- training transforms, second half: batches, on any device --------------------------------------------------------

def scale_and_shift(x, factor, amount=0.0):
    """factor * x + amount in grey levels, clipped and truncated as uint8 arithmetic does; x stays float."""
    return (x * factor + amount).clamp(0, 255).floor()


def scale_hsv(x, saturation, turn):
    """S of HSV times `saturation`, H plus `turn` half degrees. x: (B, 3, H, W) float, whole grey levels, as the result.

    H is kept in whole half degrees and S in 256 levels, as OpenCV's 8-bit images do.
    """
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    span = (value - low).clamp(min=1)                                                    # grey: all numerators are 0
    hue = torch.where(value == red, (green - blue) / span, torch.where(                  # in sixths of the circle
        value == green, 2 + (blue - red) / span, 4 + (red - green) / span))
    hue = ((hue * 30 + 0.5).floor()[:, None] + turn) % 180
    s = (255 * (value - low) / value.clamp(min=1) + 0.5).floor()[:, None]
    s, value = scale_and_shift(s, saturation) / 255, value[:, None]
    k = (hue / 30 + torch.tensor([5, 3, 1], device=x.device).view(3, 1, 1)) % 6
    return (value - value * s * torch.minimum(k, 4 - k).clamp(0, 1)).floor()             # R, G, B = V - V S (0 to 1)


def distort(images, u):
    """Photometric distortion: brightness, contrast, saturation and hue, each with probability 0.5.

    images: (B, 3, H, W) uint8. u: (B, DISTORT_COLUMNS) on the CPU. Returns uint8. Contrast comes second or last, by a
    fair coin. Where saturation and hue both change, HSV is entered once, not twice as in the source.
    """
    def between(low, high, j):                                      # (B,), and `low` etc. are neutral where not applied
        return low + (high - low) * u[:, j]

    def chosen(j, value, neutral):
        return send(torch.where(u[:, j] < 0.5, value, neutral).view(-1, 1, 1, 1), images.device)

    contrast = torch.where(u[:, 2] < 0.5, between(0.5, 1.5, 3), 1.0)
    coloured = ((u[:, 5] < 0.5) | (u[:, 7] < 0.5)).nonzero()[:, 0]                       # on the CPU: no wait
    x = scale_and_shift(images.float(), 1.0, chosen(0, between(-32, 32, 1), 0.0))        # brightness
    x = scale_and_shift(x, chosen(4, contrast, 1.0))                                     # contrast, first place
    if len(coloured):
        where = send(coloured, images.device)
        saturation, turn = chosen(5, between(0.5, 1.5, 6), 1.0), chosen(7, (u[:, 8] * 36).floor() - 18, 0.0)
        x = replace(x, [coloured], [scale_hsv(x[where], saturation[where], turn[where])])
    last = torch.where(u[:, 4] < 0.5, 1.0, contrast).view(-1, 1, 1, 1)
    return scale_and_shift(x, send(last, images.device)).byte()                          # contrast, last place


def finish_views(images, height, width, positions, seed, mean, distorted=True):
    """Distortion, then padding: uint8 views to float32 in [0, 1], the mean colour where there is no image.

    images: (B, 3, S, S) uint8. height, width, positions: (B,) int64 on the CPU. mean: (3, 1, 1) in [0, 1], the one that
    the model subtracts: so padding is exactly 0 for its first layer.
    """
    if distorted:
        images = distort(images, uniform(positions, DISTORT_COLUMNS, seed, DISTORT))
    S, (height, width) = images.shape[-1], (send(t.view(-1, 1, 1, 1), images.device) for t in (height, width))
    axis = torch.arange(S, device=images.device)
    return torch.where((axis[:, None] < height) & (axis < width), images / 255, mean)


# --- pictures --------------------------------------------------------------------------------------------------------

def palette(num_classes):
    """A colour per class, (256, 3) uint8: hues a golden angle apart from blue on, three brightnesses; 255 is black."""
    k = torch.arange(256.0)
    rgb = data.colour((0.6 + k * 0.618034) % 1, torch.full_like(k, 0.85), 0.3 + 0.22 * (k % 3))[:, :, 0, 0]
    rgb[num_classes:] = 0
    return (rgb * 255).round().byte()


def save_pictures(path, images, labels, predictions, classes):
    """One PNG, a row per image: the image, the truth, the prediction; below them the colours of the classes seen.

    images: list of (3, H, W) uint8; labels, predictions: lists of (H, W) uint8; all on the CPU, H and W may vary.
    """
    colours, gap = palette(len(classes)), 4
    zoom = max(1, 160 // max(image.shape[2] for image in images))
    rows = [torch.cat([image.permute(1, 2, 0), colours[label.long()], colours[prediction.long()]], 1)
            .repeat_interleave(zoom, 0).repeat_interleave(zoom, 1) for image, label, prediction
            in zip(images, labels, predictions)]                                          # (H, 3 W, 3) each
    seen = sorted({k for t in (*labels, *predictions) for k in t.unique().tolist()})
    width = max(row.shape[1] for row in rows)
    cell, across = 150, max(1, width // 150)
    top = sum(len(row) + gap for row in rows)
    picture = Image.new("RGB", (width, top + 16 * -(-len(seen) // across)), "white")
    y = 0
    for row in rows:
        picture.paste(Image.fromarray(row.numpy()), (0, y))
        y += len(row) + gap
    pen = ImageDraw.Draw(picture)
    for i, k in enumerate(seen):
        x, y = cell * (i % across), top + 16 * (i // across)
        pen.rectangle((x, y + 2, x + 12, y + 13), fill=tuple(colours[k].tolist()))
        pen.text((x + 18, y + 2), classes[k] if k < len(classes) else "ignored", fill="black")
    picture.save(path)
