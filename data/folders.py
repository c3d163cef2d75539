"""Your own folders: list their files, divide them by name, choose flags that fit them."""

import os
import zlib
from contextlib import suppress
from functools import cache
from statistics import median

from common import InputError, print0
from data.decode import IMAGE_EXTENSIONS, decoding, open_image, printable, read_bytes


def same_folder(one, other):
    """Return True if two paths lead to the same folder. A path can be None."""
    return bool(one and other) and os.path.realpath(one) == os.path.realpath(other)


@cache
def print_once(line):
    """Print a line on rank 0, but every line only once per process."""
    print0(line)


# --- listing --------------------------------------------------------------------------------------

def is_folder(entry):
    """Return True if an entry of os.scandir is a folder; False for a link that leads to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def list_files(folder, endings):
    """List a folder: sorted names of the files with one of the endings, and sorted other names.

    Hidden files and folders are left out. A missing folder gives two empty lists.
    """
    entries = os.scandir(folder) if os.path.isdir(folder) else []
    fits = {entry.name: entry.name.lower().endswith(endings) and not is_folder(entry)
            for entry in entries if not entry.name.startswith(".")}
    return tuple(sorted(name for name in fits if fits[name] is wanted) for wanted in (True, False))


def print_left_out(folder, names, why):
    """Print a line about names in a folder that are left out, if there are any."""
    if names:
        print_once(printable(f"{folder}: left out, because {why}: {', '.join(names[:5])} "
                             f"({len(names)} in all)"))


def scan_folders(root):
    """List root/<class>/<image>: {class name: paths of its images, sorted}; {} without a root.

    Left out: hidden files and folders, folders without an image directly inside, and files that are
    not images. Printed lines name some of the last two. Class names are `printable`.
    """
    entries = os.scandir(root) if os.path.isdir(root) else []
    folders = [entry.name for entry in entries if entry.name[0] != "." and is_folder(entry)]
    images, empty, others = {}, [], []
    for name in sorted(folders):
        found, rest = list_files(os.path.join(root, name), IMAGE_EXTENSIONS)
        if found:
            images[printable(name)] = [os.path.join(root, name, file) for file in found]
            others += [os.path.join(name, file) for file in rest]
        else:
            empty.append(f"{name} (it contains {', '.join(rest[:2]) or 'nothing'}"
                         f"{', ...' if len(rest) > 2 else ''})")
    kinds = f"{', '.join(IMAGE_EXTENSIONS[:-1])} or {IMAGE_EXTENSIONS[-1]}"
    print_left_out(root, empty, f"no {kinds} file is directly inside")
    print_left_out(root, others, f"they are no {kinds} files")
    return images


# --- dividing -------------------------------------------------------------------------------------

def name_hash(path, root=""):
    """Hash a file's name below `root`, for splits that depend on names only."""
    return zlib.crc32(os.fsencode(os.path.relpath(path, root) if root else path))


def hold_out_by_name(paths, root="", test=True, val=True):
    """Choose held-out files: sets (val, test), about a tenth of the paths each.

    paths: files, of one class if there are classes. test, val: False for an empty set. A hash of
    the names below `root` orders the files. test is the beginning of this order and val is its end,
    so adding or removing a file moves at most one other file into or out of each set.
    A set has at least one file, but one file always remains to train on. So two files give one
    held-out file (test, unless test=False), and one file gives none.
    """
    order = sorted(paths, key=lambda path: name_hash(path, root))
    tenth, spare = max(round(len(order) / 10), 1), max(len(order) - 1, 0)
    n_test = min(tenth, spare) if test else 0
    n_val = min(tenth, spare - n_test) if val else 0
    return {*order[len(order) - n_val:]}, {*order[:n_test]}


def divide(files, groups, root, keep_best, given=None):
    """Divide {name: file} into lists of files: {"train", "val", "test", "all"}.

    groups: lists of names, one per class; hold_out_by_name chooses from each. Without keep_best,
    "val" is empty. "train" contains the other files. "all" is for networks that were not trained on
    this folder: all files. given: the files in the folder's own val/ or validation/, if there is
    one; then "test" and "all" are these files, and none of `files` is held out for "test".
    """
    held = [hold_out_by_name(group, root, given is None, keep_best) for group in groups]
    val, test = (set().union(*(pair[i] for pair in held)) for i in (0, 1))
    parts = {"train": [], "val": [], "test": []}
    for name, file in files.items():
        parts["val" if name in val else "test" if name in test else "train"].append(file)
    if given is not None:
        return {**parts, "test": given, "all": given}
    return {**parts, "all": list(files.values())}


# --- flags that fit a folder ----------------------------------------------------------------------

def median_side(paths):
    """Return the median short side in pixels of up to 200 image files; 0 if none can be read."""
    sides = []
    for path in paths[:200]:
        with suppress(InputError), decoding(path):          # the loader prints the file's name
            sides.append(min(open_image(read_bytes(path).tobytes()).size))
    return median(sides) if sides else 0


def fill_flags(args, recipe, files, noun):
    """Return the recipe's values for the flags that are None; print them and the parts' sizes."""
    chosen = {name: value for name, value in recipe.items() if getattr(args, name) is None}
    print0(f"{printable(args.data_dir)}: {noun}: {len(files['train'])} to train on, "
           f"{len(files['val'])} to choose best.pt (validation), {len(files['test'])} to report, "
           f"by eval_robust.py (test)")
    if chosen:
        print0(f"chosen flags: {' '.join(f'{k}={v}' for k, v in chosen.items())}")
    return chosen
