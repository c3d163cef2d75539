"""Adversarial attacks on image classifiers, whole batches at a time, and the word swap for text.

Every image attack is `attack(model, images, labels, eps, ...) -> adversarial images`:
  model     any function from pixels to logits, (B, 3, H, W) float32 in [0, 1] -> (B, classes). A module in train mode
            is refused, not switched: call model.eval() first
  images    (B, 3, H, W) float32 in [0, 1], on the model's device; never changed
  labels    (B,) int64, what the attack leads away from: the true classes (or the model's own predictions)
  eps       budget in pixel units, 8/255 say: a number or a tensor that broadcasts to images
  clip      True: adversarial pixels stay in [0, 1]; False: they may leave it (the paper's harness)
  seed, index   random numbers depend on (seed, image number index[i]) alone, so results do not depend on the batch
Parameters and their .grad stay as they are; the result is detached. Parameters should be frozen (requires_grad False:
faster). Bad inputs raise ValueError. Teo & Nguyen 2024, sections 4.1 and A.2; each attack's source is in its docstring.

    adv = pgd(model, images, labels, 8 / 255)
    robust = model(adv).argmax(1) == labels                    # images the model got wrong anyway count as not robust
    transferred = other(adv).argmax(1) == labels               # the same images tried on another model
"""

import copy
import math

import torch
import torch.nn.functional as F

from attention import SelfAttention, soft_threshold
from data.augment import normal
from data.rng import uniform

START, SIGNS, NOISE = 40, 41, 42               # what a random number is for: in its key

# --- what all attacks share ------------------------------------------------------------------------------------------


def margin(logits, labels):
    """z_y - max_{j != y} z_j, (B,): negative where the model is fooled."""
    others = logits.scatter(1, labels[:, None], -math.inf)
    return logits.gather(1, labels[:, None])[:, 0] - others.amax(1)


def cross_entropy(logits, labels):
    """Per image, (B,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def input_gradient(loss, model, images, labels):
    """Gradient of sum_i loss_i in the images. Returns (logits (B, classes), loss (B,), gradient like images), detached.

    The sum, not the mean: results then do not depend on the batch size.
    """
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(images)
        losses = loss(logits, labels)
        grad, = torch.autograd.grad(losses.sum(), images)
    return logits.detach(), losses.detach(), grad


def project(adv, images, eps, clip=True):
    """Pi: into [images - eps, images + eps], then into [0, 1]."""
    adv = torch.minimum(torch.maximum(adv, images - eps), images + eps)
    return adv.clamp(0, 1) if clip else adv


def noise_like(images, index, *key):
    """Uniform numbers in [-1, 1), as images, from (key, image number) alone. index: (B,) int64 or None: 0, ..."""
    index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
    return (2 * uniform(index, images[0].numel(), *key) - 1).view_as(images)


def column(t):
    """(B,) -> (B, 1, 1, 1)."""
    return t[:, None, None, None]


def adam(grad, m, v, t, lr):
    """Step t = 1, 2, ... of Adam (Kingma & Ba 2015, defaults), to be subtracted; m, v: moments, updated in place."""
    m.lerp_(grad, 0.1)                                                               # m = 0.9 m + 0.1 g
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)                                  # v = 0.999 v + 0.001 g^2
    return lr / (1 - 0.9 ** t) * m / (v / (1 - 0.999 ** t)).sqrt_().add_(1e-8)


def positive(**options):
    """ValueError unless every option is a finite number > 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}, expected more than 0")


