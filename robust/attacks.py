"""Adversarial attacks on image classifiers, whole batches at a time.

    adv = pgd(model, images, labels, 8 / 255)
    robust = model(adv).argmax(1) == labels       # False also for images that were wrong before

An attack is a function attack(model, images, labels, eps, *, seed=0, index=None, ...) that returns
adversarial images:
  model     any function from pixels to logits, (B, 3, H, W) float32 in [0, 1] -> (B, classes);
            a module must be in eval mode
  images    (B, 3, H, W) float32 in [0, 1], on the model's device; never changed
  labels    (B,) int64, the true classes (or predictions), which the attack tries to change
  eps       the largest change of a pixel value, for example 8/255: a number or a tensor that
            broadcasts to images. sld reads eps as an L1 budget; cw has no budget and ignores eps
  clip      True: adversarial pixels stay in [0, 1]; False: they may leave this range (as in the
            paper's code)
  seed, index   random numbers depend on (seed, image number index[i]) alone, not on the batch.
            index: (B,) int64; None: 0, 1, 2, ...
The result is detached; the model's parameters and their .grad stay unchanged. An attack is faster
if you freeze the parameters. Paper: Teo & Nguyen 2024, sections 4.1 and A.2. A source
`cleverhans:FILE.py` is a file in cleverhans/torch/attacks of `cleverhans-lab/cleverhans`.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from attention import soft_threshold
from common import InputError, at_least_float32
from data.rng import NOISE, SIGNS, START, uniform

# --- shared by all attacks -----------------------------------------------------------------------

# The loss per image, (B,). labels: (B,) int64, or (B, classes) probabilities.
cross_entropy = partial(F.cross_entropy, reduction="none")


def margin(logits, labels):
    """Return z_y - max_{j != y} z_j, (B,): negative where the model is fooled."""
    others = logits.scatter(1, labels[:, None], -math.inf)
    return logits.gather(1, labels[:, None])[:, 0] - others.amax(1)


def input_gradient(loss, model, images, labels):
    """Return logits (B, classes), losses (B,), and the gradient of the sum of the losses.

    loss: a function of (logits, labels) that returns (B,). The losses are summed, not averaged, so
    an image's gradient does not depend on the batch size.
    """
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits = at_least_float32(model(images))
        losses = loss(logits, labels)
        grad, = torch.autograd.grad(losses.sum(), images)
    return logits.detach(), losses.detach(), grad


def bounds(images, eps, clip):
    """Return the lowest and the highest pixels that the budget allows, both shaped as images."""
    low = images - eps
    high = images + eps
    if clip:
        return low.clamp(0, 1), high.clamp(0, 1)
    return low, high


def column(x):
    """Reshape (B,) to (B, 1, 1, 1)."""
    return x[:, None, None, None]


def per_image(images, eps, index):
    """Return eps and index as tensors with one entry per image, so that [rows] selects images."""
    eps = torch.as_tensor(eps, dtype=images.dtype, device=images.device)
    eps = eps + images.new_zeros(len(images), 1, 1, 1)          # zeros repeat eps for every image
    if index is None:
        index = torch.arange(len(images))
    return eps, index.to(images.device)


def select_rows(state, mask):
    """Return a namespace of tensors with only the rows where the mask, (B,) bool, is True."""
    rows = mask.nonzero()[:, 0]
    selected = {name: values[rows] for name, values in vars(state).items()}
    return SimpleNamespace(**selected)


def noise_like(images, index, *key):
    """Return uniform numbers in [-1, 1), shaped as images. key: seed, purpose, ..."""
    return (2 * uniform(index, images[0].numel(), *key) - 1).view_as(images)


# --- checks of errors that would look like robustness --------------------------------------------

def check_inputs(model, images, eps=0.0, clip=True):
    """Raise an error for a module in train mode and, if clip, for pixels or eps outside [0, 1].

    Pixels may leave [0, 1] by 1e-6, the rounding of other libraries' attacks.
    """
    if isinstance(model, torch.nn.Module):
        if any(module.training for module in model.modules()):
            raise ValueError("the model is in train mode: call model.eval() before "
                             "attacking it")
    low = images.detach().min()
    high = images.detach().max()
    if clip and not (-1e-6 <= low and high <= 1 + 1e-6):  # a comparison with nan is False
        raise InputError(f"images have values from {low:g} to {high:g}, "
                         f"expected 0 to 1")
    eps = torch.as_tensor(eps)
    wrong = ~((eps >= 0) & (eps <= 1))                  # also true for nan
    if clip and wrong.any():
        first = eps[wrong][0]
        raise InputError(f"eps={first:g}, expected 0 to 1, for example 8/255: eps is in "
                         f"pixel units; was it meant as {first:g}/255?")


def check_logits(logits):
    """Raise InputError for logits that are not finite, and for scores that are no logits.

    Neither gives a useful gradient, so the model would look robust.
    """
    if not logits.isfinite().all():
        raise InputError("the model returns logits that are not finite (inf or nan)")
    expected = "expected logits, the values before the softmax or the sigmoid"
    if (logits < 0).any():
        return
    for total, unit in ((1, ""), (100, " in per cent")):
        if ((logits.sum(1) - total).abs() < 1e-4 * total).all():
            raise InputError(f"the model returns probabilities{unit} "
                             f"(rows sum to {total}), {expected}")
    # Few logits can lie between 0 and 1 by chance, and early in a training all images have similar
    # logits. So few classes count only if a score is near 1. Equal logits are no error, because a
    # layer whose weights start at 0 returns equal logits before the training.
    enough_scores = logits.numel() >= 16
    many_classes = logits.shape[1] >= 8
    near_one = logits.max() > 0.99
    in_range = logits.max() <= 1 and logits.min() < logits.max()
    if enough_scores and (many_classes or near_one) and in_range:
        raise InputError(f"the model returns scores from 0 to 1, {expected}")


@torch.no_grad()
def check_repeats(model, images, logits):
    """Raise InputError unless the logits of an image depend on this image alone.

    logits: (B, classes), the model's answer for images, after `check_logits`. Two images are
    enough. The model runs twice on each image alone. The two answers must agree to 0.1 % of the
    largest logit. The tolerance between an answer and logits is 5 %, because rounding depends on
    the batch size, most of all in bf16.
    """
    alone = one_by_one(model, images).to(logits)
    again = one_by_one(model, images).to(logits)
    if alone.shape != logits.shape:
        raise InputError(f"the model returns {tuple(alone.shape)} for {len(images)} images "
                         f"one by one, but {tuple(logits.shape)} for all of them; expected "
                         f"the same")
    largest = logits.abs().max()
    between_calls = (again - alone).abs().max()
    if not between_calls <= 1e-3 * largest:                     # also true for nan
        raise InputError(f"two calls with the same image return logits that differ by up to "
                         f"{between_calls:.2g}; the largest logit is {largest:.2g}; expected the "
                         f"same logits in every call. Possible causes: dropout is on, for "
                         f"example in a module in a plain list; the model draws random "
                         f"numbers; the model adapts to its inputs")
    by_batch = (alone - logits).abs().max()
    if not by_batch <= 0.05 * largest:                          # also true for nan
        raise InputError(f"the logits of an image change with the other images of the batch, by "
                         f"up to {by_batch:.2g}; the largest logit is {largest:.2g}; expected "
                         f"logits that depend on this image alone. Possible causes: a "
                         f"BatchNorm uses the statistics of the batch; the model adapts to "
                         f"its inputs")


def one_by_one(model, images):
    """Return the logits (B, classes) of images that the model gets one at a time."""
    return torch.cat([at_least_float32(model(image)) for image in images.split(1)])


def check_adversarial(model, images, adv, clip=True):
    """Raise an error unless `adv`, the result of an attack on `images`, can be evaluated.

    The shape is the shape of images, pixels are finite and, if clip, in [0, 1], and the attack
    has left the model in eval mode.
    """
    if adv.shape != images.shape:
        raise ValueError(f"the attack returns images {tuple(adv.shape)}, expected "
                         f"{tuple(images.shape)}")
    if not adv.isfinite().all():
        raise ValueError("the attack returns pixels that are not finite (inf or nan)")
    check_inputs(model, adv, clip=clip)


@torch.no_grad()
def clean_logits(model, images, eps=0.0, clip=True):
    """Return the logits of the clean images, (B, classes), after check_inputs and check_logits."""
    check_inputs(model, images, eps, clip)
    logits = at_least_float32(model(images))
    check_logits(logits)
    return logits


# --- L-infinity, with gradients ------------------------------------------------------------------

@torch.no_grad()
def fgsm(model, images, labels, eps, *, clip=True, seed=0, index=None):
    """Fast gradient sign method: x + eps sign(grad CE), one step.

    Goodfellow et al. 2015; `cleverhans:fast_gradient_method.py`.
    """
    check_inputs(model, images, eps, clip)
    logits, _, grad = input_gradient(cross_entropy, model, images, labels)
    check_logits(logits)
    return (images + eps * grad.sign()).clamp(*bounds(images, eps, clip))


@torch.no_grad()
def pgd(model, images, labels, eps, *, steps=20, alpha=None, random_start=True, clip=True, seed=0,
        index=None, purpose=START):
    """Projected gradient descent: x <- Pi(x + alpha sign(grad CE)), `steps` times.

    alpha: the step size in pixel units, for example 2/255; None: max(0.15, 2.5 / steps) eps.
    random_start: begin at x + U(-eps, eps). labels: as in `cross_entropy`. purpose: a constant of
    data/rng.py; train_cls.py --adv_eps draws other random numbers than an evaluation.
    Madry et al. 2018; `cleverhans:projected_gradient_descent.py`.
    """
    check_inputs(model, images, eps, clip)
    # The default step is 0.15 eps, as in the paper's code, for 17 steps and more. With fewer steps,
    # each step is longer: all steps together move a pixel by 2.5 eps (Madry et al. 2018), so a walk
    # from any start can reach any corner.
    if alpha is None:
        alpha = max(0.15, 2.5 / steps) * eps
    eps, index = per_image(images, eps, index)
    low, high = bounds(images, eps, clip)                       # Pi clamps to these
    adv = images
    if random_start:
        adv = (images + eps * noise_like(images, index, seed, purpose)).clamp(low, high)
    for _ in range(steps):
        logits, _, grad = input_gradient(cross_entropy, model, adv, labels)
        adv = (adv + alpha * grad.sign()).clamp(low, high)
    check_logits(logits)            # once, after the loop: a GPU waits here, and nan stays in adv
    return adv


@torch.no_grad()
def restarted(model, images, labels, eps, *, attack=pgd, restarts=5, seed=0, index=None,
              **settings):
    """Run an attack with a random start `restarts` times, on images that are not fooled yet."""
    eps, index = per_image(images, eps, index)
    adv = images.clone()
    rows = torch.arange(len(images), device=images.device)              # not fooled yet
    for run in range(restarts):
        # far from the small seeds that people choose
        new_seed = (seed + 1_000_003 * run) % 2 ** 31
        tried = attack(model, images[rows], labels[rows], eps[rows], seed=new_seed,
                       index=index[rows], **settings)
        fooled = model(tried).argmax(1) != labels[rows]
        adv[rows[fooled]] = tried[fooled]
        rows = rows[~fooled]
        if not len(rows):
            break
    return adv


# --- L-infinity, without gradients: noise, SPSA --------------------------------------------------

@torch.no_grad()
def noise(model, images, labels, eps, *, clip=True, seed=0, index=None):
    """Add uniform noise: x + U(-eps, eps). It does not look at the model."""
    check_inputs(model, images, eps, clip)
    eps, index = per_image(images, eps, index)
    # The 0 is a part of the key. Without it, other numbers are drawn than for the stored rows.
    moved = images + eps * noise_like(images, index, seed, NOISE, 0)
    return moved.clamp(*bounds(images, eps, clip))


def adam(grad, first, second, t, lr):
    """Return the change that Adam subtracts in step t = 1, 2, ..., and both new moments.

    first, second: the moments, running means of g and of g^2, where g is the gradient.
    """
    first = first.lerp(grad, 0.1)                                       # 0.9 first + 0.1 g
    second = (0.999 * second).addcmul(grad, grad, value=0.001)          # 0.999 second + 0.001 g^2
    scale = (second / (1 - 0.999 ** t)).sqrt() + 1e-8
    change = lr / (1 - 0.9 ** t) * first / scale
    return change, first, second


GROUP = 16                              # pairs of probes whose signs are drawn together


def spsa_gradient(model, centre, labels, index, pairs, *key):
    """Estimate the gradient of the margin m at the image x, `centre`; shaped as centre.

    The estimate is the mean of (m(x + delta v) - m(x - delta v)) / (2 delta) v over `pairs` tensors
    v of random signs. One random number has 24 bits and serves a group of 16 v: bit j gives the
    sign of its entry in v number j.
    """
    delta = 0.01
    grad = torch.zeros_like(centre).flatten(1)                              # (b, D)
    for group in range(math.ceil(pairs / GROUP)):
        n = min(GROUP, pairs - GROUP * group)                               # pairs in this group
        bit = torch.arange(n, device=centre.device, dtype=torch.int32)[:, None]
        all_bits = (uniform(index, grad.shape[1], *key, group) * 2 ** 24).int()     # (b, D)
        bits = (all_bits[:, None] >> bit) & 1                               # (b, n, D)
        signs = 2 * bits.to(centre.dtype) - 1
        step = delta * signs.unflatten(2, centre.shape[1:])                 # (b, n, 3, H, W)
        probes = torch.stack([centre[:, None] + step, centre[:, None] - step], 1)
        logits = at_least_float32(model(probes.flatten(0, 2)))               # (b * 2 * n, classes)
        margins = margin(logits, labels.repeat_interleave(2 * n))
        plus, minus = margins.view(-1, 2, n).unbind(1)                      # (b, n) each
        slopes = (plus - minus) / (2 * delta)
        grad += (slopes[:, None] @ signs)[:, 0]                             # (b, D)
    return grad.view_as(centre) / pairs


# The numbers in all probes of a chunk of images. They fit into a CPU's cache or a GPU's memory.
CPU_VALUES = 3 * 2 ** 17
GPU_VALUES = 2 ** 26


@torch.no_grad()
def spsa(model, images, labels, eps, *, steps=40, pairs=128, legacy=False, clip=True,
         seed=0, index=None):
    """Attack without gradients: Adam, lr 0.01, on the margin with an estimated gradient.

    The start is x + U(-eps, eps), where x is the clean image. The gradient is estimated at the
    current image. legacy=True estimates it at 2x in every step, as cleverhans 4.0.0 does. An image
    is finished as soon as its iterate is misclassified; it costs up to 2 * pairs * steps = 10,240
    forward passes.
    Uesato et al. 2018; `cleverhans:spsa.py`.
    """
    fooled = margin(clean_logits(model, images, eps, clip), labels) < 0
    eps, index = per_image(images, eps, index)
    low, high = bounds(images, eps, clip)
    x = (images + eps * noise_like(images, index, seed, START)).clamp(low, high)
    # s: the state of the unfinished images; row i belongs to image s.row[i].
    s = SimpleNamespace(row=torch.arange(len(x), device=x.device),
                        labels=labels, index=index, x=x, low=low, high=high,
                        first=torch.zeros_like(x), second=torch.zeros_like(x))  # Adam's moments

    values = CPU_VALUES if x.device.type == "cpu" else GPU_VALUES
    probes = 2 * GROUP                                                  # per image: v and -v
    chunk = max(1, values // x[0].numel() // probes)                    # images
    adv = images.clone()
    for t in range(1, steps + 1):
        s = select_rows(s, ~fooled)
        if not len(s.row):
            break
        around = 2 * images[s.row] if legacy else s.x
        grads = []
        chunks = zip(around.split(chunk), s.labels.split(chunk), s.index.split(chunk))
        for centre, y, i in chunks:
            grads.append(spsa_gradient(model, centre, y, i, pairs, seed, SIGNS, t))
        change, s.first, s.second = adam(torch.cat(grads), s.first, s.second, t, 0.01)
        s.x = (s.x - change).clamp(s.low, s.high)
        adv[s.row] = s.x
        fooled = margin(at_least_float32(model(s.x)), s.labels) < 0
    return adv


# --- L1 and L2 -----------------------------------------------------------------------------------

def project_l1(x, radius):
    """Return the nearest points with ||x||_1 <= radius (Duchi et al. 2008). x: (B, n)."""
    # Column j - 1 of size is the j-th largest |x|. Column j - 1 of excess is the sum of the j
    # largest, minus the radius. rho is the last j with size_j > excess_j / j.
    size = x.abs().sort(1, descending=True).values
    excess = size.cumsum(1) - radius
    j = torch.arange(1, size.shape[1] + 1, device=x.device)
    rho = (j * size > excess).sum(1, keepdim=True).clamp(min=1)
    theta = (excess.gather(1, rho - 1) / rho).clamp(min=0)          # 0: x is already inside
    return soft_threshold(x, theta)


@torch.no_grad()
def sld(model, images, labels, eps, *, steps=20, rescale=False, clip=True, seed=0,
        index=None):
    """Sparse L1 descent: each step spends eps/10 on the 1 % of entries with the largest |grad CE|.

    eps: the bound of ||x_adv - x||_1. At 224 px, eps=10 is a mean change of 1/15000 per entry, so
    try 10, 50 and 100. Fewer than 10 steps cannot spend the whole budget. rescale: True scales
    x_adv - x down to the L1 ball, as cleverhans does; False projects it.
    Tramer & Boneh 2019; `cleverhans:sparse_l1_descent.py`.
    """
    clean_logits(model, images, clip=clip)                      # only for its checks
    l1 = torch.as_tensor(eps, dtype=images.dtype, device=images.device).view(-1, 1)
    wrong = ~((l1 >= 0) & (l1 < math.inf))                      # also true for nan
    if wrong.any():
        raise InputError(f"eps={l1[wrong][0]:g}, expected an L1 budget of 0 or more, for example "
                         f"10")
    size = images[0].numel()
    # Like cleverhans, take the int(0.99 size)-th smallest entry and all larger ones, about 1 %.
    num_largest = size - max(int(0.99 * size), 1) + 1
    adv = images
    for _ in range(steps):
        _, _, grad = input_gradient(cross_entropy, model, adv, labels)
        grad = grad.flatten(1)
        least = grad.abs().topk(num_largest).values[:, -1:]
        largest = grad.abs() >= least
        step = (l1 / 10) * grad.sign() * largest
        step = step / largest.sum(1, keepdim=True)              # all of them share eps/10 equally
        move = (adv - images).flatten(1) + step
        if rescale:
            length = move.abs().sum(1, keepdim=True)
            move = move * (l1 / length.clamp(min=1e-12)).clamp(max=1)
        else:
            move = project_l1(move, l1)
        adv = images + move.view_as(images)
        if clip:
            adv = adv.clamp(0, 1)
    # Rounding can move adv out of the L1 ball, so make each change smaller by 2^-22.
    change = soft_threshold(adv - images, 2.0 ** -22)
    return images + change


def cw_round(model, images, labels, c, confidence, steps, lr):
    """Minimise ||x' - x||^2 + c max(margin + confidence, 0) by Adam, with x' = (tanh(w) + 1) / 2.

    c: (B,), as in `cw`. Returns the nearest successful iterates and their squared distances (B,),
    inf if no iterate succeeded. An image is finished when its loss falls by less than 2 % within a
    tenth of the steps. The authors' code stops when the loss of the whole batch falls by less than
    0.01 %. That takes three times as long, and its images are 1 % nearer.
    """
    far = torch.full_like(c, math.inf)
    found = images.clone()
    distance = far.clone()
    w = torch.atanh(0.999999 * (2 * images - 1))
    s = SimpleNamespace(row=torch.arange(len(w), device=w.device),
                        x=images, labels=labels, c=c, w=w,
                        first=torch.zeros_like(w), second=torch.zeros_like(w),  # Adam's moments
                        near=images, distance=far, last_loss=far)

    def weighted_hinge(logits, labels, weight):
        return weight * (margin(logits, labels) + confidence).clamp(min=0)

    for t in range(1, steps + 1):
        adv = (s.w.tanh() + 1) / 2
        loss = partial(weighted_hinge, weight=s.c)          # s.c: of the unfinished images
        logits, hinge, grad = input_gradient(loss, model, adv, s.labels)
        l2 = (adv - s.x).square().flatten(1).sum(1)
        better = (margin(logits, s.labels) + confidence < 0) & (l2 < s.distance)
        s.near = torch.where(column(better), adv, s.near)
        s.distance = torch.where(better, l2, s.distance)
        grad = (grad + 2 * (adv - s.x)) * 2 * adv * (1 - adv)               # dx'/dw = 2 x' (1 - x')
        change, s.first, s.second = adam(grad, s.first, s.second, t, lr)
        s.w = s.w - change
        if t % max(steps // 10, 1) == 0 or t == steps:
            found[s.row], distance[s.row] = s.near, s.distance
            falling = hinge + l2 <= 0.98 * s.last_loss
            s.last_loss = hinge + l2
            s = select_rows(s, falling)
            if not len(s.row):
                break
    return found, distance


@torch.no_grad()
def cw(model, images, labels, eps=None, *, confidence=0.0, steps=1000, lr=5e-3,
       search_steps=5, c0=1e-2, clip=True, seed=0, index=None):
    """Carlini & Wagner's L2 attack: find the nearest images with a margin below -confidence.

    The attack has no budget, so report distances instead of an accuracy. c weighs misclassification
    against distance: it starts at c0, grows tenfold until a round succeeds, then bisection refines
    it, per image. clip=True: pixels outside [0, 1] are an error. clip=False: the attack clamps them
    to [0, 1] first, as cleverhans does. The result lies in [0, 1] for both.
    Carlini & Wagner 2017, `carlini/nn_robust_attacks:l2_attack.py`.
    """
    adv = images.clone() if clip else images.clamp(0, 1)
    margins = margin(clean_logits(model, adv), labels)
    rows = (margins + confidence >= 0).nonzero()[:, 0]                  # unfooled images
    if not len(rows):
        return adv

    unfooled = adv[rows]
    unfooled_labels = labels[rows]
    distance = torch.full_like(margins[rows], math.inf)                 # inf: no success yet
    lower = torch.zeros_like(distance)
    upper = torch.full_like(distance, math.inf)                         # inf: no success yet
    c = torch.full_like(distance, c0)
    for _ in range(search_steps):
        tried, new_distance = cw_round(model, unfooled, unfooled_labels, c, confidence, steps, lr)
        success = new_distance < math.inf
        nearer = new_distance < distance
        adv[rows[nearer]] = tried[nearer]
        distance = torch.minimum(new_distance, distance)
        upper = torch.where(success, c, upper)
        lower = torch.where(success, lower, c)
        c = torch.where(upper < math.inf, (lower + upper) / 2, 10 * c)
    return adv
