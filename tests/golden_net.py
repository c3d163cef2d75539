"""Small networks for the tests to attack: one from the reference runs, one trained on scenes."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.shapes import load_shapes


class ConvNet(torch.nn.Module):
    """A small CNN with the frozen weights g: normalise pixels in [0, 1], convolve, classify."""

    def __init__(self, g):
        super().__init__()
        self.mean, self.std = (g[f"model/{name}"].view(3, 1, 1) for name in ("mean", "std"))
        layers = sum(k.startswith("model/w") for k in g)
        self.convs = [(g[f"model/w{i}"], g[f"model/b{i}"]) for i in range(layers)]
        self.fc = g["model/fc_w"], g["model/fc_b"]

    def normalized(self, z):
        """Return the logits of normalised images."""
        for weight, bias in self.convs:
            z = F.conv2d(z, weight, bias, stride=2, padding=weight.shape[2] // 2).relu()
        return F.linear(z.flatten(1), *self.fc)

    def forward(self, x):
        return self.normalized((x - self.mean) / self.std)


def golden_network(g):
    """Return the network of the arrays `robustness_attacks_a`, images in [0, 1] and labels.

    The full arrays contain their images. The arrays of a clone belong to scenes, which are rendered
    here.
    """
    g = {k: v.float() if v.dtype == torch.float16 else v for k, v in g.items()}
    images = g["x"] if "x" in g else load_shapes("test", len(g["y"])).images
    return ConvNet(g).eval(), images.float() / 255, g["y"]


def trained_network(num_test=200):
    """Return the network of a clone's arrays, test images in [0, 1] and labels.

    The network was trained on scenes. It classifies 82 % of the images correctly.
    """
    with np.load(Path(__file__).parent / "golden" / "robustness_attacks_a.npz") as z:
        g = {k: torch.from_numpy(z[k]) for k in z.files if k.startswith("model/") or k == "y"}
    model, images, labels = golden_network(g)
    return model, images[:num_test], labels[:num_test]