def check_inputs(model, images, labels, eps=0.0, clip=True, limit=1.0):
    """ValueError in one line unless what goes into an attack makes sense; no forward pass.

    clip=False allows images outside [0, 1], as normalised ones are, and eps above `limit`.
    """
    for name, value in (("images", images), ("labels", labels)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} are a {type(value).__name__}, expected a tensor")
    if isinstance(model, torch.nn.Module) and any(m.training for m in model.modules()):
        raise ValueError("the model is in train mode: call model.eval() before attacking it")
    B, eps = len(images), torch.as_tensor(eps, dtype=torch.float32, device=images.device)
    if not images.is_floating_point() or images.ndim != 4 or not B:
        raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, expected float in [0, 1], (B, 3, H, W)")
    if labels.dtype != torch.int64 or labels.shape != (B,):
        raise ValueError(f"labels are {labels.dtype} {tuple(labels.shape)}, expected int64 ({B},)")
    if eps.ndim > 4 or any(e not in (1, n) for e, n in zip(eps.shape[::-1], images.shape[::-1])):
        raise ValueError(f"eps has shape {tuple(eps.shape)}, expected a number or one that fits {tuple(images.shape)}")
    facts = (images.amin(), images.amax(), eps.amin(), eps.amax())
    low, high, least, most = torch.stack([t.detach().float() for t in facts]).tolist()
    if not (0 <= low and high <= 1 if clip else -math.inf < low and high < math.inf):
        raise ValueError(f"images have values from {low:g} to {high:g}, expected {'0 to 1' if clip else 'finite ones'}")
    if not 0 <= least <= most < math.inf:
        raise ValueError(f"eps={least if most < math.inf else most:g}, expected a number >= 0")
    if clip and most > limit:
        raise ValueError(f"eps is in pixel units, 8/255 say; got {most:g}: was it meant as {most:g}/255?")


def check_logits(logits, labels):
    """ValueError in one line unless these are logits, (B, classes), and the labels are of their classes."""
    B = len(labels)
    if logits.ndim != 2 or len(logits) != B or logits.shape[1] < 2:
        raise ValueError(f"the model returns {tuple(logits.shape)} for {B} images, expected logits ({B}, 2 or more)")
    facts = (labels.amin(), labels.amax(), logits.isfinite().all(), logits.amin(), (logits.sum(1) - 1).abs().amax())
    first, last, finite, lowest, off = torch.stack([t.detach().float() for t in facts]).tolist()
    if first < 0 or last >= logits.shape[1]:
        raise ValueError(f"labels from {first:g} to {last:g}, expected 0 to {logits.shape[1] - 1}, the model's classes")
    if not finite:
        raise ValueError("the model returns logits that are not finite")
    if lowest >= 0 and off < 1e-4:
        raise ValueError("the model returns probabilities (rows sum to 1), expected logits, from before the softmax")


@torch.no_grad()
def check(model, images, labels, eps=0.0, clip=True, limit=1.0, batch_size=None):
    """Both checks; returns the clean logits, (B, classes), from one forward pass."""
    check_inputs(model, images, labels, eps, clip, limit)
    logits = forward(model, images, batch_size)
    check_logits(logits, labels)
    return logits


def forward(model, images, batch_size=None):
    """model(images), at most batch_size images at a time."""
    if batch_size is None or len(images) <= batch_size:
        return model(images)
    return torch.cat([model(part) for part in images.split(batch_size)])


class Normalized(torch.nn.Module):
    """A ViT on normalised tensors, z = (x - mean) / std: the space the paper's code attacks in."""

    def __init__(self, model):
        super().__init__()
        self.model, self.mean, self.std = model, model.mean, model.std
        self.training = model.training

    def forward(self, z):
        return self.model(z * self.std + self.mean)


# --- L-infinity, with gradients --------------------------------------------------------------------------------------

@torch.no_grad()
def fgsm(model, images, labels, eps, *, keep_wrong=False, clip=True):
    """Fast gradient sign method: x + eps sign(grad CE), one step. sign(0) = 0. One forward pass, one backward.

    keep_wrong: images that the model gets wrong without an attack stay as they are.
    Goodfellow et al. 2015; `cleverhans-lab/cleverhans:cleverhans/torch/attacks/fast_gradient_method.py`.
    """
    def loss(logits, labels):
        check_logits(logits, labels)
        return cross_entropy(logits, labels)

    check_inputs(model, images, labels, eps, clip)
    logits, _, grad = input_gradient(loss, model, images, labels)
    adv = project(images + eps * grad.sign(), images, eps, clip)
    attacked = (logits.argmax(1) == labels) | (not keep_wrong)
    return torch.where(column(attacked), adv, images)


