"""Compare attacks with torchattacks, foolbox, recorded runs of the paper, and known results."""

import dataclasses
import itertools
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import every_pap
from common import InputError
from robust import adaptive, attacks
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd
from robust.attacks import (clean_logits, cw, fgsm, margin, noise, pgd, restarted, sld, spsa,
                            spsa_gradient)
from robust.autoattack import apgd, apgd_t, autoattack, fab_t, square
from data import words
from data.shapes import load_shapes
from data.words import word_swap
from fixtures import ROOT
from golden_net import trained_network
from vit import ViT, ViTConfig

EPS = 4 / 255                                # half of trained_network's images survive attacks
LINF = {"fgsm": fgsm, "pgd": pgd, "pgd_norand": partial(pgd, random_start=False),
        "pgd_restarted": partial(restarted, restarts=2, steps=5), "noise": noise,
        "spsa": partial(spsa, steps=4, pairs=10), "adaptive_pgd": partial(adaptive_pgd, steps=5)}
CASCADE = {"apgd-ce": partial(apgd, steps=8), "apgd-dlr": partial(apgd, loss="dlr", steps=8),
           "apgd-t": partial(apgd_t, steps=8, num_targets=2),
           "fab-t": partial(fab_t, steps=8, num_targets=2), "square": partial(square, queries=40),
           "aa": partial(autoattack, steps=8, num_targets=2, queries=40)}       # a few seconds
L1 = {"sld": sld, "sld_rescale": partial(sld, rescale=True)}
BOUNDED = {**LINF, **CASCADE, **L1}
ATTACKS = {**BOUNDED, "cw": lambda model, x, y, eps: cw(model, x, y, steps=30, search_steps=3,
                                                        lr=0.01)}
RANDOM = {"pgd", "pgd_restarted", "noise", "spsa", "adaptive_pgd",
          *CASCADE} - {"fab-t"}


def right(model, adv, labels):
    """Return which images the model classifies correctly, (B,) bool."""
    with torch.no_grad():
        return model(adv).argmax(1) == labels


def share(flags):
    return flags.float().mean().item()


def l1(v):
    return v.double().abs().flatten(1).sum(1)


def l2(v):
    return v.double().flatten(1).norm(dim=1)


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
    """Return a linear model, images in [0.3, 0.7], its predictions, and w_y - w_other.

    The last one, (n, 48), is the gradient of the margin between two classes.
    """
    model = Linear(classes).eval()
    images = 0.3 + 0.4 * torch.rand(n, 3, 4, 4, dtype=torch.float64,
                                    generator=torch.Generator().manual_seed(1))
    labels = model(images).argmax(1)
    return model, images, labels, (model.W[labels] - model.W[1 - labels])


def test_paper_harness_accuracy_equals_reference_run(golden, net):
    """The released code used cleverhans on normalised images. SPSA was recorded on pixels."""
    g, (net, images, labels) = golden("robustness_attacks_a"), net
    model, z = net.normalized, (images - net.mean) / net.std
    predicted = model(z).argmax(1)
    for i, eps in enumerate(g["eps"].tolist()):
        adv = fgsm(model, z, predicted, eps, clip=False)
        assert (right(model, adv, labels) == g[f"official_fgsm/{i}/robust"]).sum() >= 199
    adv = pgd(model, z, predicted, eps, clip=False)                     # the largest eps
    assert abs(share(right(model, adv, labels)) - g[f"official_pgd/{i}/acc"].mean()) <= 0.015
    adv = sld(model, z, predicted, 10.0, rescale=True, clip=False)
    assert (right(model, adv, labels) == g["official_sld/robust"]).sum() >= 196
    draws = [noise(model, z, predicted, 0.3, clip=False, seed=d) for d in range(5)]
    acc = share(right(model, torch.cat(draws), labels.repeat(5)))
    assert abs(acc - g["official_noise/acc"].mean()) <= 0.015
    clamped = share(right(model, z.clamp(0, 1), labels))
    assert abs(clamped - g["official_cw/clamp_only_acc"]) <= 0.005
    adv = cw(model, z[:10], predicted[:10], confidence=0.03, steps=100, search_steps=3, clip=False)
    assert (right(model, adv, labels[:10]) == g["official_cw/robust"][:10]).sum() >= 9
    adv = spsa(net, images[:4], labels[:4], eps, legacy=True, pairs=32)
    assert abs(right(net, adv, labels[:4]).sum() - g["spsa_cleverhans/2/robust"][:4].sum()) <= 1


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


