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
from robust.attacks import (cross_entropy, cw, input_gradient, noise, pgd, restarted,
                            spsa)
from robust.autoattack import apgd, apgd_t, square

BUDGETS = [level / 255 for level in (0, 0.5, 1, 2, 4, 8, 16)]
FEW = 32                                        # images for slow attacks


def is_right(model, images, labels):
    return model(images).argmax(1) == labels


def percent(*flags):
    """Return the percentage of True in each of `flags`, as text."""
    shares = [x.cpu().double().mean() for x in flags]
    return " ".join(f"{100 * share:.1f}" for share in shares) + " %"


def slack(labels):
    """Return how many images may differ by chance."""
    return 1 + len(labels) / 100


# Each check returns {condition: bool} and a text with its numbers.

def gradients(model, x, y):
    """Check 1: logits repeat, every image has a gradient, and the mean loss rises along it."""
    calls = torch.stack([model(x) for _ in range(5)])
    _, _, grad = input_gradient(cross_entropy, model, x, y)
    zero = (grad == 0).flatten(1).all(1)
    losses = []
    for level in (0, 0.25, 0.5, 1):
        logits = model(x + level / 255 * grad.sign())
        loss = cross_entropy(logits, y).mean()
        losses.append(loss.item())
    conditions = {"the same logits again": (calls - calls[0]).abs().max() <= 1e-4,
                  "no gradient all 0": not zero.any(),
                  "loss rises": all(a < b for a, b in zip(losses, losses[1:]))}
    printed = " ".join(f"{loss:.3f}" for loss in losses)
    return conditions, (f"loss {printed} at 0 0.25 0.5 1 / 255 along "
                        f"the gradient's sign; images with gradient 0: {percent(zero)}")


def steps_and_restarts(model, x, y, eps, steps=20, **options):
    """Check 2: five times the steps, or five restarts, fool no more images.

    options: other keywords of pgd.
    """
    adv = pgd(model, x, y, eps, steps=steps, **options)
    right_short = is_right(model, adv, y)
    adv = pgd(model, x, y, eps, steps=5 * steps, **options)
    right_long = is_right(model, adv, y)
    adv = restarted(model, x, y, eps, restarts=5, steps=steps, **options)
    right_restarts = is_right(model, adv, y)
    least = right_short.sum() - slack(y)            # at least so many must be right
    conditions = {f"{5 * steps} steps fool no more images than {steps} steps":
                  right_long.sum() >= least,
                  "5 restarts fool no more images": right_restarts.sum() >= least}
    return conditions, (f"at {255 * eps:g}/255 PGD leaves {percent(right_short, right_long)} "
                        f"after {steps} and {5 * steps} steps; "
                        f"{percent(right_restarts)} with 5 restarts")


def right_after(attack, model, x, y, eps):
    """Return which images the model classifies correctly after an attack, (B,) bool."""
    return is_right(model, attack(model, x, y, eps), y)


def rivals(model, x, y, eps, others):
    """Check 3 or 4: each of the other attacks fools no more images than PGD, APGD and APGD-T.

    An image counts as fooled if one of the three attacks, which follow the model's gradient, fools
    it. others: {name: attack}.
    """
    attacks = [pgd, apgd]
    if model(x[:1]).shape[1] > 3:                               # APGD-T needs four classes
        short_apgd_t = partial(apgd_t, num_targets=3)
        attacks.append(short_apgd_t)
    after_each = [right_after(attack, model, x, y, eps) for attack in attacks]
    after_all = torch.stack(after_each).all(0)
    conditions = {}
    texts = []
    for name, attack in others.items():
        flags = right_after(attack, model, x, y, eps)
        conditions[f"gradients beat {name}"] = after_all.sum() <= flags.sum() + slack(y)
        texts.append(f"{name} {percent(flags)}")
    return conditions, (f"at {255 * eps:g}/255 on {len(y)} images {len(attacks)} attacks "
                        f"along the gradient leave {percent(after_all)}; {', '.join(texts)}")


def sweep_to_zero(model, x, y, right_at):
    """Check 5: accuracy falls to zero as the budget grows; CW, without a budget, fools FEW images.

    right_at: for each of BUDGETS, which images are correct after PGD, (B,) bool.
    """
    counts = [flags.sum() for flags in right_at]
    falls = [after <= before + slack(y) for before, after in zip(counts, counts[1:])]
    # With eps 1, an attack may turn every image into any other, for example into a grey image.
    grey = is_right(model, pgd(model, x, y, 1.0, steps=40), y)
    few_y = y[:FEW]
    nearest = cw(model, x[:FEW], few_y, steps=150, lr=0.01, search_steps=4, c0=1.0)
    spared = is_right(model, nearest, few_y)
    conditions = {"accuracy falls with eps": all(falls),
                  "eps 1 leaves nothing": grey.sum() <= slack(y),
                  "CW fools all": not spared.any()}
    levels = " ".join(f"{255 * eps:g}" for eps in BUDGETS)
    return conditions, (f"PGD leaves {percent(*right_at)} at {levels} / 255, "
                        f"{percent(grey)} at eps 1; CW {percent(spared)}")