@torch.no_grad()
def pgd(model, images, labels, eps, *, steps=20, alpha=0.15, random_start=True, best=False, clip=True, seed=0,
        index=None):
    """Projected gradient descent: x <- Pi(x + alpha eps sign(grad CE)), `steps` times. alpha: step as a share of eps.

    random_start: from x + U(-eps, eps). Returns the last iterate; best: the first misclassified one, if there is one.
    Madry et al. 2018; `cleverhans-lab/cleverhans:cleverhans/torch/attacks/projected_gradient_descent.py`.
    """
    positive(steps=steps, alpha=alpha)
    check(model, images, labels, eps, clip)
    adv = images
    if random_start:
        adv = project(images + eps * noise_like(images, index, seed, START), images, eps, clip)
    for _ in range(steps):
        logits, _, grad = input_gradient(cross_entropy, model, adv, labels)
        moved = project(adv + alpha * eps * grad.sign(), images, eps, clip)
        adv = torch.where((margin(logits, labels) < 0).view(-1, 1, 1, 1), adv, moved) if best else moved
    return adv


def straight_through(model, slope=1.0):
    """Copy of a model whose RPC-Attention has the same values but gradient `slope` through the soft threshold.

    For gradients that thresholding hides (Athalye et al. 2018): the true slope is 1 where S is not 0, else 0. slope=1:
    the identity everywhere; slope=0: S is a constant, so K - S passes on all of K's gradient, also where it is clamped.
    """
    def shrink(x, tau):
        return soft_threshold(x, tau).detach() + slope * (x - x.detach())

    return rewired(model, shrink=shrink)


def rewired(model, **settings):
    """Copy of a model, on the same weights, whose RPC-Attention has other settings."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    for m in model.modules():
        if isinstance(m, SelfAttention):
            m.rpc.update(settings)
    return model


def smooth_shrink(x, tau):
    """soft_threshold with the gradient of a softplus, which is nowhere exactly 0."""
    width = (tau / 4).clamp(1e-12, 1e12)
    smooth = width * (F.softplus((x - tau) / width) - F.softplus((-x - tau) / width))
    return soft_threshold(x, tau).detach() + (smooth - smooth.detach())


def rpc_layers(model):
    """The layers with RPC-Attention."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, expected an nn.Module: adaptive attacks look for "
                         "RPC-Attention in it")
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    return [m for m in layers if m.attn in ("rpc", "rpc_asym")]


