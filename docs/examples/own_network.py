"""Evaluate a network of your own: python -m docs.examples.own_network --measures clean fog pgd"""

import sys

from torch import nn

import common
import eval_robust


def build():
    """Build a network, untrained: pixels in [0, 1] (B, 3, 32, 32) to logits (B, 10)."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))
    # Load your weights here: net.load_state_dict(torch.load("mine.pt"))
    return net


def main():
    eval_robust.evaluate_networks({"mine": build()}, ["--data", "shapes", *sys.argv[1:]])


if __name__ == "__main__":
    common.run(main)
