"""studies/probe.py: what a network is looked at on."""

from argparse import Namespace

import pytest
import torch
from torchvision.io import write_png

from data import images as data
from studies.probe import checkpoints, load_images
from vit import ViT, ViTConfig

CONFIG = ViTConfig(image_size=16, patch_size=8, num_classes=2)


def save_photos(root, per_class=5):
    """Two folders of grey images, no two alike."""
    for i, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for j in range(per_class):
            grey = torch.full((3, 20, 20), 40 * j + 20 * i, dtype=torch.uint8)
            write_png(grey, str(root / name / f"{j}.png"))
    return root


def test_a_network_of_ones_own_photos_is_looked_at_on_those_it_was_not_trained_on(tmp_path):
    folder = save_photos(tmp_path / "photos")
    checkpoint = dict(args=dict(data="folder", data_dir=str(folder), holdout=4))
    args = Namespace(data=None, data_dir=None, images=32)
    images, labels, what, classes = load_images(args, checkpoint, CONFIG)

    train, val, _ = data.load_photos(data.find_photos(folder), 16, holdout=4)
    seen = {image.float().mean().item() for image in train.images}
    found = {255 * image.mean().item() for image in images}
    assert len(found) == 4 and not {round(x) for x in found} & {round(x) for x in seen}
    assert sorted(labels.tolist()) == sorted(val.labels.tolist())
    assert what == "4 images of folder" and classes == 2


def test_photos_without_their_folder_ask_for_it():
    args = Namespace(data="folder", data_dir=None, images=32)
    with pytest.raises(ValueError, match="--data folder needs --data_dir"):
        load_images(args, {}, CONFIG)


def test_two_runs_of_one_name_are_not_taken_for_one(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
        torch.save(dict(task="classification", step=1, model_config=vars(CONFIG), args=dict(seed=0),
                        model=ViT(CONFIG).state_dict()), tmp_path / folder / "run" / "last.pt")
    args = Namespace(ckpt=[str(tmp_path / "a/run"), str(tmp_path / "b/run")], untrained=False)
    with pytest.raises(ValueError, match="a/run .*b/run: two runs named run"):
        next(checkpoints(args))