def half_budget(right_at):
    """Return the budget above 0 at which the accuracy is nearest to half of the clean accuracy.

    right_at: as in `sweep_to_zero`. right_at[0], at budget 0, is the clean accuracy.
    """
    half = right_at[0].sum() / 2
    distances = [abs(flags.sum() - half) for flags in right_at[1:]]
    return BUDGETS[1 + distances.index(min(distances))]


def report(number, claim, conditions, evidence):
    """Print the result of a check, {condition: bool} and a text; return whether it has passed."""
    wrong = [name for name, holds in conditions.items() if not holds]
    verdict = "FAIL" if wrong else "PASS"
    if wrong:
        claim += f"; not true: {', '.join(wrong)}"
    print(f"{verdict} {number} {claim}\n       {evidence}", flush=True)
    return not wrong


@torch.no_grad()
def run_checks(model, x, y, name="", softmax_model=None):
    """Run and print all five checks on images x with labels y. Returns {number: passed}.

    Checks 3 and 4 use the first FEW images. softmax_model: a softmax-attention model; check 4 tries
    adversarial images for it on `model`.
    """
    def transfer(model, x, y, eps):
        return apgd(softmax_model, x, y, eps)

    print(f"checks on {name}, {len(y)} images", flush=True)
    passed = {}
    found = gradients(model, x, y)
    passed[1] = report(1, "the gradient exists and points uphill", *found)
    right_at = [right_after(pgd, model, x, y, eps) for eps in BUDGETS]
    eps = half_budget(right_at)                                 # of checks 2 to 4
    found = steps_and_restarts(model, x, y, eps)
    passed[2] = report(2, "more steps and restarts fool no more images", *found)
    blind = {"noise": noise,
             "SPSA": partial(spsa, steps=20, pairs=64),
             "Square": partial(square, queries=1000)}
    found = rivals(model, x[:FEW], y[:FEW], eps, blind)
    passed[3] = report(3, "attacks without gradients fool no more images", *found)
    other = {}
    if pap_steps(model, x):
        other["adaptive APGD"] = adaptive_apgd
    if softmax_model is not None:
        other["transfer from softmax"] = transfer
    if other:
        found = rivals(model, x[:FEW], y[:FEW], eps, other)
        passed[4] = report(4, "other gradients fool no more images", *found)
    else:
        print("---- 4 not run: the model has no RPC-Attention, and no softmax model "
              "was given")
    found = sweep_to_zero(model, x, y, right_at)
    passed[5] = report(5, "accuracy falls to zero", *found)
    return passed


def main():
    """Check the networks of --ckpt on 64 test images; check 4 uses a softmax network among them."""
    import eval_robust              # here only: the checks above work without the evaluator
    p = common.new_parser(__doc__)
    p.add_argument("--ckpt", nargs="+", required=True,
                   help="checkpoints of train_cls.py")
    p.add_argument("--limit", type=common.positive_int, default=64,
                   help="number of test images (default: 64)")
    own = p.parse_args()
    # The evaluator's functions read its flags. One batch contains all images.
    args = eval_robust.get_args(["--ckpt", *own.ckpt, "--limit", str(own.limit),
                                 "--batch_size", str(own.limit), "--num_workers", "0"])
    args.rank, args.world, args.device = common.start_processes(None)
    if args.world > 1:
        raise common.InputError(f"{args.world} processes would check different images and print "
                                f"different results; expected one process: start it by python -m "
                                f"robust.checks, without torchrun")
    torch.backends.cudnn.allow_tf32 = False     # the default rounds the inputs of convolutions
    models = [eval_robust.load_model(path, args.device) for path in own.ckpt]
    args = eval_robust.complete_flags(args, models)
    data = eval_robust.load_data(args, models)
    index = eval_robust.choose(len(data.labels), "pgd", args)   # the first images of measure pgd
    x, labels, *_ = next(eval_robust.batches(data, index, args))        # the only batch
    softmax_model = None
    for m in models:
        config = getattr(m.net, "config", None)
        if softmax_model is None and getattr(config, "attn", None) == "softmax":
            softmax_model = m.net
    for m in models:
        run_checks(m.net, x, labels, m.about["model"], softmax_model)


if __name__ == "__main__":
    common.run(main)
