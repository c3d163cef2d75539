"""Check whether the robust accuracy of a classifier is reliable.

    python -m robust.checks --ckpt out/shapes_rpc weights/shapes_softmax.pt

Each of five checks prints PASS or FAIL and its numbers. FAIL means that attacks along the gradient
overstate how robust the model is: the gradients mislead them, or they stop too early (Athalye et
al. 2018, Carlini et al. 2019; `fra31/auto-attack:autoattack/checks.py`).
"""

from functools import partial

import common
import torch

from robust.adaptive import adaptive_apgd, pap_steps
from robust.attacks import cross_entropy, cw, input_gradient, noise, pgd, restarted, spsa
from robust.autoattack import apgd, apgd_t, square

BUDGETS = [k / 255 for k in (0, 0.5, 1, 2, 4, 8, 16)]
FEW = 32                                        # images for slow attacks


def is_right(model, images, labels):
    return model(images).argmax(1) == labels


def percent(*flags):
    """Return the percentage of True in each of `flags`, as text."""
    return " ".join(f"{100 * x.cpu().double().mean():.1f}" for x in flags) + " %"


def slack(labels):
    """Return how many images may differ by chance."""
    return 1 + len(labels) / 100


# Each check returns {condition: bool} and a text with its numbers.

def gradients(model, x, y):
    """Check 1: logits repeat, every image has a gradient, and the mean loss rises along it."""
    calls = torch.stack([model(x) for _ in range(5)])
    _, _, grad = input_gradient(cross_entropy, model, x, y)
    zero = (grad == 0).flatten(1).all(1)
    loss = [cross_entropy(model(x + t / 255 * grad.sign()), y).mean().item()
            for t in (0, 0.25, 0.5, 1)]
    parts = {"the same logits again": (calls - calls[0]).abs().max() <= 1e-4,
             "no gradient all 0": not zero.any(),
             "loss rises": all(a < b for a, b in zip(loss, loss[1:]))}
    return parts, (f"loss {' '.join(f'{value:.3f}' for value in loss)} at 0 0.25 0.5 1 / 255 along "
                   f"the gradient's sign; images with gradient 0: {percent(zero)}")


def steps_and_restarts(model, x, y, eps, steps=20, **options):
    """Check 2: five times the steps, or five restarts, fool no more images."""
    once, more = (is_right(model, pgd(model, x, y, eps, steps=n, **options), y)
                  for n in (steps, 5 * steps))
    again = is_right(model, restarted(model, x, y, eps, restarts=5, steps=steps, **options), y)
    parts = {f"{5 * steps} steps fool no more images than {steps} steps":
             once.sum() - more.sum() <= slack(y),
             "5 restarts fool no more images": once.sum() - again.sum() <= slack(y)}
    return parts, (f"at {255 * eps:g}/255 PGD leaves {percent(once, more)} after {steps} and "
                   f"{5 * steps} steps; {percent(again)} with 5 restarts")


def rivals(model, x, y, eps, others):
    """Checks 3 and 4: `others`, {name: attack}, fool no more images than attacks with gradients."""
    x, y = x[:FEW], y[:FEW]
    attacks = [pgd, apgd]
    if model(x[:1]).shape[1] > 3:                               # APGD-T needs four classes
        attacks.append(partial(apgd_t, num_targets=3))
    direct = torch.stack([is_right(model, f(model, x, y, eps), y) for f in attacks]).all(0)
    left = {name: is_right(model, f(model, x, y, eps), y) for name, f in others.items()}
    parts = {f"gradients beat {name}": direct.sum() <= flags.sum() + slack(y)
             for name, flags in left.items()}
    return parts, (f"at {255 * eps:g}/255 on {len(y)} images {len(attacks)} attacks along the "
                   f"gradient leave {percent(direct)}; "
                   + ", ".join(f"{name} {percent(flags)}" for name, flags in left.items()))


