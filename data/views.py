"""Images with a class per pixel: load them, make training views of them, draw them.

    views = TrainingViews(load_segmentation(args, "train"), size=512)
    image, label, (_, h, w) = views[position, index]      # (3, S, S), (S, S), uint8; 255: ignored

The training transforms come from mmsegmentation 0.14.1, in the order of
`rstrudel/segmenter:segm/data/config/ade20k.py`. Resize, crop and flip change the shape, so they run
per image in DataLoader workers. Distortion (distort.py) and padding with the mean colour run on
whole batches, on any device. Every random number is a function of (seed, sample), see rng.uniform.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from common import InputError
from data.distort import COLUMNS, distort
from data.folders import hold_out_by_name, same_folder
from data.masks import CAMVID_CLASSES, ade20k, own_folder
from data.rng import DISTORT, VIEW, uniform
from data.shapes import colour, load_shapes

IGNORE = 255                                 # label of pixels that belong to no class
REDRAWS = 10                                 # tries to replace a crop that is not `varied`
VIEW_COLUMNS = 1 + 2 * (1 + REDRAWS) + 1     # scale, top and left of each crop, flip


def load_segmentation(args, part, trained=None):
    """Load one part of the images that train_seg.py's flags select, as Scenes or a SegTree.

    part: "train"; "test", for the reported scores; or "val", which chooses best.pt. With keep_best,
    "val" is held out from the training images; without keep_best there is no "val".
    args: flags of a command or of a checkpoint: data, data_dir, keep_best, num_classes; for
    --data shapes num_images and size; for --data folder values and ignore.
    trained: in an evaluation, the flags of the training, a dict. With --data folder, a network that
    was not trained on --data_dir is tested on more images, the part "all" of find_pairs.
    """
    if args.data == "shapes":
        n = args.num_images if part == "train" else max(args.num_images // 10, 1)
        return Scenes(part, n, args.size)
    if not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    if args.data == "folder":
        if trained is not None and not same_folder(trained.get("data_dir"), args.data_dir):
            part = "all"
        return own_folder(args.data_dir, part, args.values, args.ignore, args.keep_best)
    names = CAMVID_CLASSES if args.data == "camvid" else ()
    tree = ade20k(args.data_dir, "validation" if part == "test" else "training", args.num_classes,
                  names)
    if part != "test":
        val, _ = hold_out_by_name([label for _, label in tree.files], args.data_dir, test=False,
                                  val=args.keep_best)
        tree.files = [pair for pair in tree.files if (pair[1] in val) == (part == "val")]
    return tree


class Scenes(Dataset):
    """Rendered scenes in memory. 11 classes: background is 0, and no pixel is ignored."""

    def __init__(self, split, num_images, size):
        self.images, _, classes, self.labels = load_shapes(split, num_images, size)
        self.classes = ["background", *classes]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


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
        images = distort(images, uniform(positions, COLUMNS, seed, DISTORT))
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


def save_pictures(path, triples, classes):
    """Draw a PNG with one row per image (image, truth, prediction) and a legend of the classes.

    triples: image (3, H, W), truth and prediction (H, W), uint8, from segmenter.predictions. H and
    W can vary.
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
