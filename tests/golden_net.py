"""A small network for the tests to attack; it was trained on scenes."""

import torch
import torch.nn.functional as F

from data.shapes import load_shapes
from fixtures import load_golden


class ConvNet(torch.nn.Module):
    """A small CNN with the frozen weights g: normalise pixels in [0, 1], convolve, classify."""

    def __init__(self, g):
        super().__init__()
        g = {k: v.float() for k, v in g.items()}                    # stored in half precision
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


def trained_network(num_test=200):
    """Return the network, test scenes in [0, 1] and labels. It is right on 82 % of the scenes."""
    g = load_golden("robustness_attacks_a")
    images, labels = load_shapes("test", 200).images[:num_test], g["y"][:num_test]
    return ConvNet(g).eval(), images.float() / 255, labels
