"""Your own photos: root/<class>/*.jpg, or root/train/<class>/* and root/val/<class>/*."""

from pathlib import Path

import torch

from common import InputError, print0
from data.batches import Split, progress
from data.decode import printable, read_image
from data.folders import divide, fill_flags, median_side, name_hash, print_once, scan_folders


def find_photos(root, keep_best=False):
    """List a folder's images: class names, and {"train", "val", "test", "all": [(path, label)]}.

    If the folder contains train/ and val/, "test" is val/. Otherwise "test" is a tenth of each
    class. With keep_best, "val" is another tenth, which chooses best.pt; see hold_out_by_name.
    "train" contains the other images. "all" is for networks that were not trained on this folder:
    val/ if it exists, otherwise all images. InputError if there are fewer than two classes, or if
    val/ is empty.
    """
    val_folder = Path(root, "val").is_dir()
    folders = [Path(root, "train"), Path(root, "val")] if val_folder else [root]
    first, *second = map(scan_folders, folders)
    classes = sorted({*first, *(name for found in second for name in found)})
    if len(classes) < 2:
        raise InputError(f"--data_dir {printable(root)} has {len(classes)} folders with images, "
                         f"expected 2 or more: {printable(root)}/<class>/*.jpg")
    if second == [{}]:
        raise InputError(f"{printable(folders[1])} contains no <class>/*.jpg, expected the images "
                         f"to evaluate on: add them, or remove this folder")

    def labelled(found):
        return [(path, label) for label, name in enumerate(classes) for path in found.get(name, [])]

    order = sorted(labelled(first), key=lambda file: name_hash(file[0], root))
    return classes, divide({file[0]: file for file in order}, first.values(), root, keep_best,
                           *map(labelled, second))


# --- flags that fit the photos --------------------------------------------------------------------

def photo_flags(args):
    """Choose values that fit a folder of photos for the flags that are None: {flag: value}.

    Prints the choices.
    """
    keep_best, root = args.keep_best, printable(args.data_dir)
    if keep_best is None:
        classes, files = find_photos(args.data_dir, True)
        small = set(range(len(classes))) - {label for _, label in files["val"]}
        keep_best = not small
        if small:
            print0(f"{root}: class {classes[min(small)]} has too few images to hold one out to "
                   f"choose best.pt (expected 3, or 2 in train/), so last.pt is reported")
    classes, files = find_photos(args.data_dir, keep_best)
    side = median_side([path for path, _ in files["train"][::7]])
    recipe = dict(photo_recipe(len(files["train"]), side), keep_best=keep_best)
    recipe["pad"] = (args.image_size or recipe["image_size"]) // 8
    return fill_flags(args, recipe, files, f"{len(classes)} classes; images")


def photo_recipe(n, side):
    """Choose flags to train on n images. side: their median short side in pixels.

    An image has 64 patches. The number of epochs is 1.8 sqrt(n), because longer runs overfit (see
    docs/data.md). A run has at most 3,000 steps, but at least 8 epochs.
    """
    size = max(s for s in (32, 64, 96) if s == 32 or s <= side)
    batch = max(b for b in (2, 4, 8, 16, 32, 64) if b == 2 or 5 * b <= n)
    epochs = max(min(round(1.8 * n ** 0.5), 3000 * batch // max(n, 1)), 8)
    return dict(model="nano" if n < 20_000 else "micro", image_size=size, patch_size=size // 8,
                epochs=epochs, batch_size=batch)


# --- images ---------------------------------------------------------------------------------------

def load_photos(root, part, size, keep_best=False):
    """Load "train", "val", "test" or "all" of a folder (see find_photos) as a Split.

    Images are resized and cropped to squares of `size` pixels, see middle_square.
    """
    classes, files = find_photos(root, keep_best)
    found, val_folder = decode_all(files[part], classes, size), Path(root, "val").is_dir()
    missing = set(range(len(classes))) - set(found.labels.tolist())
    if not len(found.labels) or part == "train" and missing:
        inner = "train" if part in ("train", "val") else "val"
        folder = Path(root, inner) if val_folder else root
        purposes = {"train": "to train on", "val": "to choose best.pt by"}
        raise InputError(f"--data_dir {printable(root)}: there is no image of class "
                         f"{classes[min(missing)]} in {printable(folder)} that can be read, "
                         f"{purposes.get(part, 'to evaluate on')}")
    if part == "all":
        print_once(f"{printable(root)}: the network was not trained on this folder, so all "
                   f"{len(found.labels)} images are evaluated" + " (val/)" * val_folder)
    return found


def middle_square(image, size):
    """Resize the short side of (3, h, w) uint8 to `size` and crop the middle: (3, size, size)."""
    from torchvision.transforms.v2 import functional as F
    image = F.resize(image, [size], F.InterpolationMode.BICUBIC, antialias=True)
    return F.center_crop(image, [size, size])


def decode_all(files, classes, size):
    """Load the files [(path, label)] as a Split; print the names of files that cannot be read."""
    images, labels = [], []
    for path, label in progress(files, "decoding", 500):
        try:
            image = read_image(path)
        except InputError as error:
            print0(f"skipping: {error}")
            continue
        images.append(middle_square(image, size))
        labels.append(label)
    images = torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
    return Split(images, torch.tensor(labels, dtype=torch.int64), list(classes))
