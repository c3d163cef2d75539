"""Look at what a network does with one image, or ask what it calls each image of a folder.

    python look.py                                                    # a rendered scene
    python look.py --image lecture/pictures/scene.png                 # the middle of any picture
    python look.py --ckpt out/folder_symmetric --image photos         # a folder: look.csv
    python look.py --ckpt weights/seg_shapes_rpc.pt                   # a Segmenter

Of a folder it writes a table: file, likeliest class, its chance. Of one image and a classifier it
prints the five likeliest classes and draws look.png. Upper row: where the class token looks in each
layer, mean over heads, each map on its own scale; the percentage is the share of its attention that
the patches get, the rest stays on the class token itself. Below, for each layer that runs PAP: the
size of S of each patch after every step; white is the largest key of that layer. Of a Segmenter it
draws the classes over the image, with a legend.
"""

import argparse
import csv
from pathlib import Path

import common  # before torch
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from data.decode import IMAGE_EXTENSIONS, read_image
from data.photos import middle_square
from data.views import palette
from data.shapes import load_shapes
from segmenter import predict, segmenter_from_checkpoint
from vit import architecture, classifier_from_checkpoint

SIDE, MARGIN, LINE = 160, 8, 22             # pixels: of a map, between maps, of a line of text
FONT = ImageFont.load_default(size=16)


