"""A network that is not ours, for the line: a ViT of timm's, trained by twenty lines of torch.

    python -m referee.timm_vit                                  # out/timm_vit.pt, 3 minutes
    python eval_robust.py --model referee/timm_vit.py:build --data shapes --seed 1 \\
        --limit 1000 --severities 1 3 5 --out_dir out/timm_vit_eval \\
        --measures clean corruptions "pgd eps=1/255,2/255 steps=20"
    python -m referee.line --rows out/timm_vit_eval             # how far off is it?

Softmax attention, the size of ours (ViT-nano), AdamW at a constant 1e-3, 6 epochs. `build` is what
--model asks for: a module from pixels in [0, 1] to logits. With --cosine the learning rate falls to
0: out/timm_vit_cosine.pt, `timm_vit.py:build_cosine`.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from tqdm import tqdm

import common
from data.shapes import load_shapes

WEIGHTS, COSINE = Path("out/timm_vit.pt"), Path("out/timm_vit_cosine.pt")


def build(weights=WEIGHTS):
    model = VisionTransformer(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2,
                              num_classes=10)
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def build_cosine():
    return build(COSINE)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=common.COUNT, default=16000, help="training images")
    p.add_argument("--cosine", action="store_true", help="lower the learning rate, to 0")
    args = p.parse_args(argv)
    torch.manual_seed(0)
    split, model = load_shapes("train", args.images), build(weights=None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    steps = 6 * -(-args.images // 64)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (
        (1 + math.cos(math.pi * step / steps)) / 2 if args.cosine else 1))
    for epoch in range(6):
        for i in tqdm(torch.randperm(args.images).split(64), f"epoch {epoch + 1} of 6"):
            loss = F.cross_entropy(model(split.images[i] / 255), split.labels[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    WEIGHTS.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), COSINE if args.cosine else WEIGHTS)


if __name__ == "__main__":
    common.run(main)
