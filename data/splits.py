"""What a classifier is trained on and evaluated on, by the flags of a run; see train_cls.py."""

from common import broadcast
from data.images import ImageTree, Split, find_photos, hold_out, load_cifar10, load_photos
from data.shapes import load_shapes


def load_data(args, device, rank=0):
    """(training set, evaluation set), Splits on the device or ImageTrees; prints what was found."""
    if args.data in ("cifar10", "imagenet") and not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    if args.data == "imagenet" and args.holdout:
        raise ValueError("--holdout does not go with --data imagenet: make a val folder instead")
    bad = ""
    if args.data == "imagenet":
        how = dict(size=args.image_size, seed=args.seed, skip_bad_images=args.skip_bad_images)
        train = ImageTree(args.data_dir, "train", train=True, **how)
        test = ImageTree(args.data_dir, "val", classes=train.classes, **how)
    elif args.data == "folder":
        photos = find_photos(args.data_dir)
        train, test, count = load_photos(photos, args.image_size, args.holdout)
        bad = f", {count} unreadable files"
    elif args.data == "cifar10":
        if args.download and rank == 0:
            load_cifar10(args.data_dir, "train", download=True)
        broadcast([None])                                           # the others wait for it
        train, test = (load_cifar10(args.data_dir, split) for split in ("train", "test"))
        if args.image_size != 32:
            raise ValueError(f"--image_size {args.image_size}: CIFAR-10 images have 32 pixels")
    else:
        sizes = dict(train=args.num_images, test=max(args.num_images // 5, 1))
        train, test = (load_shapes(split, n, args.image_size, device=device)
                       for split, n in sizes.items())

    if args.holdout and args.data != "folder":
        train, test = hold_out(train, args.holdout)
    if args.data != "imagenet":
        train, test = (Split(split.images.to(device), split.labels.to(device), split.classes)
                       for split in (train, test))
    if rank == 0:
        missing = set(range(len(train.classes))) - set(train.labels.tolist())
        for label in sorted(missing) if args.data == "folder" else ():
            print(f"warning: no image of the class {train.classes[label]} is left to train on, all "
                  f"are held out (--holdout)")
        print(f"{args.data}: {len(train.labels)} training, {len(test.labels)} {split_name(args)} "
              f"images, {len(train.classes)} classes{bad}", flush=True)
    return train, test


def split_name(args):
    """Of what a run is evaluated on."""
    if args.holdout:
        return "held-out"
    return "val" if args.data in ("folder", "imagenet") else "test"


def load_test(args, trained, size, classes):
    """What an evaluation looks at: a Split on args.device or an ImageTree, images of `size` pixels.

    args: its data and data_dir. trained: the flags of the run, as a dict. classes: ImageNet's.
    """
    if args.data == "shapes":
        few = max(trained.get("num_images", 16000) // 5, 1)
        return load_shapes("test", few, size, device=args.device)
    if not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    if args.data == "imagenet":
        return ImageTree(args.data_dir, "val", classes=classes, size=size)
    if args.data == "cifar10":
        source = load_cifar10(args.data_dir, "test")
    else:
        photos, holdout = find_photos(args.data_dir), trained.get("holdout", 0)
        if holdout >= len(photos.train):
            raise ValueError(f"--data_dir {args.data_dir} has {len(photos.train)} images, but "
                             f"{holdout} are to be those that training held out")
        source = load_photos(photos, size, holdout)[1]
    return Split(source.images.to(args.device), source.labels.to(args.device), source.classes)
