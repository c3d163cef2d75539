"""Compare attacks with torchattacks, and with known results on linear models."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import InputError, print_once
from data import words
from data.shapes import load_shapes
from data.words import word_swap
from golden_net import trained_network
from robust import adaptive, attacks
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd
from robust.attacks import clean_logits, cw, fgsm, margin, noise, pgd, restarted, sld, spsa
from robust.autoattack import apgd, apgd_t, autoattack, fab_t, square
from vit import ViT, ViTConfig

EPS = 4 / 255                                # half of trained_network's images survive attacks
CASCADE = {"apgd-ce": partial(apgd, steps=8), "apgd-dlr": partial(apgd, loss="dlr", steps=8),
           "apgd-t": partial(apgd_t, steps=8, num_targets=2),
           "fab-t": partial(fab_t, steps=8, num_targets=2), "square": partial(square, queries=40),
           "aa": partial(autoattack, steps=8, num_targets=2, queries=40)}       # a few seconds
LINF = {"fgsm": fgsm, "pgd": pgd, "pgd_norand": partial(pgd, random_start=False),
        "pgd_restarted": partial(restarted, restarts=2, steps=5), "noise": noise,
        "spsa": partial(spsa, steps=4, pairs=10), "adaptive_pgd": partial(adaptive_pgd, steps=5)}
BOUNDED = {**LINF, **CASCADE, "sld": sld}
ATTACKS = {**BOUNDED, "cw": lambda model, x, y, eps: cw(model, x, y, steps=30, search_steps=3,
                                                        lr=0.01)}
RANDOM = {*LINF, *CASCADE} - {"fgsm", "pgd_norand", "fab-t"}
every = pytest.mark.parametrize("name", ATTACKS)


def right(model, adv, labels):
    """Return which images the model classifies correctly, (B,) bool."""
    with torch.no_grad():
        return model(adv).argmax(1) == labels


def share(flags):
    return flags.float().mean().item()


def norm(v, p):
    return torch.linalg.vector_norm(v.double().flatten(1), p, 1)


@pytest.fixture(scope="module")
def net():
    return trained_network()


class Linear(torch.nn.Module):
    """A linear model in float64: logits = W x."""

    def __init__(self, classes=2):
        super().__init__()
        self.W = torch.randn(classes, 48, dtype=torch.float64,
                             generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return x.flatten(1) @ self.W.T


def linear_case(n=20, classes=2):
    """Return a linear model, images in [0.3, 0.7], its predictions, and w_y - w_other (n, 48)."""
    model = Linear(classes).eval()
    images = 0.3 + 0.4 * torch.rand(n, 3, 4, 4, dtype=torch.float64,
                                    generator=torch.Generator().manual_seed(1))
    labels = model(images).argmax(1)
    return model, images, labels, (model.W[labels] - model.W[1 - labels])


# --- the results --------------------------------------------------------------------------------

def test_fgsm_and_pgd_equal_torchattacks(net):
    torchattacks = pytest.importorskip("torchattacks")
    model, images, labels = net[0], net[1][:100], net[2][:100]
    theirs = torchattacks.FGSM(model, EPS)(images, labels)
    far = (fgsm(model, images, labels, EPS) - theirs).abs() > 1e-5
    assert share(far) < 0.002  # rounding decides the sign of a zero gradient
    torch.manual_seed(0)
    for start in (False, True):
        theirs = torchattacks.PGD(model, EPS, 0.7 / 255, 10, random_start=start)(images, labels)
        ours = pgd(model, images, labels, EPS, alpha=0.7 / 255, steps=10, random_start=start)
        assert start or share((ours - theirs).abs() < 1e-5) > 0.995
        assert abs(share(right(model, ours, labels)) - share(right(model, theirs, labels))) <= 0.02


def test_attacks_of_a_linear_model_have_known_results():
    """Margins fall by eps |w|_1; CW finds the nearest point; SLD takes 2 of 48 entries."""
    model, images, labels, w = linear_case()
    before = margin(model(images), labels)
    for attack in (fgsm, pgd, partial(pgd, random_start=False)):
        fall = before - margin(model(attack(model, images, labels, 0.05)), labels)
        torch.testing.assert_close(fall, 0.05 * w.abs().sum(1), atol=1e-9, rtol=0)
    adv = cw(model, images, labels, confidence=0.3, steps=200, lr=0.01, search_steps=9)
    assert (margin(model(adv), labels) < -0.3).all()
    far = norm(adv - images, 2) / ((before + 0.3) / w.norm(dim=1))
    assert (far > 0.9999).all() and (far < 1.02).all()
    moved = sld(model, images, labels, 0.2) - images
    expected = torch.full((20,), 0.2, dtype=torch.float64)
    torch.testing.assert_close(norm(moved, 1), expected, atol=1e-5, rtol=0)
    for steps in (1, 7, 10):                                # few steps spend the whole budget, too
        spent = norm(sld(model, images, labels, 0.2, steps=steps) - images, 1)
        torch.testing.assert_close(spent, expected, atol=1e-5, rtol=0)
    largest = w.abs() >= w.abs().topk(2).values[:, 1:]
    assert torch.equal((moved.flatten(1) != 0).nonzero(), largest.nonzero())


def test_spsa_gradient_estimates_the_gradient():
    model, images, labels, w = linear_case()
    index = torch.arange(20)

    def estimate(rows, seed=0):
        return attacks.spsa_gradient(model, images[rows], labels[rows], index[rows], 4096, seed,
                                     1).flatten(1)
    grad, two = estimate(slice(20)), slice(7, 9)
    assert (torch.cosine_similarity(grad, w) > 0.98).all() and ((grad - w).abs().mean() < 0.2)
    torch.testing.assert_close(estimate(two), grad[two])
    assert not torch.allclose(estimate(two), estimate(two, seed=1))


@pytest.mark.parametrize("name", BOUNDED)
def test_attacks_keep_their_budget(net, name):
    """eps may be one number, one number per channel, or one number per image."""
    model, (x, y), attack = net[0], (t[:8] for t in net[1:]), BOUNDED[name]
    before = x.clone()
    assert torch.equal(attack(model, x, y, 0.0), x)
    of_channels, of_images = torch.tensor([1.0, 0.5, 0.1]), torch.linspace(1, 0, 8)
    tensors = 6 * EPS * of_channels.view(3, 1, 1), 6 * EPS * of_images.view(-1, 1, 1, 1)
    for eps in (0.3, *(() if name == "sld" else tensors)):
        adv = attack(model, x, y, eps)
        assert adv.shape == x.shape and adv.dtype == x.dtype and not adv.requires_grad
        assert adv.min() >= 0 and adv.max() <= 1 and not torch.equal(adv, x)
        inside = norm(adv - x, 1) <= eps * (1 + 1e-6) if name == "sld" else (
            (adv - x).abs() <= eps + 1e-6)
        assert inside.all()
    assert torch.equal(x, before)


@every
def test_result_depends_on_seed_and_image_alone(net, name):
    """Other images of the batch and their order change nothing, except by rounding."""
    (model, x, y), attack = (net[0], net[1][:10], net[2][:10]), ATTACKS[name]
    adv = attack(model, x, y, EPS)
    assert torch.equal(attack(model, x, y, EPS), adv)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    parts = [attack(model, x[i], y[i], EPS, **(dict(index=i) if name in RANDOM else {}))
             for i in order.split(7)]
    far = (torch.cat(parts) - adv[order]).abs()
    near = (far.amax((1, 2, 3)) < 1e-4).sum()
    assert near >= 9 if name in CASCADE else share(far < 1e-4) > 0.999
    assert name not in RANDOM or not torch.equal(attack(model, x, y, EPS, seed=1), adv)


def test_noise_is_uniform(net):
    grey = 0.25 + net[1] / 2                                # far from 0 and 1
    u = noise(net[0], grey, net[2], 0.1) - grey
    assert u.abs().max() <= 0.1 + 1e-6 and abs(u.mean()) < 5e-4
    assert abs(u.std() - 0.1 / math.sqrt(3)) < 5e-4


def test_restarts_keep_first_fooling_start(net):
    model, images, labels = net[0], net[1][:60], net[2][:60]
    often, eps = dict(steps=1, alpha=EPS / 2), 10 * EPS  # the random start decides
    once, thrice = (restarted(model, images, labels, eps, restarts=n, **often) for n in (1, 5))
    first, both = (right(model, adv, labels) for adv in (once, thrice))
    assert torch.equal(first, right(model, pgd(model, images, labels, eps, **often), labels))
    assert not (both & ~first).any() and both.sum() < first.sum()
    kept = ~first | both
    assert torch.equal(thrice[kept], once[kept]) and (thrice - images).abs().max() <= eps + 1e-6


def test_few_pgd_steps_can_cross_the_budget(net):
    model, images, labels = net[0], net[1][:20], net[2][:20]
    one = pgd(model, images, labels, EPS, steps=1, random_start=False)
    assert torch.equal(one, fgsm(model, images, labels, EPS))
    for steps, part in ((5, 0.5), (16, 0.15625), (17, 0.15), (40, 0.15)):
        adv = pgd(model, images[:3], labels[:3], EPS, steps=steps, alpha=part * EPS)
        assert torch.equal(pgd(model, images[:3], labels[:3], EPS, steps=steps), adv)


def test_adam_changes_no_argument():
    grad, first, second = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    before = torch.stack([grad, first, second])
    change, *moments = attacks.adam(grad, first, second, 3, 0.1)
    assert torch.equal(torch.stack([grad, first, second]), before)
    expected = torch.lerp(first, grad, 0.1), torch.lerp(second, grad ** 2, 0.001)
    torch.testing.assert_close(tuple(moments), expected)
    mean, squared = expected[0] / (1 - 0.9 ** 3), expected[1] / (1 - 0.999 ** 3)
    torch.testing.assert_close(change, 0.1 * mean / (squared.sqrt() + 1e-8))


# --- adaptive attacks ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def vit():
    return with_large_keys("rpc", lambd=0.5)


def with_large_keys(attn, **pap):
    """Return a ViT with keys so large that S is not 0, images and its predictions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(ViTConfig(32, 8, 10, 16, 2, 2, attn=attn, rpc_layers=(0, 1), pap=pap)).eval()
        for p in model.requires_grad_(False).parameters():
            p.mul_(4).add_(0.1 * torch.randn_like(p))
    images = load_shapes("test", 20).images.float() / 255
    return model, images, model(images).argmax(1)