def get_args():
    """Read the flags."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", default="weights/shapes_rpc.pt",
                   help="of train_cls.py or train_seg.py: a file, or a folder with last.pt")
    p.add_argument("--image", help="JPEG, PNG or WebP, or a folder; default: a rendered scene")
    p.add_argument("--scene", type=common.number(int, 0), default=35, help="which test scene")
    p.add_argument("--out", help="the file to write: look.png or, of a folder, look.csv")
    return p.parse_args()


# --- what a layer does ----------------------------------------------------------------------------

def class_attention(attn, x, steps):
    """How much the class token looks at each patch, mean over heads: (N - 1,).

    PAP looks with queries and keys of its last step; every other kind is drawn as the softmax of
    its queries and keys.
    """
    q, k, _ = attn.project(x)
    if steps:
        q, k = steps[-1]["Q2"], steps[-1]["K2"]
    scores = q[0, :, :1] @ k[0].mT / q.shape[-1] ** 0.5              # (H, 1, N)
    return scores.softmax(-1).mean(0)[0, 1:]


# --- drawing --------------------------------------------------------------------------------------

def grey_map(x, largest):
    """Numbers of the patches (P,), row by row, as a picture: black is 0, white is `largest`."""
    side = round(len(x) ** 0.5)
    pixels = (255 * x / largest).clamp(0, 255).view(side, side).byte().numpy()
    return Image.fromarray(pixels)


def picture(image):
    """An image (3, h, w), uint8 or in [0, 1], for Pillow."""
    pixels = image if image.dtype == torch.uint8 else (255 * image).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def sheet(rows, notes):
    """One picture of rows of (title, picture) pairs; below, lines of text."""
    wide, high = SIDE + MARGIN, SIDE + LINE + MARGIN
    size = max(map(len, rows)) * wide, len(rows) * high + len(notes) * LINE
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    for y, row in enumerate(rows):
        for x, (title, tile) in enumerate(row):
            draw.text((x * wide + 2, y * high), title, fill="black", font=FONT)
            resized = tile.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            page.paste(resized, (x * wide, y * high + LINE))
    for i, note in enumerate(notes):
        draw.text((2, len(rows) * high + i * LINE), note, fill="black", font=FONT)
    return page


# --- a classifier, a Segmenter --------------------------------------------------------------------

def look_at_classifier(model, classes, image):
    """Print the five likeliest classes; return the picture of attention and S."""
    images = middle_square(image, model.config.image_size)[None] / 255
    chances = model(images)[0].softmax(0)
    for chance, k in zip(*(t.tolist() for t in chances.topk(min(5, len(classes))))):
        print(f"{100 * chance:6.1f} %  {classes[k]}")
    print(f"It knows {len(classes)} classes and answers with one of them, whatever it is shown: "
          f"{', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}.")

    features = model.features(images)                   # what goes into each block, by name
    inputs = [features[name] for name in ("embed", *model.layers())]
    chance, k = chances.max(0)
    seen, below = [(f"{100 * chance:.0f} % {classes[k]}", picture(images[0]))], []
    for i, (block, x) in enumerate(zip(model.blocks, inputs), 1):
        x = block.norm1(x)
        steps = block.attn.trace(x)
        attention = class_attention(block.attn, x, steps)
        share = f"{100 * attention.sum():.0f} %"                        # the rest is on itself
        seen.append((f"layer {i}: {share}", grey_map(attention, attention.max())))
        if steps:
            size = block.attn.project(x)[1].abs().sum((1, 3)).max()     # the largest key
            maps = [grey_map(step["S"].abs().sum((1, 3))[0, 1:], size) for step in steps]
            below.append([(f"layer {i}: |S|, step {n}", m) for n, m in enumerate(maps, 1)])
            filled = (f"{100 * (step['S'] != 0).double().mean():.0f}" for step in steps)
            print(f"layer {i}, PAP steps 1 to {len(steps)}: {', '.join(filled)} % of S is not 0")
    notes = ["Top: where the class token looks, each map on its own scale; %: share of its "
             "attention that patches get."]
    notes += ["|S|: black is 0, white the layer's largest key."] if below else []
    return sheet([seen, *below], notes)


def look_at_segmenter(model, classes, image):
    """Print how much of the image each class fills; return the classes laid over the image."""
    size, colours = model.config.image_size, palette(len(classes))
    found = predict(model, image, size=size, window=size, stride=size).argmax(0)    # (h, w)
    area = torch.bincount(found.flatten(), minlength=len(classes)) / found.numel()
    order = [k for k in area.argsort(descending=True).tolist() if area[k] > 0.002]

    zoom = max(1, 384 // max(found.shape))
    shown = image / 255
    over = 0.4 * shown.mean(0) + 0.6 * colours[found].permute(2, 0, 1) / 255     # on grey
    large = F.interpolate(torch.stack([shown, over]), scale_factor=zoom)
    h, w = large.shape[2:]
    page = Image.new("RGB", (2 * w + MARGIN, h + MARGIN + LINE * len(order)), "white")
    for i, x in enumerate(large):
        page.paste(picture(x), (i * (w + MARGIN), 0))
    draw = ImageDraw.Draw(page)
    for i, k in enumerate(order):
        top = h + MARGIN + i * LINE
        draw.rectangle((2, top + 3, 18, top + 19), fill=tuple(colours[k].tolist()))
        draw.text((26, top), f"{classes[k]}, {100 * area[k]:.1f} %", fill="black", font=FONT)
        print(f"{100 * area[k]:6.1f} %  {classes[k]}")
    return page


def classify(model, classes, folder):
    """What a classifier calls each image of a folder: [(file, class, chance)]."""
    paths = [path for path in sorted(Path(folder).rglob("*"))
             if path.name.lower().endswith(IMAGE_EXTENSIONS) and path.name[0] != "."]
    rows = []
    for path in paths:
        try:
            images = middle_square(read_image(str(path)), model.config.image_size)[None] / 255
        except common.InputError as error:
            print(f"skipping: {error}")
            continue
        chance, k = model(images)[0].softmax(0).max(0)
        rows.append((path.relative_to(folder), classes[k], f"{chance:.4f}"))
    if not rows:
        raise common.InputError(f"--image {folder} holds no image that can be read")
    return rows


def main():
    args = get_args()
    checkpoint = common.load(args.ckpt)
    kinds = {"classification": (classifier_from_checkpoint, look_at_classifier),
             "segmentation": (segmenter_from_checkpoint, look_at_segmenter)}
    if not checkpoint.get("classes") or checkpoint.get("task") not in kinds:
        raise common.InputError(f"--ckpt {args.ckpt} names no classes: expected a checkpoint of "
                         f"train_cls.py or train_seg.py")
    rebuild, look = kinds[checkpoint["task"]]
    folder = args.image and Path(args.image).is_dir()
    if architecture(checkpoint) == "fan" and not folder:
        raise common.InputError(f"--ckpt {args.ckpt} is a FAN: its class token joins after these "
                                "layers, so in none of them does it look anywhere; expected a ViT, "
                                "a Segmenter or, for --image, a folder")
    if folder and look is not look_at_classifier:
        raise common.InputError(f"--image {args.image} is a folder: expected an image, as "
                                f"--ckpt {args.ckpt} is a Segmenter")
    with common.error_prefix(f"--ckpt {args.ckpt}"):
        model = rebuild(checkpoint)

    # A folder gets a table, an image a picture.
    out, classes = args.out or ("look.csv" if folder else "look.png"), checkpoint["classes"]
    with torch.no_grad():
        if folder:
            rows = [("file", "class", "chance"), *classify(model, classes, args.image)]
            print(common.table(rows[1:], rows[0]))
        else:
            size = model.config.image_size
            page = look(model, classes, read_image(args.image) if args.image else
                        load_shapes("test", args.scene + 1, size).images[args.scene])
    try:
        if folder:
            with open(out, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
        else:
            page.save(out)
    except OSError as e:
        raise common.InputError(f"--out {out} cannot be written ({e.strerror})") from None
    print(f"{out}: {args.image or 'scene ' + str(args.scene)} as {args.ckpt} sees it")


if __name__ == "__main__":
    common.run(main)
