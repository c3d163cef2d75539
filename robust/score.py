"""Images in batches, and which answers are right: what the evaluator's loop is made of.

args: seed, device, rank, world, batch_size, num_workers, amp and limit of eval_robust.py. Processes
share the images; what they found is summed, so that each has the whole.
"""

import math
from functools import partial

import torch
from tqdm import tqdm

import common
from common import InputError
from data.batches import Split, image_batches
from data.rng import epoch_order
from robust import find, parameters, run_attack
from robust.attacks import forward
from robust.measures import FOLDERS, SCENES, SLOW
from robust.results import pack

# --- images --------------------------------------------------------------------------------------

def pick(n, name, args):
    """Number the images that a measure is on, at random out of n: part of those of any more."""
    few = (SCENES if args.data == "shapes" else SLOW).get(name, n)
    if args.limit and args.limit > n and name not in FOLDERS:
        raise InputError(f"--limit {args.limit}: there are only {n} images")
    return epoch_order(n, 0, args.seed)[:args.limit or few]


def batches(source, index, args, label=""):
    """Load this process's share of the images numbered index, in batches on the device.

    Yields ((b, 3, S, S) uint8, labels (b,), numbers (b,), their places in index (b,)).
    """
    share = torch.arange(len(index))[args.rank::args.world]
    places = [p for p in share.split(args.batch_size) if len(p)]
    parts = [index[p] for p in places]
    if isinstance(source, Split):
        parts = (part.to(args.device) for part in parts)
        loaded = ((source.images[part], source.labels[part], part) for part in parts)
    else:
        keys = [[(i, i) for i in part.tolist()] for part in parts]
        loaded = image_batches(source, keys, args.num_workers, args.device)
    bar = tqdm(total=len(share), desc=label, unit="image", leave=False,
               disable=args.rank > 0 or None)             # None: where output is redirected
    with bar:
        for (images, labels, numbers), place in zip(loaded, places):
            batch = images, labels, numbers, place
            yield tuple(t.to(args.device, non_blocking=True) for t in batch)
            bar.update(len(place))


def concat(loaded, most):
    """Join batches until they hold `most` images."""
    parts, n = [], 0
    for batch in loaded:
        parts.append(batch)
        n += len(batch[1])
        if n >= most:
            yield tuple(map(torch.cat, zip(*parts)))
            parts, n = [], 0
    if parts:
        yield tuple(map(torch.cat, zip(*parts)))


def damage(images, numbers, setting, severity, args):
    """Corrupt the images (b, 3, H, W) uint8 with these numbers, as a measure's setting says."""
    from robust import corruptions
    images = corruptions.corrupt(images, setting["type"], severity, seed=args.seed, index=numbers,
                                 frost_dir=args.frost_dir)
    # as which ImageNet-C's files are saved after their corruption
    return corruptions.jpeg_compression(images, 85) if setting["jpeg85"] else images


# --- answers -------------------------------------------------------------------------------------

@torch.no_grad()
def is_correct(model, x, labels, args):
    """Ask about images x in [0, 1]: top-1, top-5 and loss of each, as `correct`, (b, 3) float."""
    with common.autocast(args.device, args.amp):
        logits = forward(model, x, args.batch_size).float()
    return correct(logits, labels)


def correct(logits, labels):
    """Top-1 and top-5 (0 or 1) and cross-entropy in nats of each image, (b, 3) float."""
    if not logits.isfinite().all():
        raise ValueError("the model returns logits that are not finite")
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([right[:, 0].float(), right.any(1).float(), loss], 1)


def percent(total, n):
    return [round(100 * x / n, 4) for x in total.tolist()]


def outcome(hit):
    """Fields of a row from answers (n, 3): top-1, top-5 in percent, which were right as bits."""
    top1, top5 = percent(hit[:, :2].sum(0), len(hit))
    return dict(top1=top1, top5=top5, right=pack(hit[:, 0] > 0))


def stack(outcomes):
    """Join outcomes of several severities: a list for each field."""
    return {field: [one[field] for one in outcomes] for field in outcomes[0]}


# --- attacks -------------------------------------------------------------------------------------

class Normalized(torch.nn.Module):
    """A ViT on normalised tensors, z = (x - mean) / std: the space the paper's code attacks in."""

    def __init__(self, model):
        super().__init__()
        self.model, self.mean, self.std = model, model.mean, model.std
        self.training = model.training

    def forward(self, z):
        return self.model(z * self.std + self.mean)


def attack_images(model, measure, x, labels, index, args, draw=0, trace=None):
    """Attack pixels x (b, 3, S, S) in [0, 1]; returns pixels, in [0, 1] only where clipped.

    Images that the model gets wrong are not attacked, but by noise, and where the model is another
    than that which is measured. trace: a list that receives the stages of autoattack, dicts with
    standing and right (b,): not changed so far, and of these the ones of the true class.
    """
    name, setting, conditions = measure
    attack, z = find(name), x
    at_once = "batch_size" in parameters(attack)          # these take all images
    if conditions["space"] == "normalized":
        model = Normalized(model)
        z = (x - model.mean) / model.std
        z = z.clamp(0, 1) if at_once else z               # the first thing that AutoAttack does
    with torch.no_grad():
        predicted = forward(model, z, args.batch_size).argmax(1)
    target = labels if conditions["labels"] == "true" else predicted
    todo = (target == predicted) | (name in ("noise", "transfer"))

    settings = {k: v for k, v in setting.items() if k not in ("draws", "source", "weights")}
    adv = run_attack(partial(attack, **settings), model, z, target, todo, clip=conditions["clip"],
                     seed=args.seed, index=index, draw=draw, batch_size=args.batch_size,
                     trace=trace, progress=args.rank == 0)
    for stage in trace or ():
        stage["standing"] = torch.zeros_like(todo).masked_scatter(todo, stage["robust"])
        stage["right"] = stage["standing"] & (target == labels)
    return adv * model.std + model.mean if conditions["space"] == "normalized" else adv


def widest(device):
    """float64, but on mps, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def distances(adv, x):
    """How far images moved: Linf, L2, L1, and how far outside [0, 1] they are, (b, 4)."""
    move = (adv - x).flatten(1).to(widest(x.device))
    outside = torch.maximum(-adv.flatten(1).amin(1), adv.flatten(1).amax(1) - 1).clamp(min=0)
    return torch.stack([move.norm(math.inf, 1), move.norm(2, 1), move.norm(1, 1), outside], 1)


def sizes(moved):
    """Fields of a row from `distances` (n, 4): extremes over the images that were moved."""
    touched = moved[moved[:, 0] > 0]
    linf, l2, l1 = (touched[:, :3] if len(touched) else moved[:1, :3]).unbind(1)
    return dict(max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
                median_l2=l2.median().item(), mean_l2=l2.mean().item(),
                outside=moved[:, 3].max().item())
