"""Data in, tensors out. `data.load_shapes`, `data.ImageTree`, ... are those of shapes.py and
images.py; the other files are imported by name: `from data.splits import load_data`."""

from data.images import (CIFAR10_CLASSES, IMAGE_EXTENSIONS, ImageTree, Split, decode, epoch_order,
                         find_photos, hold_out, imagenet_batches, load_cifar10, load_photos,
                         random_crop_box, save_grid, scan_folders)
from data.shapes import SHAPES, colour, load_shapes, render_scenes
