"""Small networks for the tests to attack: one from the reference runs, one trained on scenes."""

from pathlib import Path

import numpy as np
import torch

from data.shapes import load_shapes


class ConvNet(torch.nn.Module):
    """A small CNN: normalise pixels in [0, 1], strided convolutions with ReLU, a linear layer."""

    def __init__(self, convs, fc, mean, std):
        super().__init__()
        self.convs, self.fc, self.mean, self.std = torch.nn.ModuleList(convs), fc, mean, std

    def normalized(self, z):
        """Return the logits of normalised images."""
        for conv in self.convs:
            z = conv(z).relu()
        return self.fc(z.flatten(1))

    def forward(self, x):
        return self.normalized((x - self.mean) / self.std)


def conv(weight, bias):
    c = torch.nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], 2, weight.shape[2] // 2)
    c.weight.data, c.bias.data = weight, bias
    return c


def golden_network(g):
    """Return the frozen network of the arrays `robustness_attacks_a`, images in [0, 1] and labels.

    The full arrays contain their images. The arrays of a clone belong to scenes, which are rendered
    here.
    """
    g = {k: v.float() if v.dtype == torch.float16 else v for k, v in g.items()}
    images = g["x"] if "x" in g else load_shapes("test", len(g["y"])).images
    fc = torch.nn.Linear(*g["model/fc_w"].shape[::-1])
    fc.weight.data, fc.bias.data = g["model/fc_w"], g["model/fc_b"]
    layers = sum(k.startswith("model/w") for k in g)
    convs = [conv(g[f"model/w{i}"], g[f"model/b{i}"]) for i in range(layers)]
    model = ConvNet(convs, fc, g["model/mean"].view(3, 1, 1), g["model/std"].view(3, 1, 1))
    return model.eval().requires_grad_(False), images.float() / 255, g["y"]


def trained_network(num_test=200):
    """Return the network of a clone's arrays, test images in [0, 1] and labels.

    The network was trained on scenes. It classifies 82 % of the images correctly.
    """
    with np.load(Path(__file__).parent / "golden" / "robustness_attacks_a.npz") as z:
        g = {k: torch.from_numpy(z[k]) for k in z.files if k.startswith("model/") or k == "y"}
    model, images, labels = golden_network(g)
    return model, images[:num_test], labels[:num_test]