def surrogates(model, images):
    same_outputs, others = adaptive.find_surrogates(model, images)
    return same_outputs + others


def test_surrogates_share_weights_but_not_gradients(vit, net):
    model, images, labels = vit

    def gradient(source):
        return attacks.input_gradient(attacks.cross_entropy, source, images, labels)[2]
    true, sources = gradient(model), surrogates(model, images)
    for one, other in itertools.combinations([true, *map(gradient, sources)], 2):
        assert (one - other).norm() > 0.01 * true.norm()
    assert all(torch.equal(source(images), model(images)) for source in sources[:3])
    assert torch.equal(gradient(model), true)                      # the model itself is untouched
    # the last two: PAP with lambda infinite (S = 0), and with two of the four steps
    for source, pap in zip(sources[3:], (dict(lambd=math.inf), dict(n_iter=2))):
        twin = ViT(dataclasses.replace(model.config, pap={**model.config.pap, **pap})).eval()
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(images), source(images))
    assert surrogates(net[0], images) == []


def test_adaptive_attacks_see_into_plain_functions_and_forwards(vit, net):
    model, images, labels = vit[0], vit[1][:6], vit[2][:6]
    few, hidden = dict(steps=2), [model]
    for attack in (adaptive_pgd, adaptive_apgd):
        adv = attack(model, images, labels, EPS, **few)
        assert torch.equal(attack(lambda x: hidden[0](x), images, labels, EPS, **few), adv)
    plain = pgd(net[0].forward, images, labels, EPS, **few)          # runs no module
    assert torch.equal(adaptive_pgd(net[0].forward, images, labels, EPS, **few), plain)
    outer = torch.nn.Sequential(model)
    outer.forward = lambda x: model.forward(x)                       # no hook of `model` is called
    assert adaptive.pap_steps(outer, images) == 4