def test_linear_margin_falls_by_eps_times_l1():
    model, images, labels, w = linear_case()
    before = margin(model(images), labels)
    for attack in (fgsm, pgd, partial(pgd, random_start=False)):
        fall = before - margin(model(attack(model, images, labels, 0.05)), labels)
        torch.testing.assert_close(fall, 0.05 * w.abs().sum(1), atol=1e-9, rtol=0)


def test_spsa_gradient_estimates_the_gradient():
    model, images, labels, w = linear_case()
    grad = spsa_gradient(model, images, labels, torch.arange(len(images)), 4096, 0, 1).flatten(1)
    assert (torch.cosine_similarity(grad, w) > 0.98).all() and ((grad - w).abs().mean() < 0.2)
    two = images[7:9], labels[7:9], torch.arange(7, 9), 4096
    again = spsa_gradient(model, *two, 0, 1).flatten(1)
    torch.testing.assert_close(again, grad[7:9])
    assert not torch.allclose(again, spsa_gradient(model, *two, 1, 1).flatten(1))


def test_cw_reaches_nearest_point_of_linear_model():
    model, images, labels, w = linear_case()
    adv = cw(model, images, labels, confidence=0.3, steps=200, lr=0.01, search_steps=9)
    nearest = (margin(model(images), labels) + 0.3) / w.norm(dim=1)
    assert (margin(model(adv), labels) < -0.3).all()
    far = l2(adv - images)
    assert (far > 0.9999 * nearest).all() and (far < 1.02 * nearest).all()


def test_sld_spends_budget_on_largest_weights():
    model, images, labels, w = linear_case()
    adv = sld(model, images, labels, 0.2)  # 2 of 48 entries
    moved = (adv - images).flatten(1)
    expected = torch.full((20,), 0.2, dtype=torch.float64)
    torch.testing.assert_close(l1(moved), expected, atol=1e-5, rtol=0)
    first = sld(model, images, labels, 0.2, steps=1) - images              # a tenth of the budget
    torch.testing.assert_close(l1(first), expected / 10, atol=1e-5, rtol=0)
    assert torch.equal((moved != 0).nonzero(), (w.abs() >= w.abs().topk(2).values[:, 1:]).nonzero())


@pytest.mark.parametrize("name", BOUNDED)
def test_attacks_keep_their_budget(net, name):
    """eps may be one number, one number per channel, or one number per image."""
    model, (x, y), attack = net[0], (t[:8] for t in net[1:]), BOUNDED[name]
    before = x.clone()
    assert torch.equal(attack(model, x, y, 0.0), x)
    of_channels, of_images = torch.tensor([1.0, 0.5, 0.1]), torch.linspace(1, 0, 8)
    tensors = 6 * EPS * of_channels.view(3, 1, 1), 6 * EPS * of_images.view(-1, 1, 1, 1)
    for eps in (0.3, *(() if name in L1 else tensors)):
        adv = attack(model, x, y, eps)
        assert adv.shape == x.shape and adv.dtype == x.dtype and not adv.requires_grad
        assert adv.min() >= 0 and adv.max() <= 1 and not torch.equal(adv, x)
        if name in L1:
            assert (l1(adv - x) <= eps * (1 + 1e-6)).all()
        else:
            assert ((adv - x).abs() <= eps + 1e-6).all()
    assert torch.equal(x, before)
    if name not in L1:                                    # clip=False, many pixels at 0 and 1
        x = (x - 0.5).mul(2).add(0.5).clamp(0, 1)
        adv = attack(model, x, y, 8 * EPS, clip=False)
        assert adv.min() < 0 or adv.max() > 1
        assert (adv - x).abs().max() <= 8 * EPS + 1e-6


