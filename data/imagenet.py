"""ImageNet, or images in the same layout, decoded and cropped by the workers of a DataLoader.

The images do not fit in memory, so a file is read when a batch needs it. A random crop depends on
(seed, position) only; the position is the sample's number in the whole run.
"""

import math
import os

import numpy as np
import torch
from torch.utils.data import Dataset

from common import InputError
from data.decode import read_image
from data.folders import scan_folders
from data.rng import RANDOM_CROP, uniform


def random_crop_box(width, height, draw):
    """Choose the box (left, top, width, height) of a random resized crop, inside the image.

    draw: 22 numbers in [0, 1). The area is uniform from 8 % to 100 % of the image, and the aspect
    ratio is log-uniform from 3:4 to 4:3. The first of ten tries that fits in the image is taken. If
    none fits, the result is the largest central box with a ratio from 3:4 to 4:3.
    """
    low, high = 3 / 4, 4 / 3
    for a, b in zip(draw[:10], draw[10:20]):
        target = width * height * (0.08 + (1.0 - 0.08) * a)
        aspect = low * (high / low) ** b
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw[20] * (width - w + 1), draw[21] * (height - h + 1)
            return int(left), int(top), w, h
    w, h = min(width, round(height * high)), min(height, round(width / low))
    return (width - w) // 2, (height - h) // 2, w, h


class ImageTree(Dataset):
    """Images in root/<split>/<class>/<file>, ImageNet's layout.

    tree[position, index] returns an image (3, size, size) uint8 and two ints, label and position.
    `index` chooses the file. `position`, the sample's number in the whole run, chooses the random
    crop. train=True: a random resized crop. train=False: the short side is resized to
    size / crop_pct, then the centre is cropped; here you can leave the position out, tree[index].
    Both crops are bicubic and antialiased; the authors of ImageNet-C used resample="bilinear".
    Images are turned upright by their EXIF data, unlike in torchvision's ImageFolder and timm.

    classes: class names in label order, from the training split (default: this split's folders,
    sorted). If they are given, every folder must be one of the classes, and every class must have a
    folder unless subset=True.
    """

    def __init__(self, root, split, classes=None, size=224, train=False, seed=0,
                 crop_pct=0.875, subset=False, resample="bicubic"):
        self.folder = os.path.join(str(root), split)
        self.size, self.train, self.seed = size, train, seed
        self.resize, self.resample = math.floor(size / crop_pct), resample
        files = scan_folders(self.folder)
        if not files:
            raise InputError(f"--data_dir {root}: there are no images in {self.folder}/<class>/")
        self.classes = list(files) if classes is None else list(classes)
        unknown = sorted(files.keys() - set(self.classes))
        missing = [] if subset else sorted(set(self.classes) - files.keys())
        for problem, names in (("contains class folders that are not in the training", unknown),
                               ("has no images of classes in the training", missing)):
            if names:
                raise InputError(f"--data_dir {self.folder} {problem}: {', '.join(names[:5])}")

        # Use arrays. Forked workers would copy a list of a million str, because they change the
        # reference counts.
        names = [(k, path) for k, name in enumerate(self.classes) for path in files.get(name, ())]
        self.labels = torch.tensor([k for k, _ in names])
        start = len(os.path.join(self.folder, ""))
        self.names = np.array([os.fsencode(path[start:]) for _, path in names])

    def __len__(self):
        return len(self.names)

    def path(self, index):
        return os.path.join(self.folder, os.fsdecode(self.names[index]))

    def load(self, index, draw):
        """Decode and crop one file: (3, size, size) uint8."""
        # This takes 1.0 ms per ImageNet file of 500 x 375 on one core; Pillow takes 2.0 ms. The
        # evaluation crop differs from Pillow's by at most 1 grey level. A training crop that is
        # enlarged differs by more than 1 grey level in 1 of 20,000 pixels.
        from torchvision.transforms.v2 import functional as F
        resample, image = F.InterpolationMode(self.resample), read_image(self.path(index))
        if self.train:
            left, top, width, height = random_crop_box(image.shape[2], image.shape[1], draw)
            return F.resized_crop(image, top, left, height, width, [self.size, self.size], resample,
                                  antialias=True)
        image = F.resize(image, [self.resize], resample, antialias=True)
        return F.center_crop(image, [self.size, self.size])

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """Load a whole batch, and draw its random numbers in one call. DataLoader calls this."""
        keys = [(key, key) if isinstance(key, int) else key for key in keys]
        positions = torch.tensor([position for position, _ in keys])
        draws = uniform(positions, 22, self.seed, RANDOM_CROP).tolist()
        return [(self.load(index, draw), int(self.labels[index]), position)
                for (position, index), draw in zip(keys, draws)]
