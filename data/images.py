"""Images for a classifier: what the flags --data and --data_dir mean.

Small sets are a `Split`, all of it in memory as uint8. ImageNet is an `ImageTree`, whose files are
decoded and cropped by DataLoader workers. Every random number is a function of (seed, sample), see
rng.py: no worker, batch or process matters.
"""

import torch.distributed as dist

from common import InputError
from data.batches import Split, hold_out
from data.shapes import load_shapes


def load_data(args, device, rank=0):
    """Load the training and evaluation set, Splits on the device or ImageTrees; describe them."""
    if args.data in ("cifar10", "imagenet") and not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    notes = ""
    if args.data == "shapes":
        train = load_shapes("train", args.num_images, args.image_size, device=device)
        test = load_shapes("test", max(args.num_images // 5, 1), args.image_size, device=device)
    elif args.data == "folder":
        from data.photos import find_photos, load_photos, warn_of_few
        photos = find_photos(args.data_dir)
        train, test, bad = load_photos(photos, args.image_size, args.holdout)
        notes = f", {bad} unreadable files{photos.notes}"
        if rank == 0:
            warn_of_few(train)
    elif args.data == "cifar10":
        from data.cifar import load_cifar10
        if args.image_size != 32:
            raise InputError(f"--image_size {args.image_size}: CIFAR-10 images have 32 pixels")
        if args.download and rank == 0:
            load_cifar10(args.data_dir, "train", download=True)
        if dist.is_initialized():
            dist.barrier()                                          # the others wait for it
        train, test = (load_cifar10(args.data_dir, split) for split in ("train", "test"))
    else:
        from data.imagenet import ImageTree
        if args.holdout:
            raise InputError("--holdout does not go with --data imagenet: make a val folder "
                             "instead")
        how = dict(size=args.image_size, seed=args.seed, skip_bad_images=args.skip_bad_images)
        train = ImageTree(args.data_dir, "train", train=True, **how)
        test = ImageTree(args.data_dir, "val", classes=train.classes, **how)

    if args.holdout and args.data != "folder":                      # a folder's is held out above
        train, test = hold_out(train, args.holdout)
    if args.data != "imagenet":
        train, test = to_device(train, device), to_device(test, device)
    if rank == 0:
        print(f"{args.data}: {len(train.labels)} training, {len(test.labels)} {split_name(args)} "
              f"images, {len(train.classes)} classes{notes}", flush=True)
    return train, test


def load_test(args, trained, size, classes):
    """Load what to evaluate on: a Split on args.device or an ImageTree, images of `size` pixels.

    args: its data and data_dir. trained: the flags of the run, as a dict. classes: ImageNet's.
    """
    if args.data == "shapes":
        few = max(trained.get("num_images", 16000) // 5, 1)
        return load_shapes("test", few, size, device=args.device)
    if not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    if args.data == "imagenet":
        from data.imagenet import ImageTree
        return ImageTree(args.data_dir, "val", classes=classes, size=size)
    if args.data == "cifar10":
        from data.cifar import load_cifar10
        return to_device(load_cifar10(args.data_dir, "test"), args.device)
    from data.photos import photos_to_evaluate
    split = photos_to_evaluate(args.data_dir, trained, size, getattr(args, "rank", 0))
    return to_device(split, args.device)


def to_device(split, device):
    return Split(split.images.to(device), split.labels.to(device), split.classes)


def split_name(args):
    """Name what a run is evaluated on."""
    if args.holdout:
        return "held-out"
    return "val" if args.data in ("folder", "imagenet") else "test"