@pytest.mark.parametrize("name", ATTACKS)
def test_result_depends_on_seed_and_image_alone(net, name):
    """Other images of the batch and their order change nothing, except by rounding."""
    model, images, labels = net
    x, y, attack = images[:10], labels[:10], ATTACKS[name]
    adv = attack(model, x, y, EPS)
    assert torch.equal(attack(model, x, y, EPS), adv)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    parts = [attack(model, x[i], y[i], EPS, **(dict(index=i) if name in RANDOM else {}))
             for i in order.split(7)]
    far = (torch.cat(parts) - adv[order]).abs()
    near = (far.amax((1, 2, 3)) < 1e-4).sum()
    assert near >= 9 if name in CASCADE else share(far < 1e-4) > 0.999
    if name in RANDOM:
        assert not torch.equal(attack(model, x, y, EPS, seed=1), adv)


def test_noise_is_uniform(net):
    model, images, labels = net
    u = noise(model, images, labels, 0.1, clip=False) - images
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


@pytest.fixture(scope="module")
def vit():
    """Return a ViT with keys so large that S is not 0, images and its predictions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(ViTConfig(32, 8, 10, 16, 2, 2, attn="rpc", rpc_layers=(0, 1),
                              pap=dict(lambd=0.5))).eval()
        for p in model.requires_grad_(False).parameters():
            p.mul_(4).add_(0.1 * torch.randn_like(p))
    images = load_shapes("test", 20).images.float() / 255
    return model, images, model(images).argmax(1)


def gradient(model, images, labels):
    return attacks.input_gradient(attacks.cross_entropy, model, images, labels)[2]


def test_surrogates_share_weights_but_not_gradients(vit, net):
    model, images, labels = vit
    true, sources = gradient(model, images, labels), adaptive.gradient_models(model, images)
    found = [true, *(gradient(source, images, labels) for source in sources)]
    for one, other in itertools.combinations(found, 2):
        assert (one - other).norm() > 0.01 * true.norm()
    assert all(torch.equal(source(images), model(images)) for source in sources[:3])
    assert torch.equal(gradient(model, images, labels), true)      # the model itself is untouched
    # the last two: PAP with lambda infinite (S = 0), and with two of the four steps
    for source, pap in zip(sources[3:], (dict(lambd=math.inf), dict(n_iter=2))):
        twin = ViT(dataclasses.replace(model.config, pap={**model.config.pap, **pap})).eval()
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(images), source(images))
    assert adaptive.gradient_models(net[0], images) == []


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
    settings = adaptive.SurrogateSettings([dict(open=True)], [])
    monkeypatch.setitem(adaptive.SURROGATES, "hidden", lambda steps: settings)


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
    assert len(adaptive.gradient_models(both, vit[1][:2])) == 1 + 5


def test_adaptive_attacks_see_into_plain_functions(vit, net):
    model, images, labels = vit[0], vit[1][:6], vit[2][:6]
    few = dict(steps=2)
    hidden = [model]
    for attack in (adaptive_pgd, adaptive_apgd):
        adv = attack(model, images, labels, EPS, **few)
        assert torch.equal(attack(lambda x: hidden[0](x), images, labels, EPS, **few), adv)
    plain = pgd(net[0].forward, images, labels, EPS, **few)          # runs no module
    assert torch.equal(adaptive_pgd(net[0].forward, images, labels, EPS, **few), plain)


class CallsForward(torch.nn.Module):
    """Run a model by its method forward, which calls no hook of this model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.forward(x)


def test_layer_run_by_its_forward_is_found(net):
    layer = HiddenGradient()
    assert list(adaptive.layers_with_pap(CallsForward(layer), net[1])) == [layer]
    assert adaptive.pap_steps(CallsForward(layer), net[1]) == 1


