"""The two small networks that attacks are tested on: the reference runs' and one trained here."""

import functools

import torch
import torch.nn.functional as F

from data import load_shapes


class ConvNet(torch.nn.Module):
    """Pixels in [0, 1] -> normalised -> convolutions of stride 2 with ReLU -> linear -> logits."""

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
    """The frozen network of the arrays `robustness_attacks_a`, its images in [0, 1] and labels.

    The full arrays hold their images; those of a clone are scenes, drawn here.
    """
    g = {k: v.float() if v.dtype == torch.float16 else v for k, v in g.items()}
    images = g["x"] if "x" in g else load_shapes("test", len(g["y"])).images
    fc = torch.nn.Linear(*g["model/fc_w"].shape[::-1])
    fc.weight.data, fc.bias.data = g["model/fc_w"], g["model/fc_b"]
    layers = sum(k.startswith("model/w") for k in g)
    convs = [conv(g[f"model/w{i}"], g[f"model/b{i}"]) for i in range(layers)]
    model = ConvNet(convs, fc, g["model/mean"].view(3, 1, 1), g["model/std"].view(3, 1, 1))
    return model.eval().requires_grad_(False), images.float() / 255, g["y"]


@functools.cache
def trained(epochs=8, n=1500):
    """A frozen network trained on n drawn scenes; about 85 % of others are right.

    Trained in float64, so that another processor or number of threads does not grow into another
    network. Once in a run of the tests: nothing may change it.
    """
    train = load_shapes("train", n)
    images = train.images.double() / 255
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convs = [torch.nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 16), (16, 32), (32, 64))]
        fc = torch.nn.Linear(1024, len(train.classes))
        mean, std = torch.tensor([[0.5, 0.4, 0.45], [0.25, 0.22, 0.3]]).view(2, 3, 1, 1)
        model = ConvNet(convs, fc, mean, std).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for batch in torch.cat([torch.randperm(n) for _ in range(epochs)]).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), train.labels[batch]).backward()
            optimizer.step()
        optimizer.zero_grad()
    return model.float().eval().requires_grad_(False)


def trained_network(num_test=200):
    """The trained network, test images (float in [0, 1]) and labels."""
    test = load_shapes("test", num_test)
    return trained(), test.images.float() / 255, test.labels
