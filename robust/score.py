"""Images in batches, damaged or attacked, and which answers are right: what measures are made of.

args: seed, device, rank, world, batch_size, num_workers, limit of eval_robust.py. Processes share
the images; what they found is summed, so that each has the whole.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import InputError
from data.batches import Split, image_batches
from data.rng import epoch_order
from robust import ATTACKS, find, parameters, run_attack
from robust.attacks import forward
from robust.measures import SCENES, SLOW
from robust.results import pack

# --- images --------------------------------------------------------------------------------------

class Images(NamedTuple):
    """What a measure is on."""
    source: object                       # a Split, an ImageTree, ...: where the images are
    index: torch.Tensor                  # (n,) int64: the numbers of those that count
    data_dir: str | None = None          # the folder, where there is one that matters


def pick(n, name, args):
    """Number the images that a measure is on, (n,), at random: the first of those of any limit."""
    few = (SCENES if args.data == "shapes" else SLOW).get(name, n)
    return epoch_order(n, 0, args.seed)[:args.limit or few]


def split_images(measure, source, args):
    """The `Images` of a measure in the test split. source: None where no flag names it."""
    if source is None:
        raise InputError(f"--measures {measure.name} needs --data_dir, the folder with val/")
    n = len(source.labels) if isinstance(source, Split) else len(source)
    in_memory = args.data in ("shapes", "cifar10")
    return Images(source, pick(n, measure.name, args), None if in_memory else args.data_dir)


def batches(images, args, label="", most=0):
    """Load this process's share of `Images` in batches on the device.

    Yields ((b, 3, S, S) uint8, labels (b,), numbers (b,), their places in the index (b,)). most:
    batches are joined until they hold so many.
    """
    source, index = images.source, images.index
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
    held = []
    with bar:
        for i, (batch, place) in enumerate(zip(loaded, places), 1):
            held.append(tuple(t.to(args.device, non_blocking=True) for t in (*batch, place)))
            if i == len(places) or sum(len(part[-1]) for part in held) >= most:
                yield tuple(map(torch.cat, zip(*held)))
                held = []
            bar.update(len(place))


def all_sum(t):
    """Sum a tensor over the processes: (the sum,) on the CPU of each."""
    t = t.cpu()
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


# --- answers -------------------------------------------------------------------------------------

@torch.no_grad()
def logits_of(m, x, args):
    """Ask a model about images x in [0, 1]: logits (b, classes), float32."""
    return forward(m.model, x, args.batch_size).float()


def correct(logits, labels):
    """Top-1 and top-5 (0 or 1) and cross-entropy in nats of each image, (b, 3) float."""
    if not logits.isfinite().all():
        raise ValueError("the model returns logits that are not finite")
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([right[:, 0].float(), right.any(1).float(), loss], 1)


def to_pixels(images, *_):
    """Images (b, 3, S, S) uint8 as pixels in [0, 1]."""
    return images.float() / 255


def answers(m, measure, images, args, *changes):
    """What a model says of images as each of `changes` leaves them: (changes, n, 3) of `correct`.

    A change makes pixels in [0, 1] of a batch. All of them see it when it is there.
    """
    hits = torch.zeros(len(changes), len(images.index), 3, device=args.device)
    for batch in batches(images, args, f"{measure}, {m.about['model']}"[:60]):
        _, labels, _, place = batch
        for found, change in zip(hits, changes):
            found[place] = correct(logits_of(m, change(*batch), args), labels)
    return all_sum(hits).double()


def percent(total, n):
    return [round(100 * x / n, 4) for x in total.tolist()]


def outcome(hits, classes):
    """Fields of a row from answers (n, 3): top-1, top-5 in percent, which were right as bits."""
    top1, top5 = percent(hits[:, :2].sum(0), len(hits))
    top5 = dict(top5=top5) if classes > 5 else {}         # of five classes it is all of them
    return dict(top1=top1, **top5, right=pack(hits[:, 0] > 0))


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


def attacked(model, measure, x, labels, index, args, draw=0, trace=None, everyone=False):
    """Pixels x (b, 3, S, S) in [0, 1] after an attack; in [0, 1] themselves only where clipped.

    Images that the model gets wrong are not attacked, but for `everyone`. trace: a list that
    receives the stages of autoattack, dicts with standing and right (b,): not changed so far, and
    of these the ones of the true class.
    """
    name, setting = measure
    attack, z, normalized = find(ATTACKS[name]), x, setting["space"] == "normalized"
    if normalized:
        model = Normalized(model)
        z = (x - model.mean) / model.std
        z = z.clamp(0, 1) if setting["clip"] else z       # the first thing that AutoAttack does
    with torch.no_grad():
        predicted = forward(model, z, args.batch_size).argmax(1)
    target = labels if setting["labels"] == "true" else predicted
    todo = (target == predicted) | everyone

    own = {k: v for k, v in setting.items() if k in parameters(attack) and v is not None}
    adv = run_attack(partial(attack, **own), model, z, target, todo, seed=args.seed, index=index,
                     draw=draw, batch_size=args.batch_size, trace=trace, progress=args.rank == 0)
    for stage in trace or ():
        stage["standing"] = torch.zeros_like(todo).masked_scatter(todo, stage["robust"])
        stage["right"] = stage["standing"] & (target == labels)
    return adv * model.std + model.mean if normalized else adv


def under_attack(m, measure, images, args, by=None, draws=1, most=0, everyone=False):
    """(answers (draws, n, 3), how far images moved (n, 4), the most of all draws, and [(places,
    trace)] of each batch, for autoattack). by: whose gradients and errors the attack sees, if not
    m's. most: images at a time."""
    n, traces = len(images.index), []
    hits = torch.zeros(draws, n, 3, device=args.device)
    moved = torch.zeros(n, 4, dtype=widest(args.device), device=args.device)
    label, source = f"{measure}, {m.about['model']}"[:60], (by or m).model
    for pixels, labels, numbers, place in batches(images, args, label, most):
        x = to_pixels(pixels)
        for draw in range(draws):
            trace = []
            adv = attacked(source, measure, x, labels, numbers, args, draw, trace, everyone)
            hits[draw, place] = correct(logits_of(m, adv, args), labels)
            moved[place] = torch.maximum(moved[place], distances(adv, x))
            traces.append((place, trace))
    return all_sum(hits).double(), all_sum(moved).double(), traces


def widest(device):
    """float64, but on mps, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def distances(adv, x):
    """How far images moved: Linf, L2, L1, and how far outside [0, 1] they are, (b, 4)."""
    move = (adv - x).flatten(1).to(widest(x.device))
    outside = torch.maximum(-adv.flatten(1).amin(1), adv.flatten(1).amax(1) - 1).clamp(min=0)
    return torch.stack([move.norm(math.inf, 1), move.norm(2, 1), move.norm(1, 1), outside], 1)


def row_of(hits, moved, args):
    """Fields of a row from answers (n, 3) and distances (n, 4), extremes over images that moved."""
    touched = moved[moved[:, 0] > 0]
    linf, l2, l1 = (touched[:, :3] if len(touched) else moved[:1, :3]).unbind(1)
    return outcome(hits, len(args.classes)) | dict(
        max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
        median_l2=l2.median().item(), mean_l2=l2.mean().item(), outside=moved[:, 3].max().item())
