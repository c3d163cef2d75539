"""Look inside a network: its answer for an image, its attention maps, and the size of S.

    python look.py                                                    # a rendered scene with noise
    python look.py --image lecture/pictures/scene.png                 # the middle of any picture
    python look.py --ckpt out/folder_symmetric --image photos         # a folder: look.csv
    python look.py --ckpt weights/seg_shapes_rpc.pt                   # a Segmenter

For a ViT and one image, look.py prints the likeliest classes and draws look.png. In a rendered
scene, look.py first replaces six patches by noise, because S, the sparse part of the keys, should
mark corrupted patches. The upper row shows where the class token attends in each layer, as a mean
over heads; the percentage is the share that goes to the patches, not to the class token itself.
Each layer with RPC-Attention has another row: the size of S per patch after each step.

For a ViT and a folder of images, look.py writes a table: file, likeliest class, probability, and
whether your training used the image. For a Segmenter and one image, look.py draws the classes.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageDraw, ImageFont

from attention import layer_inputs
from common import InputError
from data.datasets import trained_crop
from data.images import central_square, image_hashes, read_image, walk_images
from data.shapes import FIRST_SCENE, SHAPES, render_scenes
from robust.patches import corrupt_patches
from segmenter import predict_classes, segmenter_from_checkpoint
from vit import classifier_from_checkpoint

SIDE = 160                                  # pixels: side of a map
MARGIN = 8                                  # pixels between maps
LINE = 22                                   # pixels: height of a line of text
SCENE = 35                                  # the test scene without --image and --scene
FONT = ImageFont.load_default(size=16)
FRAME = "#35d0ff"                           # around corrupted patches, as in the lecture
# The colours of the maps from 0 to 1: matplotlib's magma at nine points.
MAGMA = torch.tensor([
    [0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122],
    [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]]).float()


def get_args():
    """Parse the flags."""
    p = common.new_parser(__doc__)
    p.add_argument("--ckpt", default="weights/shapes_rpc.pt",
                   help="look inside this checkpoint of train_cls.py or train_seg.py, "
                   "a file or a folder (default: %(default)s)")
    p.add_argument("--image",
                   help="look at this image or folder (default: a rendered scene)")
    p.add_argument("--scene", type=common.nonnegative_int,
                   help=f"render this test scene (default: {SCENE})")
    p.add_argument("--noise", type=common.nonnegative_int,
                   help="replace this many patches by noise (default: 6 in a rendered "
                   "scene, 0 in your image)")
    p.add_argument("--out",
                   help="write to this file (default: look.png, for a folder look.csv)")
    return p.parse_args()


def to_picture(image):
    """Convert an image (3, h, w), float in [0, 1], to a Pillow image."""
    pixels = (255 * image).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def draw_map(x, largest):
    """Draw one number per patch, (P,), as a Pillow image. Black is 0, light yellow is `largest`."""
    side = round(len(x) ** 0.5)
    if largest == 0:                                    # all numbers are 0
        largest = 1
    share = (x / largest).clamp(0, 1)
    place = share * (len(MAGMA) - 1)                    # between the colours `low` and low + 1
    low = place.long().clamp(max=len(MAGMA) - 2)
    colours = torch.lerp(MAGMA[low], MAGMA[low + 1], (place - low)[:, None])
    pixels = colours.round().byte()
    return Image.fromarray(pixels.view(side, side, 3).numpy())


def fitting(text, width):
    """Return text that is at most `width` pixels wide: the middle of a longer text becomes ".."."""
    shown = text
    kept = len(text)                                    # letters
    while FONT.getlength(shown) > width:
        kept -= 1
        shown = f"{text[:kept // 2]}..{text[-kept // 2:]}"
    return shown


def class_colours(n):
    """Return n colours that differ, (n, 3), 0 to 255.

    Three neighbours have hues 120 degrees apart and three levels of light. Then the hues turn by
    the golden angle, 137.508 degrees, which spreads any number of hues evenly.
    """
    colours = []
    for k in range(n):
        turn, level = divmod(k, 3)
        hue = (137.508 * turn + 120 * level) % 360
        colours.append(ImageColor.getrgb(f"hsl({hue:.3f}, 70%, {35 + 15 * level}%)"))
    return torch.tensor(colours)


def draw_sheet(rows, notes, hit):
    """Draw rows of (title, picture) pairs, `notes` below, and blue frames around patches `hit`."""
    column_width = SIDE + MARGIN
    row_height = LINE + SIDE + MARGIN
    width = column_width * max(map(len, rows))
    height = row_height * len(rows) + LINE * len(notes)
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    per_side = round(len(hit) ** 0.5)                               # patches
    frame = SIDE // per_side - 1                                    # side of a frame in pixels
    for y, row in enumerate(rows):
        top = y * row_height + LINE
        for x, (title, picture) in enumerate(row):
            left = x * column_width
            title = fitting(title, SIDE)
            draw.text((left + 2, top - LINE), title, fill="black", font=FONT)
            large = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            page.paste(large, (left, top))
            for i in hit.nonzero()[:, 0].tolist():
                patch_row, patch_column = divmod(i, per_side)
                x0 = left + patch_column * SIDE // per_side
                y0 = top + patch_row * SIDE // per_side
                draw.rectangle([x0, y0, x0 + frame, y0 + frame], outline=FRAME, width=2)
    for i, note in enumerate(notes):
        draw.text((2, len(rows) * row_height + i * LINE), note, fill="black", font=FONT)
    return page


def patch_attention(attn, x, steps, has_class_token):
    """Return the attention that each patch gets, mean over heads: (P,).

    It is the attention of the class token, token 0. The blocks of a FAN have no class token, so
    there it is the mean attention of all patches. x: the input of attn, (1, N, C).
    steps: attn.trace(x). Without PAP, the attention is the softmax of queries and keys, even if
    attn computes something else.
    """
    q, k, _ = attn.project(x)
    if steps:
        q = steps[-1]["Q2"]
        k = steps[-1]["K2"]
    if has_class_token:
        q = q[:, :, :1]
    scores = q[0] @ k[0].mT / q.shape[-1] ** 0.5                    # (H, 1 or N, N)
    attention = scores.softmax(-1).mean((0, 1))                     # (N,)
    return attention[1:] if has_class_token else attention


def likeliest(model, images, classes, n):
    """Return the n likeliest classes of the first image as text: "star 98.2 %, arrow 1.0 %"."""
    probabilities = model(images)[0].softmax(0)
    largest, numbers = probabilities.topk(min(n, len(classes)))
    pairs = zip(largest.tolist(), numbers.tolist())
    return ", ".join(f"{classes[k]} {100 * p:.1f} %" for p, k in pairs)


class LayerMaps(NamedTuple):
    """The maps of a layer for one image."""
    attention: torch.Tensor             # (P,), the attention that each patch gets
    S: list                             # per step: (P,), the mean |S| of a patch; 1 is the mean
    filled: list                        # per step: percentage of the entries of S that are not 0


def measure_layers(model, images, has_class_token):
    """Return the LayerMaps of every layer for the first image."""
    layers = []
    for attn, x in layer_inputs(model, images):
        steps = attn.trace(x)
        layer = LayerMaps(patch_attention(attn, x, steps, has_class_token), [], [])
        for step in steps:
            S = step["S"].abs().sum((1, 3))[0]                          # (N,)
            if has_class_token:
                S = S[1:]
            layer.S.append(S / S.mean().clamp_min(1e-12))
            layer.filled.append(100 * (step["S"] != 0).double().mean())
        layers.append(layer)
    return layers


def print_sizes(layers, hit):
    """Print a table of the size of S in each step. hit: (P,) bool, the patches with noise.

    With noise, also print for each layer whether S is larger on the noise after the last step.
    """
    header = ["layer", "step", "S is not 0"]
    if hit.any():
        header += ["S on noise", "S elsewhere"]
    rows = []
    verdicts = []
    for i, layer in enumerate(layers):
        for n, (S, filled) in enumerate(zip(layer.S, layer.filled), 1):
            row = [i, n, f"{filled:.0f} %"]
            if hit.any():
                row += [f"{S[hit].mean().item():.2f}", f"{S[~hit].mean().item():.2f}"]
            rows.append(row)
        if layer.S and hit.any():
            last_S = layer.S[-1]
            on = last_S[hit].mean().item()
            off = last_S[~hit].mean().item()
            if on > off:
                word = "larger"
            elif on < off:
                word = "smaller"
            else:
                word = "not larger"
            verdicts.append(f"S is {word} on the noise than elsewhere: {on:.2f} "
                            f"against {off:.2f} in layer {i}, step {len(layer.S)}; 1 is the mean "
                            "over all patches.")
    if rows:
        print(f"\n{common.table(rows, header)}")
    for verdict in verdicts:
        print(verdict)


def draw_layers(title, image, layers, hit, has_class_token):
    """Draw the image, the attention of each layer, and a row of maps of S per layer with steps."""
    first_row = [(title, to_picture(image))]
    rows = [first_row]
    for i, layer in enumerate(layers):
        attention = layer.attention
        first_row.append((f"layer {i}: {100 * attention.sum():.0f} %",
                          draw_map(attention, attention.max())))
        if layer.S:
            rows.append([(f"layer {i}: |S|, step {n}", draw_map(S, 2))
                         for n, S in enumerate(layer.S, 1)])

    source = "the class token" if has_class_token else "all patches, mean"
    notes = [f"Top: attention of {source}, each map on its own scale. "
             "%: on the patches."]
    if len(rows) > 1:
        notes.append("|S| per patch: black is 0, light yellow is twice the mean.")
        if hit.any():
            notes.append("Blue frames: patches replaced by noise. S should be large there.")
    return draw_sheet(rows, notes, hit)


def look_at_classifier(model, classes, image, noise, crop):
    """Print the likeliest classes and the size of S; return a picture of attention and S."""
    c = model.config
    num_patches = (c.image_size // c.patch_size) ** 2
    has_class_token = c.num_tokens > num_patches                        # a FAN has none
    if noise >= num_patches:
        raise InputError(f"--noise {noise}: the image has {num_patches} patches; expected "
                         f"fewer patches with noise, 0 to {num_patches - 1}")
    clean = central_square(image, c.image_size, crop)[None] / 255       # (1, 3, S, S)
    images, hit = corrupt_patches(clean, "noise", c.patch_size, n=noise)
    hit = hit[0]                                                        # (P,)
    layers = measure_layers(model, images, has_class_token)

    if noise:
        print(f"{noise} of {num_patches} patches are noise")
        print(f"answer without noise  {likeliest(model, clean, classes, 1)}")
    print(f"answer                {likeliest(model, images, classes, 3)}")
    names = ", ".join(classes[:12])
    if len(classes) > 12:
        names += ", ..."
    print(f"The network can answer one of {len(classes)} classes: {names}.")
    print_sizes(layers, hit)

    title = likeliest(model, images, classes, 1)
    return draw_layers(title, images[0], layers, hit, has_class_token)


def look_at_segmenter(model, classes, image):
    """Print the share of each class in the image (3, h, w) uint8; return a picture of them."""
    size = model.config.image_size
    colours = class_colours(len(classes))
    found = predict_classes(model, image, size=size, window=size, stride=size)      # (h, w)
    area = torch.bincount(found.flatten(), minlength=len(classes)) / found.numel()
    largest_first = area.argsort(descending=True).tolist()
    listed = [k for k in largest_first if area[k] > 0.002]

    zoom = max(1, 384 // max(found.shape))
    shown = image / 255
    grey = shown.mean(0)
    over = 0.4 * grey + 0.6 * colours[found].permute(2, 0, 1) / 255
    large = F.interpolate(torch.stack([shown, over]), scale_factor=zoom)
    h, w = large.shape[2:]
    page = Image.new("RGB", (2 * w + MARGIN, h + MARGIN + LINE * len(listed)), "white")
    for i, x in enumerate(large):
        page.paste(to_picture(x), (i * (w + MARGIN), 0))
    draw = ImageDraw.Draw(page)
    for i, k in enumerate(listed):
        top = h + MARGIN + i * LINE
        draw.rectangle((2, top + 3, 18, top + 19), fill=tuple(colours[k].tolist()))
        text = f"{classes[k]}, {100 * area[k]:.1f} %"
        draw.text((26, top), text, fill="black", font=FONT)
        print(f"{100 * area[k]:6.1f} %  {classes[k]}")
    return page


def classify_folder(model, classes, folder, crop, seen, out):
    """Classify each image in a folder and its subfolders; print the table and write it to `out`.

    seen: `image_hashes` of the images that the training used; with them, a row ends with "yes" or
    "no".
    """
    header = ["file", "class", "probability"]
    if seen:
        header.append("used in training")
    rows = []
    for path in walk_images(folder):
        try:
            photo = read_image(path)
        except InputError as error:
            print(f"left out: {error}")
            continue
        image = central_square(photo, model.config.image_size, crop)
        logits = model(image[None] / 255)[0]
        probability, k = logits.softmax(0).max(0)
        row = [str(Path(path).relative_to(folder)), classes[k], f"{probability:.4f}"]
        if seen:
            used = image_hashes(path, photo) & seen
            row.append("yes" if used else "no")
        rows.append(row)
    print(common.table(rows, header))
    with open(out, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header] + rows)
    print(f"written: {out}")


def check_flags(args, task, is_folder):
    """Raise InputError for a checkpoint without pictures, and for flags that would do nothing.

    task: of the checkpoint. is_folder: whether --image is a folder.
    """
    if task not in ("classification", "segmentation"):
        raise InputError(f"--ckpt {args.ckpt}: expected a checkpoint of train_cls.py or "
                         f"train_seg.py")
    if task == "segmentation" and is_folder:
        raise InputError(f"--image {args.image}: expected one image, because the checkpoint is "
                         f"a Segmenter; only classifiers look at folders")
    if task == "segmentation" and args.noise is not None:
        common.reject_flags({"noise"}, "with a Segmenter")
    if is_folder and args.noise is not None:
        common.reject_flags({"noise"}, "with a folder")
    if args.image and args.scene is not None:
        common.reject_flags({"scene"}, "with --image")


def main():
    args = get_args()
    checkpoint = common.load(args.ckpt)
    task = checkpoint.get("task")
    is_folder = args.image is not None and Path(args.image).is_dir()
    check_flags(args, task, is_folder)
    seen = set(checkpoint.get("seen", []))              # earlier versions have no "seen"
    classes = checkpoint["classes"]
    crop = trained_crop(checkpoint["args"])             # as in the evaluation
    if crop is None:
        crop = 1.0
    if task == "segmentation":
        model = segmenter_from_checkpoint(checkpoint).requires_grad_(False)
    else:
        model = classifier_from_checkpoint(checkpoint).requires_grad_(False)

    if is_folder:
        classify_folder(model, classes, args.image, crop, seen, args.out or "look.csv")
        return
    if args.image:
        image = read_image(args.image)
        if image_hashes(args.image, image) & seen:
            print("the training used this image, so the answer does not count as a "
                  "test")
    else:
        scene = SCENE if args.scene is None else args.scene
        number = torch.tensor([FIRST_SCENE["test"] + scene])
        images, labels, _ = render_scenes(number, model.config.image_size)
        image = images[0]
        print(f"scene {scene} shows: {SHAPES[labels[0]]}")
    noise = args.noise
    if noise is None:
        noise = 0 if args.image else 6
    if task == "segmentation":
        page = look_at_segmenter(model, classes, image)
    else:
        page = look_at_classifier(model, classes, image, noise, crop)
    out = args.out or "look.png"
    page.save(out)
    print(f"written: {out}")


if __name__ == "__main__":
    common.run(main)