def gradient_models(model):
    """Models whose gradients may lead where RPC-Attention hides its own: `surrogates` for `apgd` and `autoattack`.

    On the model's weights: two straight-through ones, one whose threshold is smooth, one that never
    shrinks, one that stops after half the steps. None for a model without RPC-Attention.
    """
    layers = rpc_layers(model)
    if not layers:
        return []
    half = max(layers[0].rpc["n_iter"] // 2, 1)
    return [straight_through(model, 1.0), straight_through(model, 0.0),
            rewired(model, shrink=smooth_shrink),
            rewired(model, lambd=math.inf),
            rewired(model, n_iter=half)]


@torch.no_grad()
def adaptive_pgd(model, images, labels, eps, *, index=None, **options):
    """PGD against RPC-Attention: through the true gradient, then, where that fails, both straight-through ones.

    Returns per image what fools the model or, where nothing does, leaves the smallest margin. model: an nn.Module; one
    without RPC-Attention gets plain PGD. options: as for `pgd`.
    """
    layers = rpc_layers(model)
    adv = pgd(model, images, labels, eps, index=index, **options)
    if not layers:
        return adv
    index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
    eps = torch.as_tensor(eps, dtype=images.dtype, device=images.device).expand_as(images)
    left = margin(model(adv), labels)
    for slope in (1.0, 0.0):
        rows = (left >= 0).nonzero()[:, 0]
        if not len(rows):
            break
        tried = pgd(straight_through(model, slope), images[rows], labels[rows], eps[rows], index=index[rows], **options)
        m = margin(model(tried), labels[rows])
        rows, tried, m = (t[m < left[rows]] for t in (rows, tried, m))
        adv[rows], left[rows] = tried, m
    return adv


@torch.no_grad()
def zero_gradient_share(model, images, labels):
    """Share of the entries of grad CE that are exactly 0, and of the images where all are. Two floats in [0, 1].

    Large shares mean that attacks by gradient are blind here, and that the robustness they report is not real.
    """
    check(model, images, labels)
    _, _, grad = input_gradient(cross_entropy, model, images, labels)
    zero = (grad == 0).flatten(1).float()
    return zero.mean().item(), zero.amin(1).mean().item()


# --- L-infinity, without gradients -----------------------------------------------------------------------------------

def spsa_gradient(model, centre, labels, index, pairs, delta, *key):
    """Estimated gradient of the margin m at centre c: mean_r (m(c + delta v_r) - m(c - delta v_r)) / (2 delta) v_r.

    v_r: random signs, one per entry, r = 1 ... pairs; 16 of them are the bits of one random number.
    """
    grad = torch.zeros_like(centre).flatten(1)                                       # (b, D)
    for word in range(math.ceil(pairs / 16)):
        shifts = torch.arange(min(16, pairs - 16 * word), device=centre.device, dtype=torch.int32)
        bits = (uniform(index, grad.shape[1], *key, word) * 2 ** 24).int()           # (b, D), 24 random bits each
        v = (bits[:, None] >> shifts[:, None] & 1).to(centre.dtype).mul_(2).sub_(1)  # (b, r, D)
        step = delta * v.unflatten(2, centre.shape[1:])
        probes = torch.stack([centre[:, None] + step, centre[:, None] - step], 1)    # (b, 2, r, 3, H, W)
        m = margin(model(probes.flatten(0, 2)), labels.repeat_interleave(2 * len(shifts))).view(-1, 2, len(shifts))
        grad += (((m[:, :1] - m[:, 1:]) / (2 * delta)) @ v)[:, 0]                    # (b, 1, r) @ (b, r, D)
    return grad.view_as(centre) / pairs


@torch.no_grad()
def spsa(model, images, labels, eps, *, steps=40, pairs=128, lr=0.01, delta=0.01, centre="iterate", clip=True, seed=0,
         index=None, chunk=None):
    """Gradient-free: Adam on the margin, its gradient estimated from 2 `pairs` forward passes at random points nearby.

    From x + U(-eps, eps). centre: where the probes lie; "legacy": around 2x in every step, what cleverhans 4.0.0 does.
    Up to 2 pairs steps = 10,240 forward passes per image, so an image leaves as soon as its iterate is misclassified,
    and that one is returned; wrong ones are not attacked. chunk: probes per forward pass (at least 32).
    Uesato et al. 2018; `cleverhans-lab/cleverhans:cleverhans/torch/attacks/spsa.py`.
    """
    if centre not in ("iterate", "legacy"):
        raise ValueError(f"centre={centre!r}, expected 'iterate' or 'legacy'")
    positive(steps=steps, pairs=pairs, lr=lr, delta=delta)
    fooled = margin(check(model, images, labels, eps, clip), labels) < 0
    chunk = chunk or (3 * 2 ** 17 if images.device.type == "cpu" else 2 ** 26) // images[0].numel()    # fits the cache
    adv, rows = images.clone(), torch.arange(len(images), device=images.device)
    index = rows if index is None else index.to(images.device)
    low, high = (project(images + sign * eps, images, eps, clip) for sign in (-1, 1))
    x = (images + eps * noise_like(images, index, seed, START)).clamp(low, high)
    doubled, m, v = 2 * images, torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, steps + 1):
        state = (rows, index, labels, x, low, high, doubled, m, v)
        rows, index, labels, x, low, high, doubled, m, v = (s[~fooled] for s in state)
        if not len(rows):
            break
        parts = (s.split(max(1, chunk // 32)) for s in (x if centre == "iterate" else doubled, labels, index))
        grad = torch.cat([spsa_gradient(model, *part, pairs, delta, seed, SIGNS, t) for part in zip(*parts)])
        x = (x - adam(grad, m, v, t, lr)).clamp(low, high)
        adv[rows], fooled = x, margin(model(x), labels) < 0
    return adv


@torch.no_grad()
def noise(model, images, labels, scale, *, kind="uniform", best_of=1, draw=0, clip=True, seed=0, index=None):
    """x + U(-scale, scale) or, kind "gaussian", x + N(0, scale^2). best_of: per image the worst of so many draws.

    draw: another number, other noise.
    """
    if kind not in ("uniform", "gaussian"):
        raise ValueError(f"kind={kind!r}, expected 'uniform' or 'gaussian'")
    positive(best_of=best_of)
    check(model, images, labels, scale, clip)
    worst, lowest = images, torch.full(labels.shape, math.inf, dtype=images.dtype, device=images.device)
    for i in range(best_of):
        z = noise_like(images, index, seed, NOISE, draw * best_of + i)
        adv = images + scale * (z if kind == "uniform" else normal((z + 1) / 2))
        adv = adv.clamp(0, 1) if clip else adv
        m = margin(model(adv), labels)
        worst, lowest = torch.where((m < lowest).view(-1, 1, 1, 1), adv, worst), torch.minimum(m, lowest)
    return worst


# --- L1 and L2 -------------------------------------------------------------------------------------------------------

def project_l1(v, radius):
    """Nearest point with ||v||_1 <= radius, row by row (Duchi et al. 2008). v: (B, ...); radius: a number or (B,)."""
    u = v.flatten(1).abs().sort(1, descending=True).values
    excess = u.cumsum(1) - torch.as_tensor(radius, dtype=v.dtype, device=v.device).view(-1, 1)    # of the j largest
    j = torch.arange(1, u.shape[1] + 1, device=v.device)
    rho = (j * u > excess).sum(1, keepdim=True).clamp(min=1)                         # last j with u_j > excess_j / j
    theta = (excess.gather(1, rho - 1) / rho).clamp(min=0)                           # 0: inside already
    return soft_threshold(v, theta.view(-1, *[1] * (v.ndim - 1)))


@torch.no_grad()
def sld(model, images, labels, eps, *, steps=20, quantile=0.99, rescale=False, clip=True):
    """Sparse L1 descent: each step spends eps / 10 equally on the entries of grad CE above its quantile.

    eps: bound of ||x_adv - x||_1, summed over all pixels and channels; at 224 px, 10 is 1/15000 per entry. rescale:
    shrink to the L1 ball as cleverhans does instead of projecting. Tramer & Boneh 2019;
    `cleverhans-lab/cleverhans:cleverhans/torch/attacks/sparse_l1_descent.py`.
    """
    positive(steps=steps)
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile={quantile}, expected at least 0 and less than 1")
    check(model, images, labels, eps, clip, limit=math.inf)
    k = max(int(quantile * images[0].numel()), 1)
    eps = torch.as_tensor(eps, dtype=images.dtype, device=images.device).view(-1, 1)
    adv = images
    for _ in range(steps):
        grad = input_gradient(cross_entropy, model, adv, labels)[2].flatten(1)
        mask = grad.abs() >= grad.abs().kthvalue(k, keepdim=True).values             # about 1 % of the entries
        v = (adv - images).flatten(1) + eps / 10 * grad.sign() * mask / mask.sum(1, keepdim=True)
        v = v * (eps / v.abs().sum(1, keepdim=True).clamp(min=1e-12)).clamp(max=1) if rescale else project_l1(v, eps)
        adv = images + v.view_as(images)
        adv = adv.clamp(0, 1) if clip else adv
    return images + soft_threshold(adv - images, 2.0 ** -22)       # rounding must not carry the sum over the budget


def cw_round(model, images, labels, c, confidence, steps, lr):
    """Adam on ||x' - x||^2 + c max(margin + confidence, 0), x' = (tanh(w) + 1) / 2, from x' = x. c: (B,).

    Returns the nearest successful iterates and their squared distances (B,), inf where there is none. An image leaves
    when its loss fell by less than 2 % within a tenth of the steps; distances grow by less than 1 %, time is a third.
    (The authors stop the whole batch, at 0.01 %.)
    """
    found, distance = images.clone(), torch.full_like(c, math.inf)
    rows, w = torch.arange(len(images), device=c.device), torch.atanh(0.999999 * (2 * images - 1))
    near, d, before, m, v = images, distance, distance.clone(), torch.zeros_like(w), torch.zeros_like(w)

    def weighted_hinge(logits, labels):
        return c * (margin(logits, labels) + confidence).clamp(min=0)

    for t in range(1, steps + 1):
        adv = (w.tanh() + 1) / 2
        logits, hinge, grad = input_gradient(weighted_hinge, model, adv, labels)
        l2 = (adv - images).square().flatten(1).sum(1)
        better = (margin(logits, labels) + confidence < 0) & (l2 < d)
        near, d = torch.where(better.view(-1, 1, 1, 1), adv, near), torch.where(better, l2, d)
        w = w - adam((grad + 2 * (adv - images)) * 2 * adv * (1 - adv), m, v, t, lr)    # dx'/dw = 2 x' (1 - x')
        if t % max(steps // 10, 1) == 0 or t == steps:
            found[rows], distance[rows] = near, d
            state, go = (rows, images, labels, c, w, near, d, m, v, hinge + l2), hinge + l2 <= 0.98 * before
            rows, images, labels, c, w, near, d, m, v, before = (s[go] for s in state)
            if not len(rows):
                break
    return found, distance


@torch.no_grad()
def cw(model, images, labels, *, confidence=0.0, steps=1000, lr=5e-3, search_steps=5, c0=1e-2, clip=True):
    """Carlini & Wagner's L2 attack: the nearest images with a margin below -confidence. No budget: report distances.

    c, the weight of fooling the model, is searched per image from c0: ten times larger until a round succeeds, then
    halving the interval. Every round starts afresh. The result is in [0, 1] always; clip=False only accepts images that
    are not and clamps them first, as cleverhans does to normalised ones. Images never fooled stay as they are.
    Carlini & Wagner 2017, `carlini/nn_robust_attacks:l2_attack.py`; compared with
    `cleverhans-lab/cleverhans:cleverhans/torch/attacks/carlini_wagner_l2.py`, which carries w and Adam's state over.
    """
    positive(steps=steps, lr=lr, search_steps=search_steps, c0=c0)
    if not 0 <= confidence < math.inf:
        raise ValueError(f"confidence={confidence}, expected a number >= 0")
    check_inputs(model, images, labels, clip=clip)
    adv = images.clone() if clip else images.clamp(0, 1)
    left = margin(check(model, adv, labels), labels) + confidence
    rows = (left >= 0).nonzero()[:, 0]                                               # the others are there already
    images, labels, distance = adv[rows], labels[rows], torch.full_like(left[rows], math.inf)
    lower, upper, c = torch.zeros_like(distance), torch.full_like(distance, 1e10), torch.full_like(distance, c0)
    for _ in range(search_steps if len(rows) else 0):
        found, d = cw_round(model, images, labels, c, confidence, steps, lr)
        adv[rows[d < distance]], distance = found[d < distance], torch.minimum(d, distance)
        upper, lower = torch.where(d < math.inf, c, upper), torch.where(d < math.inf, lower, c)
        c = torch.where(upper < 1e9, (lower + upper) / 2, 10 * c)
    return adv