class HiddenGradient(torch.nn.Module):
    """Pass x on without its gradient, unless a setting asks for it."""
    attn = "hidden"

    def __init__(self):
        super().__init__()
        self.pap = {}

    def forward(self, x):
        if "trace" in self.pap:
            self.pap["trace"].append({})
        if self.pap.get("open"):
            return x
        return x.detach() + 0 * x


@pytest.fixture
def of_hidden(monkeypatch):
    monkeypatch.setitem(adaptive.SURROGATES, "hidden", lambda steps: ([dict(open=True)], []))


def test_adaptive_attacks_follow_entries_of_surrogates(net, of_hidden):
    model, images, labels = net[0], net[1][:40], net[2][:40]
    hidden = torch.nn.Sequential(HiddenGradient(), model).eval()
    for plain, attack in ((pgd, adaptive_pgd), (apgd, adaptive_apgd)):
        blind = right(hidden, plain(hidden, images, labels, EPS, steps=10), labels)
        seeing = right(model, plain(model, images, labels, EPS, steps=10), labels)
        left = right(hidden, attack(hidden, images, labels, EPS, steps=10), labels)
        assert torch.equal(left, blind & seeing) and left.sum() < blind.sum() - 5


def test_layers_of_two_kinds_have_surrogates_each(vit, of_hidden):
    both = torch.nn.Sequential(HiddenGradient(), vit[0]).eval()
    assert len(surrogates(both, vit[1][:2])) == 1 + 5