def test_smooth_threshold_has_slope_of_softplus():
    x, tau = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True), torch.tensor(1.0)
    y = adaptive.smooth_shrink(x, tau)
    assert torch.equal(y, adaptive.soft_threshold(x, tau))
    slope, = torch.autograd.grad(y.sum(), x)
    expected = torch.sigmoid(4 * (x - 1)) + torch.sigmoid(4 * (-x - 1))
    torch.testing.assert_close(slope, expected.detach())
    for tau in (0.0, math.inf):
        y = adaptive.smooth_shrink(x, torch.tensor(tau, dtype=torch.float64))
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_adaptive_attacks_break_more_than_apgd(vit, net):
    model, (images, labels) = vit[0], (t[:12] for t in vit[1:])
    eps, few = 0.75 / 255, dict(steps=4, num_targets=1, queries=5)
    for plain, adaptive, options in ((pgd, adaptive_pgd, dict(steps=10)),
                                     (apgd, adaptive_apgd, dict(steps=5)),
                                     (autoattack, adaptive_autoattack, few)):
        before = right(model, plain(model, images, labels, eps, **options), labels)
        adv = adaptive(model, images, labels, eps, **options)
        after = right(model, adv, labels)
        assert not (after & ~before).any() and (adv - images).abs().max() <= eps + 1e-6
        assert after.sum() < before.sum()
    images, labels = (t[:20] for t in net[1:])            # no RPC-Attention: the plain attacks
    for both in (pgd, adaptive_pgd), (apgd, adaptive_apgd):
        assert torch.equal(*(attack(net[0], images, labels, EPS, steps=10) for attack in both))


def test_few_pgd_steps_can_cross_the_budget(net):
    model, images, labels = net[0], net[1][:20], net[2][:20]
    one = pgd(model, images, labels, EPS, steps=1, random_start=False)
    assert torch.equal(one, fgsm(model, images, labels, EPS))
    for steps, share in ((5, 0.5), (16, 0.15625), (17, 0.15), (40, 0.15)):
        adv = pgd(model, images[:3], labels[:3], EPS, steps=steps, alpha=share * EPS)
        assert torch.equal(pgd(model, images[:3], labels[:3], EPS, steps=steps), adv)


class NoFloat64(TorchDispatchMode):
    """Raise an error where PyTorch makes a float64 tensor, as a Mac's GPU does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.dtype == torch.float64:
                raise TypeError(f"{function} made a float64 tensor")
        return result


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_use_no_float64(net, vit, name):
    (x, y), attack = (t[:3] for t in net[1:]), ATTACKS[name]
    with NoFloat64():
        attack(net[0], x, y, EPS)
        if "adaptive" in name:
            attack(vit[0], vit[1][:3], vit[2][:3], EPS)
    with pytest.raises(TypeError), NoFloat64():
        x.double()


def test_adam_changes_no_argument():
    grad, first, second = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    before = [t.clone() for t in (grad, first, second)]
    change, new_first, new_second = attacks.adam(grad, first, second, 3, 0.1)
    assert all(torch.equal(a, b) for a, b in zip((grad, first, second), before))
    expected = torch.lerp(first, grad, 0.1), torch.lerp(second, grad ** 2, 0.001)
    torch.testing.assert_close((new_first, new_second), expected)
    mean, square = expected[0] / (1 - 0.9 ** 3), expected[1] / (1 - 0.999 ** 3)
    torch.testing.assert_close(change, 0.1 * mean / (square.sqrt() + 1e-8))


def test_eps_per_image_imports_no_sympy():
    """Its import takes half a second of each evaluation."""
    code = """if True:
        import sys, torch
        from robust.attacks import per_image
        shapes = [(), (3, 1, 1), (2, 1, 1, 1), (2, 3, 4, 4)]
        for shape in shapes:
            eps, _ = per_image(torch.zeros(2, 3, 4, 4), torch.full(shape, 0.3), None)
            assert len(eps) == 2 and eps.ndim == 4 and (eps == 0.3).all()
        assert "sympy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("change, message", [
    (dict(images=torch.full((4, 3, 4, 4), math.nan).double()), "values from nan"),
    (dict(eps=math.nan), "pixel units"),
    (dict(model=torch.nn.Sequential().eval().append(Linear())), "train mode"),
    (dict(eps=8), "was it meant as 8/255"),
    (dict(eps=torch.tensor([0.1, -0.1, 0.1, 0.1])), "eps=-0.1, expected 0 to 1"),
    (dict(model=lambda x: x.flatten(1)[:, :2] * math.nan), "not finite"),
    (dict(images=torch.full((4, 3, 4, 4), 1 + 2e-6).double()), "expected 0 to 1"),
    (dict(model=lambda x: x.flatten(1)[:, :5].softmax(1)), "probabilities"),
    (dict(model=lambda x: 100 * x.flatten(1)[:, :5].softmax(1)), "probabilities in per cent"),
    (dict(model=lambda x: (20 * x.flatten(1)[:, :5] * torch.arange(5)).sigmoid()),
     "scores from 0 to 1"),
    (dict(model=lambda x: Linear(9)(x).sigmoid()), "scores from 0 to 1")])
