"""Write corrupted copies of a folder of images, for eval_robust.py --corrupted_dir.

    python corrupt_folder.py imagenet/val imagenet-c --types fog frost      # ImageNet's crop
    python corrupt_folder.py photos/val photos-c --size 64 --crop_pct 1     # your own photos

The layout is ImageNet-C's: OUT/<type>/<severity>/<class>/*.jpg, JPEG of quality 85.
"""

import argparse
import os
from pathlib import Path

import common
from tqdm import tqdm

from data.imagenet import ImageTree
from robust.corruptions import CORRUPTIONS, NAMES, corrupt
from robust.frost import load_frost


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help,
                                allow_abbrev=False)
    flag = p.add_argument
    flag("source", help="read the images of this folder, <class>/*, such as imagenet/val")
    flag("out", help="write the copies to this new folder")
    flag("--types", nargs="+", choices=CORRUPTIONS, default=NAMES, metavar="TYPE",
         help=f"write these types of corruption, some of {', '.join(CORRUPTIONS)}")
    flag("--severities", nargs="+", type=int, choices=(1, 2, 3, 4, 5), default=(1, 2, 3, 4, 5),
         help="write these severities")
    flag("--size", type=common.number(int, 16), default=224, help="set the pixels per side of a "
         "copy")
    flag("--crop_pct", type=common.number(float, 0.01, 1), default=0.875, help="resize the short "
         "side to size / crop_pct, then keep the centre; use 1 for a folder that train_cls.py "
         "--data_dir reads")
    flag("--seed", type=common.NATURAL, default=0, help="use this seed for all random numbers")
    flag("--frost_dir", help="make frost from ImageNet-C's photographs in this folder (default: "
         "from synthetic frost)")
    args = p.parse_args()
    root, folder = os.path.split(os.path.abspath(args.source))
    tree = ImageTree(root, folder, size=args.size, crop_pct=args.crop_pct, resample="bilinear")
    if os.path.exists(args.out):
        raise common.InputError(f"{args.out} exists, expected the name of a new folder")
    if "frost" in args.types:
        try:
            load_frost(args.frost_dir)                    # report missing files before the start
        except ValueError as error:
            raise common.InputError(str(error)) from None

    from torchvision.io import encode_jpeg, write_file
    for i in tqdm(range(len(tree)), unit="image", disable=None):
        image, *_ = tree[i]                               # (3, size, size) uint8
        original = Path(tree.path(i))
        for name in args.types:
            for severity in args.severities:
                corrupted = corrupt(image[None], name, severity, seed=args.seed, index=[i],
                                    frost_dir=args.frost_dir)
                path = Path(args.out, name, str(severity), original.parent.name, original.name)
                if path.suffix.lower() not in (".jpg", ".jpeg"):
                    path = path.with_name(f"{path.name}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(str(path), encode_jpeg(corrupted[0], quality=85))
    print(f"{len(tree)} images, {', '.join(args.types)}, in {args.out}: "
          f"{common.command('eval_robust.py', '--corrupted_dir', args.out)}")


if __name__ == "__main__":
    common.run(main)
