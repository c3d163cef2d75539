"""Look at what a network does with one image.

    python look.py                                                    # a rendered scene
    python look.py --image lecture/pictures/scene.png                 # the middle of any picture
    python look.py --ckpt weights/seg_shapes_rpc.pt                   # a Segmenter

Of a classifier it prints the five likeliest classes and draws look.png. Upper row: where the class
token looks in each layer, mean over heads, each map on its own scale; the percentage is the share
of its attention that the patches get, the rest stays on the class token itself. Below, for each
layer with RPC-Attention: the size of S of each patch after every step of PAP; white is the largest
key of that layer. Of a Segmenter it draws the classes over the image, with a legend.
"""

import argparse

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common
from attention import PAP
from data.files import decode, read_bytes
from data.segmentation import palette
from data.shapes import load_shapes
from segmenter import predict, segmenter_from_checkpoint
from vit import classifier_from_checkpoint

SIDE, MARGIN, LINE = 160, 8, 22             # pixels: of a map, between maps, of a line of text
FONT = ImageFont.load_default(size=16)


def get_args():
    """Read the flags."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", default="weights/shapes_rpc.pt",
                   help="of train_cls.py or train_seg.py: a file, or a folder with last.pt")
    p.add_argument("--image", help="JPEG, PNG or WebP; default: a rendered scene")
    p.add_argument("--scene", type=common.number(int, 0), default=35, help="which test scene")
    p.add_argument("--out", default="look.png", help="the picture to write")
    return p.parse_args()


def read_image(args, size):
    """The image to look at, (3, h, w) in [0, 1]; a scene is drawn with `size` pixels a side."""
    if args.image:
        return decode(read_bytes(args.image), args.image) / 255
    return load_shapes("test", args.scene + 1, size).images[args.scene] / 255


def square(image, size):
    """The middle of an image (3, h, w), resized to (1, 3, size, size) as evaluations do."""
    from torchvision.transforms.v2.functional import InterpolationMode, center_crop, resize
    small = resize(image[None], [size], InterpolationMode.BICUBIC, antialias=True)
    return center_crop(small, [size, size]).clamp(0, 1)


# --- what a layer does ----------------------------------------------------------------------------

def class_attention(attn, x, steps):
    """How much the class token looks at each patch, mean over heads: (N - 1,).

    RPC-Attention looks with the keys of its last step; every other kind is drawn as the softmax of
    its queries and keys.
    """
    q, k, _ = attn.project(x)
    if steps:
        k = steps[-1]["K2"]
        q = q if attn.attn == "rpc_asym" else k
    scores = q[0, :, :1] @ k[0].mT / q.shape[-1] ** 0.5              # (H, 1, N)
    return scores.softmax(-1).mean(0)[0, 1:]


# --- drawing --------------------------------------------------------------------------------------

def grey_map(x, largest):
    """Numbers of the patches (P,), row by row, as a picture: black is 0, white is `largest`."""
    side = round(len(x) ** 0.5)
    pixels = (255 * x / largest).clamp(0, 255).view(side, side).byte().numpy()
    return Image.fromarray(pixels)


def picture(image):
    """An image (3, h, w) in [0, 1] for Pillow."""
    return Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy())


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
    images = square(image, model.config.image_size)
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
        steps = block.attn.trace(x) if block.attn.attn in PAP else []
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
    over = 0.4 * image.mean(0) + 0.6 * colours[found].permute(2, 0, 1) / 255     # on grey
    large = F.interpolate(torch.stack([image, over]), scale_factor=zoom)
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


def main():
    args = get_args()
    checkpoint = common.load(args.ckpt)
    kinds = {"classification": (classifier_from_checkpoint, look_at_classifier),
             "segmentation": (segmenter_from_checkpoint, look_at_segmenter)}
    if not checkpoint.get("classes") or checkpoint.get("task") not in kinds:
        raise common.InputError(f"--ckpt {args.ckpt} names no classes: expected a checkpoint of "
                         f"train_cls.py or train_seg.py")
    if "cls_depth" in checkpoint["model_config"]:
        raise common.InputError(f"--ckpt {args.ckpt} is a FAN: its class token joins after these "
                                "layers, so in none of them does it look anywhere; expected a ViT "
                                "or a Segmenter")
    rebuild, look = kinds[checkpoint["task"]]
    with common.error_prefix(f"--ckpt {args.ckpt}"):
        model = rebuild(checkpoint)
    image = read_image(args, model.config.image_size)
    with torch.no_grad():
        page = look(model, checkpoint["classes"], image)
    try:
        page.save(args.out)
    except OSError as e:
        raise common.InputError(f"--out {args.out} cannot be written ({e.strerror})") from None
    print(f"{args.out}: {'scene ' + str(args.scene) if not args.image else args.image} "
          f"as {args.ckpt} sees it")


if __name__ == "__main__":
    common.run(main)