def sweep_to_zero(model, x, y, left):
    """Check 5: accuracy falls to zero as the budget grows; CW, without a budget, fools all images.

    left: for each of BUDGETS, which images are correct after PGD, (B,) bool.
    """
    counts = [flags.sum() for flags in left]
    grey = is_right(model, pgd(model, x, y, 1.0, steps=40), y)
    nearest = cw(model, x[:FEW], y[:FEW], steps=150, lr=0.01, search_steps=4, c0=1.0)
    spared = is_right(model, nearest, y[:FEW])
    parts = {"accuracy falls with eps": all(b <= a + slack(y) for a, b in zip(counts, counts[1:])),
             "eps 1 leaves nothing": grey.sum() <= slack(y),
             "CW fools all": not spared.any()}
    return parts, (f"PGD leaves {percent(*left)} at {' '.join(f'{255 * e:g}' for e in BUDGETS)} "
                   f"/ 255, {percent(grey)} at eps 1; CW {percent(spared)}")


@torch.no_grad()
def run_checks(model, x, y, name="", twin=None):
    """Run and print all five checks on images x with labels y. Returns {number: passed}.

    twin: a softmax-attention model; check 4 tries adversarial images for it on `model`.
    """
    passed = {}

    def report(number, claim, parts, evidence):
        wrong = [part for part, holds in parts.items() if not holds]
        passed[number] = not wrong
        claim += f"; but not: {', '.join(wrong)}" if wrong else ""
        print(f"{'FAIL' if wrong else 'PASS'} {number} {claim}\n       {evidence}", flush=True)

    print(f"checks on {name}, {len(y)} images", flush=True)
    report(1, "the gradient exists and points uphill", *gradients(model, x, y))
    left = [is_right(model, pgd(model, x, y, eps), y) for eps in BUDGETS]
    # Checks 2 to 4 use the budget at which the accuracy is nearest to half of the clean accuracy.
    half = left[0].sum() / 2
    eps = min(BUDGETS[1:], key=lambda eps: abs(left[BUDGETS.index(eps)].sum() - half))
    report(2, "more steps and restarts fool no more images", *steps_and_restarts(model, x, y, eps))
    blind = {"noise": noise, "SPSA": partial(spsa, steps=20, pairs=64),
             "Square": partial(square, queries=1000)}
    report(3, "attacks without gradients fool no more images", *rivals(model, x, y, eps, blind))
    other = {"adaptive APGD": adaptive_apgd} if pap_steps(model, x) else {}
    if twin is not None:
        other["transfer from softmax"] = lambda model, x, y, eps: apgd(twin, x, y, eps)
    if other:
        report(4, "other gradients fool no more images", *rivals(model, x, y, eps, other))
    else:
        print("---- 4 not run: the model has no RPC-Attention, and no softmax model was given")
    report(5, "accuracy falls to zero", *sweep_to_zero(model, x, y, left))
    return passed


def main():
    """Check the networks of --ckpt on 64 test images; a softmax network among them is the twin."""
    import eval_robust
    p = common.new_parser(__doc__)
    p.add_argument("--ckpt", nargs="+", required=True, help="checkpoints of train_cls.py")
    p.add_argument("--limit", type=int, default=64, help="number of test images (default: 64)")
    own = p.parse_args()
    args = eval_robust.get_args(["--ckpt", *own.ckpt, "--batch_size", str(own.limit)])
    args.rank, args.world, args.device = common.start_processes(None)
    models = [eval_robust.load_model(path, None, args.device) for path in own.ckpt]
    data = eval_robust.load_data(args, models)
    index = eval_robust.choose(len(data.labels), "pgd", args)[:own.limit]
    x, labels, *_ = next(eval_robust.batches(data, index, args))
    softmax = next((m for m in models if m.about["model"].startswith("softmax")), None)
    for m in models:
        run_checks(m.net, x, labels, m.about["model"], softmax and softmax.net)


if __name__ == "__main__":
    common.run(main)
