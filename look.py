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

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageDraw, ImageFont

from attention import layer_inputs
from common import InputError
from data.datasets import DATASETS
from data.images import central_square, image_hashes, read_image, walk_images
from data.shapes import SHAPES, load_shapes
from robust.patches import corrupt_patches
from segmenter import predict_classes, segmenter_from_checkpoint
from vit import classifier_from_checkpoint

SIDE, MARGIN, LINE = 160, 8, 22             # pixels: side of a map, space between, line of text
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
    share = (x / largest).nan_to_num(0).clamp(0, 1)     # 0 / 0, an empty map, becomes 0
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
    column = SIDE + MARGIN                                          # width in pixels
    row_height = LINE + SIDE + MARGIN
    width = column * max(map(len, rows))
    height = row_height * len(rows) + LINE * len(notes)
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    patches = round(len(hit) ** 0.5)                                # per side
    side = SIDE // patches - 1                                      # of a frame
    for y, row in enumerate(rows):
        top = y * row_height + LINE
        for x, (title, picture) in enumerate(row):
            left = x * column
            title = fitting(title, SIDE)
            draw.text((left + 2, top - LINE), title, fill="black", font=FONT)
            large = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            page.paste(large, (left, top))
            for i in hit.nonzero()[:, 0].tolist():
                line, place = divmod(i, patches)
                x0 = left + place * SIDE // patches
                y0 = top + line * SIDE // patches
                draw.rectangle([x0, y0, x0 + side, y0 + side], outline=FRAME, width=2)
    for i, note in enumerate(notes):
        draw.text((2, len(rows) * row_height + i * LINE), note, fill="black", font=FONT)
    return page


def patch_attention(attn, x, steps, num_patches):
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
    if x.shape[1] > num_patches:
        q = q[:, :, :1]                                             # the class token
    scores = q[0] @ k[0].mT / q.shape[-1] ** 0.5                    # (H, 1 or N, N)
    return scores.softmax(-1).mean((0, 1))[-num_patches:]


def likeliest(model, images, classes, n):
    """Return the n likeliest classes of the first image as text: "star 98.2 %, arrow 1.0 %"."""
    probabilities = model(images)[0].softmax(0)
    largest, numbers = probabilities.topk(min(n, len(classes)))
    pairs = zip(largest.tolist(), numbers.tolist())
    return ", ".join(f"{classes[k]} {100 * p:.1f} %" for p, k in pairs)


def look_at_classifier(model, classes, image, noise, crop):
    """Print the likeliest classes and the size of S; return a picture of attention and S."""
    size = model.config.image_size
    patch = model.config.patch_size
    clean = central_square(image, size, crop)[None] / 255                      # (1, 3, S, S)
    images, hit = corrupt_patches(clean, "noise", patch, n=noise)
    hit = hit[0]                                                        # (P,)
    if noise:
        print(f"{noise} of {len(hit)} patches are noise")
        print(f"answer without noise  {likeliest(model, clean, classes, 1)}")
    print(f"answer                {likeliest(model, images, classes, 3)}")
    names = ", ".join(classes[:12])
    if len(classes) > 12:
        names += ", ..."
    print(f"The network can answer one of {len(classes)} classes: {names}.")

    rows = [[(likeliest(model, images, classes, 1), to_picture(images[0]))]]
    table = []
    verdicts = []
    for i, (attn, x) in enumerate(layer_inputs(model, images)):
        steps = attn.trace(x)
        attention = patch_attention(attn, x, steps, len(hit))
        rows[0].append((f"layer {i}: {100 * attention.sum():.0f} %",
                        draw_map(attention, attention.max())))
        if steps:
            rows.append([])
        for n, step in enumerate(steps, 1):
            S = step["S"].abs().sum((1, 3))[0, -len(hit):]              # per patch: (P,)
            S = S / S.mean().clamp_min(1e-12)
            rows[-1].append((f"layer {i}: |S|, step {n}", draw_map(S, 2)))
            filled = 100 * (step["S"] != 0).double().mean()
            on = S[hit].mean().item()
            off = S[~hit].mean().item()
            line = [i, n, f"{filled:.0f} %"]
            if noise:
                line += [f"{on:.2f}", f"{off:.2f}"]
            table.append(line)
        if steps and noise and not hit.all():                           # after the last step
            if on > off:
                word = "larger"
            elif on < off:
                word = "smaller"
            else:
                word = "not larger"
            verdicts.append(f"S is {word} on the noise than elsewhere: {on:.2f} "
                            f"against {off:.2f} in layer {i}, step {n}; 1 is the mean "
                            "over all patches.")

    source = "all patches, mean"                                        # in a FAN
    if model.config.num_tokens > len(hit):
        source = "the class token"
    notes = [f"Top: attention of {source}, each map on its own scale. "
             "%: on the patches."]
    if table:
        header = ["layer", "PAP step", "S is not 0"]
        if noise:
            header += ["S on noise", "S elsewhere"]
        print(f"\n{common.table(table, header)}")
        notes.append("|S| per patch: black is 0, light yellow is twice the mean.")
    if verdicts:
        print("\n".join(verdicts))
        notes.append("Blue frames: patches replaced by noise. S should be large there.")
    return draw_sheet(rows, notes, hit)


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


def main():
    args = get_args()
    checkpoint = common.load(args.ckpt)
    task = checkpoint.get("task")
    folder = args.image is not None and Path(args.image).is_dir()
    if task not in ("classification", "segmentation"):
        raise InputError(f"--ckpt {args.ckpt}: expected a checkpoint of train_cls.py or "
                         f"train_seg.py")
    if task == "segmentation" and folder:
        raise InputError(f"--image {args.image}: expected one image, because the checkpoint is "
                         f"a Segmenter; only classifiers look at folders")
    if task == "segmentation" and args.noise is not None:
        common.reject_flags({"noise"}, "with a Segmenter")
    if folder and args.noise is not None:
        common.reject_flags({"noise"}, "with a folder")
    if args.image and args.scene is not None:
        common.reject_flags({"scene"}, "with --image")
    seen = set(checkpoint["seen"])
    classes = checkpoint["classes"]
    trained = checkpoint["args"].get("data")
    crop = 1.0
    if trained in DATASETS:
        crop = DATASETS[trained].crop                                       # as in the evaluation
    if task == "segmentation":
        model = segmenter_from_checkpoint(checkpoint).requires_grad_(False)
    else:
        model = classifier_from_checkpoint(checkpoint).requires_grad_(False)

    if folder:
        classify_folder(model, classes, args.image, crop, seen, args.out or "look.csv")
        return
    if args.image:
        image = read_image(args.image)
        if image_hashes(args.image, image) & seen:
            print("the training used this image, so the answer does not count as a "
                  "test")
    else:
        scene = SCENE if args.scene is None else args.scene
        scenes = load_shapes("test", scene + 1, model.config.image_size)
        image = scenes.images[scene]
        print(f"scene {scene} shows: {list(SHAPES)[scenes.labels[scene]]}")
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