def test_smooth_threshold_has_slope_of_softplus():
    x, tau = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True), torch.tensor(1.0)
    y = adaptive.smooth_shrink(x, tau)
    assert torch.equal(y, adaptive.soft_threshold(x, tau))
    expected = torch.sigmoid(4 * (x - 1)) + torch.sigmoid(4 * (-x - 1))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected.detach())
    for tau in (0.0, math.inf):
        y = adaptive.smooth_shrink(x, torch.tensor(tau, dtype=torch.float64))
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_adaptive_attacks_break_more_than_apgd(vit, net):
    model, (images, labels) = vit[0], (t[:12] for t in vit[1:])
    eps, few = 0.75 / 255, dict(steps=4, num_targets=1, queries=5)
    for plain, attack, options in ((pgd, adaptive_pgd, dict(steps=10)),
                                   (apgd, adaptive_apgd, dict(steps=5)),
                                   (autoattack, adaptive_autoattack, few)):
        before = right(model, plain(model, images, labels, eps, **options), labels)
        adv = attack(model, images, labels, eps, **options)
        after = right(model, adv, labels)
        assert not (after & ~before).any() and (adv - images).abs().max() <= eps + 1e-6
        assert after.sum() < before.sum()
    images, labels = (t[:20] for t in net[1:])            # no RPC-Attention: the plain attacks
    for both in (pgd, adaptive_pgd), (apgd, adaptive_apgd):
        assert torch.equal(*(attack(net[0], images, labels, EPS, steps=10) for attack in both))


# --- checks -------------------------------------------------------------------------------------

