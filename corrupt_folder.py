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
    flag("source", help="folder <class>/*, such as imagenet/val")
    flag("out", help="new folder for the copies")
    flag("--types", nargs="+", choices=CORRUPTIONS, default=NAMES, metavar="TYPE",
         help=f"some of {', '.join(CORRUPTIONS)}")
    flag("--severities", nargs="+", type=int, choices=(1, 2, 3, 4, 5), default=(1, 2, 3, 4, 5),
         help="severities to write")
    flag("--size", type=common.number(int, 16), default=224, help="pixels per side of a copy")
    flag("--crop_pct", type=common.number(float, 0.01, 1), default=0.875, help="the short side is "
         "resized to size / crop_pct, then the centre is kept; 1 for a folder that train_cls.py "
         "--data_dir reads")
    flag("--seed", type=common.NATURAL, default=0, help="chooses all random numbers")
    flag("--frost_dir", help="folder with ImageNet-C's frost photographs; None: synthetic frost")
    args = p.parse_args()
    root, folder = os.path.split(os.path.abspath(args.source))
    tree = ImageTree(root, folder, size=args.size, crop_pct=args.crop_pct, resample="bilinear")
    if os.path.exists(args.out):
        raise common.InputError(f"{args.out} exists, expected the name of a new folder")
    if "frost" in args.types:
        try:
            load_frost(args.frost_dir)                    # reports missing files before the start
        except ValueError as error:
            raise common.InputError(str(error)) from None

    from torchvision.io import encode_jpeg, write_file
    for i in tqdm(range(len(tree)), unit="image", disable=None):
        image, source = tree[i][0][None], Path(tree.path(i))
        for name in args.types:
            for severity in args.severities:
                damaged = corrupt(image, name, severity, seed=args.seed, index=[i],
                                  frost_dir=args.frost_dir)
                path = Path(args.out, name, str(severity), source.parent.name, source.name)
                if path.suffix.lower() not in (".jpg", ".jpeg"):
                    path = path.with_name(f"{path.name}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(str(path), encode_jpeg(damaged[0], 85))
    print(f"{len(tree)} images, {', '.join(args.types)}, in {args.out}: "
          f"{common.command('eval_robust.py', '--corrupted_dir', args.out)}")


if __name__ == "__main__":
    common.run(main)