def test_false_robustness_is_an_error(change, message):
    case = dict(model=Linear().eval(), images=torch.full((4, 3, 4, 4), 0.5, dtype=torch.float64),
                eps=0.1)
    clean_logits(**case)
    with pytest.raises(ValueError, match=message):
        clean_logits(**{**case, **change})


@pytest.mark.parametrize("eps", [-5, math.nan, math.inf, torch.tensor([10.0, -5.0])])
def test_sld_rejects_a_wrong_budget(net, eps):
    model, images, labels = net[0], net[1][:2], net[2][:2]
    assert torch.equal(sld(model, images, labels, 0, steps=2), images)
    with pytest.raises(InputError, match="expected an L1 budget of 0 or more"):
        sld(model, images, labels, eps, steps=2)


def test_honest_scores_and_rounded_pixels_pass():
    attacks.check_logits(torch.zeros(8, 10))                    # an untrained head of zeros
    attacks.check_logits(torch.tensor([[0.3, 0.7001]]))         # by chance between 0 and 1
    attacks.check_logits(torch.tensor([[60.0, 30.0]]))
    early = torch.tensor([0.15, 0.12]) + 1e-3 * torch.arange(64)[:, None]   # begin of a training
    attacks.check_logits(early)
    attacks.check_inputs(Linear().eval(), torch.full((4, 3, 4, 4), 1 + 5e-7, dtype=torch.float64))


def image_statistics(model):
    """Return the model behind a BatchNorm in train mode, which is in a list, not a submodule."""
    hidden = [torch.nn.BatchNorm2d(3, track_running_stats=False)]
    return lambda x: model(hidden[0](x))


def left_dropout(model):
    """Return the model behind a dropout that nobody can switch off."""
    return lambda x: model(torch.nn.functional.dropout(x, 0.1))


class Adapting(torch.nn.Module):
    """Follow the mean of all images that the model has seen."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.mean = torch.zeros(())

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.model(x - self.mean)


@pytest.mark.parametrize("wrap, message", [
    (image_statistics, "BatchNorm"), (left_dropout, "dropout"), (Adapting, "adapt"),
    (lambda model: lambda x: model(x) + 0.05 * torch.randn(10), "random numbers"),
    (lambda model: lambda x: model(x - x.mean()), "other images of the batch"),
    (lambda model: lambda x: model(x).squeeze(), "one by one")])
def test_logits_must_depend_on_one_image(net, wrap, message):
    model, images = net[0], net[1][:2]
    attacks.check_repeats(model, images, model(images))
    wrapped = wrap(model)
    with pytest.raises(InputError, match=message):
        attacks.check_repeats(wrapped, images, wrapped(images))


def test_rounding_is_no_dependence_on_other_images(net):
    model, images = net[0], net[1][:2]

    def coarse(x):                                              # bf16 would round less
        noise = torch.rand(10, generator=torch.Generator().manual_seed(len(x)))
        return (model(x) * (1 + 0.02 * noise)).bfloat16()

    attacks.check_repeats(coarse, images, coarse(images).float())


@pytest.mark.parametrize("name", ["pgd", "spsa", "aa", "cw"])
def test_attacks_accept_half_precision_logits(net, name):
    model, images, labels = net[0], net[1][:4], net[2][:4]
    adv = ATTACKS[name](lambda x: model(x).half(), images, labels, EPS)
    assert adv.dtype == torch.float32 and adv.isfinite().all()


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_reject_train_mode_and_large_pixels(name):
    _, images, labels, _ = linear_case(4, classes=5)
    attack, norm = ATTACKS[name], torch.nn.BatchNorm2d(3).double()
    model = torch.nn.Sequential(norm, Linear(5))
    with pytest.raises(ValueError, match="train mode: call model.eval()"):
        attack(model, images, labels, EPS)
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()
    with pytest.raises(ValueError, match="expected 0 to 1"):
        attack(model.eval(), images * 255, labels, EPS)
    with_a_graph = images.requires_grad_() * 1
    assert not attack(model, with_a_graph, labels, EPS).requires_grad
    assert norm.weight.requires_grad and norm.weight.grad is None and images.grad is None


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