class NoFloat64(TorchDispatchMode):
    """Raise an error where PyTorch makes a float64 tensor, as a Mac's GPU does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        if any(torch.is_tensor(leaf) and leaf.dtype == torch.float64 for leaf in leaves):
            raise TypeError(f"{function} made a float64 tensor")
        return result


@every
def test_attacks_use_no_float64_and_take_half_precision(net, vit, name):
    (x, y), attack = (t[:3] for t in net[1:]), ATTACKS[name]
    with NoFloat64():
        attack(net[0], x, y, EPS)
        if "adaptive" in name:
            attack(vit[0], vit[1][:3], vit[2][:3], EPS)
    with pytest.raises(TypeError), NoFloat64():
        x.double()
    if name in ("pgd", "spsa", "aa", "cw"):
        adv = attack(lambda x: net[0](x).half(), x, y, EPS)
        assert adv.dtype == torch.float32 and adv.isfinite().all()


GREY = torch.full((4, 3, 4, 4), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("change, message", [
    (dict(images=GREY * math.nan), "values from nan"), (dict(eps=math.nan), "pixel units"),
    (dict(model=torch.nn.Sequential().eval().append(Linear())), "train mode"),
    (dict(eps=8), "was it meant as 8/255"), (dict(images=2 * GREY + 2e-6), "expected 0 to 1"),
    (dict(eps=torch.tensor([0.1, -0.1, 0.1, 0.1])), "eps=-0.1, expected 0 to 1"),
    (dict(model=lambda x: x.flatten(1)[:, :2] * math.nan), "not finite")])
def test_false_robustness_is_an_error(change, message):
    case = dict(model=Linear().eval(), images=GREY, eps=0.1)
    clean_logits(**case)
    with pytest.raises(ValueError, match=message):
        clean_logits(**case | change)


def test_rounded_pixels_and_wrong_budgets(net):
    attacks.check_inputs(Linear().eval(), 2 * GREY + 5e-7)
    model, images = net[0], net[1][:2]
    assert torch.equal(sld(model, images, net[2][:2], 0, steps=2), images)
    for eps in (-5, math.nan, math.inf, torch.tensor([10.0, -5.0])):
        with pytest.raises(InputError, match="expected an L1 budget of 0 or more"):
            sld(model, images, net[2][:2], eps, steps=2)


def batch_statistics(model):
    """Return the model behind a BatchNorm in train mode, which is in a list, not a submodule."""
    hidden = [torch.nn.BatchNorm2d(3, track_running_stats=False)]
    return lambda x: model(hidden[0](x))


def adapting(model, seen=()):
    """Return a model that follows the mean of all images that it has seen."""
    seen = [torch.zeros(())]
    return lambda x: seen.append(0.9 * seen[-1] + 0.1 * x.mean()) or model(x - seen[-1])


def rounding(model):                                            # bf16 would round less
    def coarse(x):
        factors = torch.rand(10, generator=torch.Generator().manual_seed(len(x)))
        return (model(x) * (1 + 0.02 * factors)).bfloat16().float()
    return coarse


@pytest.mark.parametrize("wrap, message", [
    (batch_statistics, "BatchNorm"), (lambda model: lambda x: model(x - x.mean()), "other images")])
def test_logits_must_depend_on_one_image(net, wrap, message):
    with pytest.raises(InputError, match=message):
        attacks.check_network(wrap(net[0]), net[1][:2])


@pytest.mark.parametrize("wrap, note", [
    (lambda model: model, ""), (rounding, ""), (adapting, "adapts"),
    (lambda model: lambda x: model(torch.nn.functional.dropout(x, 0.1)), "dropout"),
    (lambda model: lambda x: model(x) + 0.05 * torch.randn(10), "draws random numbers"),
    (lambda model: lambda x: model(x).sigmoid(), "numbers from 0 to 1")])
def test_a_guess_is_a_line(net, wrap, note, capsys):
    print_once.cache_clear()
    for _ in range(2):
        attacks.check_network(wrap(net[0]), net[1][:2], "mine")
    out = capsys.readouterr().out
    assert note in out and out.count("note: ") == bool(note)


@pytest.mark.parametrize("name", ["fgsm", "pgd", "sld", "cw", "apgd-ce"])
def test_an_attack_that_cannot_work_says_so(net, name, capsys):
    """The gradient of a rounded or saturated network is 0."""
    attack, (x, y) = ATTACKS[name], (t[:8] for t in net[1:])
    y = net[0](x).argmax(1)
    for wrap, printed in ((lambda x: net[0](x), 0), (lambda x: net[0]((9 * x).round() / 9), 1),
                          (lambda x: net[0](x) + x.mean() * 0, 0)):
        print_once.cache_clear()
        attack(wrap, x, y, EPS)
        assert capsys.readouterr().out.count("gradient is exactly 0 for more than half") == printed
    saturated = partial(pgd, steps=2), lambda x: 1e6 * net[0](x)
    saturated[0](saturated[1], x, y, EPS)
    assert "gradient is exactly 0" in capsys.readouterr().out


def test_a_short_cw_fools_as_a_long_one(net, capsys):
    """One --steps sets the steps of all attacks."""
    model, (x, y) = net[0], (t[:40] for t in net[1:])
    left = [right(model, cw(model, x, y, steps=steps), y).sum() for steps in (7, 40)]
    assert left[0] <= left[1] + 4 < 10 and capsys.readouterr().out.count("7 steps of cw") == 1


@every
def test_attacks_reject_train_mode_and_large_pixels(name):
    _, images, labels, _ = linear_case(4, classes=5)
    attack, batch_norm = ATTACKS[name], torch.nn.BatchNorm2d(3).double()
    model = torch.nn.Sequential(batch_norm, Linear(5))
    with pytest.raises(ValueError, match="train mode: call model.eval()"):
        attack(model, images, labels, EPS)
    assert batch_norm.num_batches_tracked == 0 and not batch_norm.running_mean.any()
    with pytest.raises(ValueError, match="expected 0 to 1"):
        attack(model.eval(), images * 255, labels, EPS)
    with_a_graph = images.requires_grad_() * 1
    assert not attack(model, with_a_graph, labels, EPS).requires_grad
    weight = batch_norm.weight
    assert weight.requires_grad and weight.grad is None and images.grad is None


def test_word_swap_takes_share_of_every_line(monkeypatch):
    lines = [" = A Heading = ", " ", " The quick brown fox , twice @-@ daily , in 1999 . ",
             " of the and ", " <unk> <unk> ", " " + "word " * 400]
    out, swapped = word_swap(lines)
    tokens, before = ([t for line in some for t in (*line.split(), "<eos>")]
                      for some in (out, lines))
    assert [t == "AAA" for t in tokens] == swapped
    assert all(swap or new == old for swap, new, old in zip(swapped, tokens, before, strict=True))
    assert [line.split().count("AAA") for line in out] == [1, 0, 1, 0, 0, 6]    # 0.015 * 400 = 6
    assert word_swap(lines) == (out, swapped) != word_swap(lines, seed=1)
    monkeypatch.setattr(words, "RATE", 1)
    assert word_swap([" 'the bears ' we ' eat 'fish' "])[0] == [" 'the AAA ' we ' AAA AAA "]
