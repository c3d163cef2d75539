"""A network that is not ours, for the line: a ViT of timm's, trained by twenty lines of torch.

    python -m studies.timm_vit                                  # out/timm_vit.pt, 3 minutes
    python eval_robust.py --model studies/timm_vit.py:build --data shapes --seed 1 \\
        --limit 1000 --severities 1 3 5 --out_dir out/timm_vit_eval \\
        --measures clean corruptions "pgd eps=1/255,2/255 steps=20"
    python -m studies.line --rows out/timm_vit_eval             # how far off is it?

Softmax attention, the size of ours (ViT-nano), AdamW at a constant 1e-3, 6 epochs. `build` is what
--model asks for: a module from pixels in [0, 1] to logits.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from tqdm import tqdm

import common
from data.shapes import load_shapes

WEIGHTS = Path("out/timm_vit.pt")


def build(weights=WEIGHTS):
    model = VisionTransformer(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2,
                              num_classes=10)
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=common.COUNT, default=16000, help="training images")
    args = p.parse_args(argv)
    torch.manual_seed(0)
    split, model = load_shapes("train", args.images), build(weights=None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    for epoch in range(6):
        for i in tqdm(torch.randperm(args.images).split(64), f"epoch {epoch + 1} of 6"):
            loss = F.cross_entropy(model(split.images[i] / 255), split.labels[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    WEIGHTS.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    common.run(main)
