"""The two small networks that attacks are tested on: the one of the reference runs, and one trained here in seconds."""

import torch
import torch.nn.functional as F

from data import load_shapes


class ConvNet(torch.nn.Module):
    """Pixels in [0, 1] -> (x - mean) / std -> convolutions of stride 2 with ReLU -> linear layer -> logits."""

    def __init__(self, convs, fc, mean, std):
        super().__init__()
        self.convs, self.fc, self.mean, self.std = torch.nn.ModuleList(convs), fc, mean, std

    def normalized(self, z):
        """Logits of images that are normalised already."""
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
    """The network of the reference arrays `robustness_attacks_a`, frozen, its images (float in [0, 1]) and labels.

    The full arrays hold their images; those of a clone are scenes, drawn here.
    """
    g = {k: v.float() if v.dtype == torch.float16 else v for k, v in g.items()}
    images = g["x"] if "x" in g else load_shapes("test", len(g["y"])).images
    fc = torch.nn.Linear(*g["model/fc_w"].shape[::-1])
    fc.weight.data, fc.bias.data = g["model/fc_w"], g["model/fc_b"]
    convs = [conv(g[f"model/w{i}"], g[f"model/b{i}"]) for i in range(sum(k.startswith("model/w") for k in g))]
    model = ConvNet(convs, fc, g["model/mean"].view(3, 1, 1), g["model/std"].view(3, 1, 1))
    return model.eval().requires_grad_(False), images.float() / 255, g["y"]


def trained_network(num_test=200, epochs=8):
    """A frozen network trained on 1,500 drawn scenes, test images (float in [0, 1]) and labels; about 85 % right.

    Trained in float64, so that another processor or number of threads does not grow into another network.
    """
    train, test = load_shapes("train", 1500), load_shapes("test", num_test)
    images = train.images.double() / 255
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ConvNet([torch.nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 16), (16, 32), (32, 64))],
                        torch.nn.Linear(1024, len(train.classes)), torch.tensor([0.5, 0.4, 0.45]).view(3, 1, 1),
                        torch.tensor([0.25, 0.22, 0.3]).view(3, 1, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for batch in torch.cat([torch.randperm(1500) for _ in range(epochs)]).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), train.labels[batch]).backward()
            optimizer.step()
        optimizer.zero_grad()
    return model.float().eval().requires_grad_(False), test.images.float() / 255, test.labels
