"""What does lambda do, from 0 to infinity? Accuracy, entropy of layer 0 and share of S.

    python -m referee.lambda_curve weights/shapes_rpc.pt weights/shapes_symmetric.pt
    python -m referee.lambda_curve weights/shapes_rpc.pt --as_trained   # a line each

With lambda 0 PAP's layer gives the mean of its values, and S is all of K; with infinity S is 0.
The curve replaces layer 0 of trained networks by PAP of any lambda, without training them again;
stars are networks of the line that were trained so: referee/results/line, group 2 of its plan.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch

import common
from attention import ATTENTIONS, FORMS, arg_names
from data.shapes import load_shapes
from referee.line import PICTURES, files, logged, stored
from robust.sources import load_model

SAME = {"uniform-l0": "paper-0-n4", "rpc4-l1": "released-4-n4"}         # other names of arms
LAMBDAS = (0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 64, np.inf)


@torch.no_grad()
def attend(model, images, labels):
    """Measure a network: accuracy in per cent, and of layer 0 the mean entropy of its attention
    weights in nats (uniform ones have log N) and the share of S that is not 0."""
    seen = []
    layer = model.blocks[0].attn
    hook = layer.register_forward_pre_hook(lambda m, inputs: seen.append(m.trace(inputs[0])[-1]))
    right = (model(images).argmax(1) == labels).float().mean().item()
    hook.remove()
    K2 = seen[0]["K2"]
    log_A = torch.log_softmax(K2 @ K2.mT / K2.shape[-1] ** 0.5, -1)
    entropy = -(log_A.exp() * log_A).sum(-1).mean().item()
    return dict(top1=100 * right, entropy=entropy, uniform=float(np.log(K2.shape[-2])),
                share=(seen[0]["S"] != 0).float().mean().item())


def networks_and_images(paths):
    """Give each network with the first 500 test images: (path, model, images, labels)."""
    split = load_shapes("test", 3200, 32)
    images, labels = split.images[:500].float() / 255, split.labels[:500]
    for path in paths:
        yield path, load_model(path, torch.device("cpu")).model.eval(), images, labels


def sweep(paths, out_dir, form):
    """Replace layer 0 of trained networks by PAP of any lambda; write rows and draw them."""
    rows = []
    for path, model, images, labels in networks_and_images(paths):
        layer = model.blocks[0].attn
        layer.attn, layer.arg_names = "rpc", arg_names(ATTENTIONS["rpc"], ("k", "v", "layer"))
        for reading in ("paper", "released"):
            for lambd in LAMBDAS:
                layer.pap = dict(n_iter=4, lambd=lambd, **FORMS[reading])
                rows.append(dict(network=path.stem, form=reading, lambd=lambd,
                                 **attend(model, images, labels)))
    (out_dir / "lambda.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, out_dir / f"lambda.{form}", trained())
    print(f"{out_dir}/lambda.jsonl, lambda.{form}")


def trained():
    """Read what the networks of the line that were trained with a lambda of their own have: rows as
    those of `sweep` with loss and robust accuracy; entropy and share where they were measured."""
    after = {row["run"]: row for row in logged(files(PICTURES["fresh"][2]))}
    found = []
    for n in stored("fresh"):
        how = re.fullmatch(r"(paper|released)-(.+)-n4", SAME.get(n.arm, n.arm))
        if how:
            of = after.get(f"{n.arm}_s{n.seed}", {})
            row = dict(form=how[1], lambd=float(how[2]), top1=n.accuracy["clean"], loss=n.loss,
                       entropy=of.get("entropy"),
                       share=of.get("nonzero_S", {}).get("0", [None])[-1])
            found.append({k: x for k, x in (row | n.accuracy).items() if x is not None})
    return sorted(found, key=lambda row: (row["form"], row["lambd"]))


def table(rows):
    """Write Markdown: a lambda a row, means over the networks that were trained with it."""
    body = []
    for form, lambd in dict.fromkeys((row["form"], row["lambd"]) for row in rows):
        own = [row for row in rows if (row["form"], row["lambd"]) == (form, lambd)]

        def mean(name, digits):
            of = [row[name] for row in own if name in row]
            return f"{np.mean(of):.{digits}f}" if of else ""
        body.append([form, f"{lambd:g}".replace("inf", "∞"), str(len(own)), mean("loss", 3),
                     mean("top1", 1), mean("pgd 2/255", 1), mean("15 corruptions", 1),
                     mean("entropy", 2), mean("share", 2)])
    return common.table(body, ["reading", "lambda", "networks", "clean loss", "clean", "pgd 2/255",
                               "15 corruptions", "entropy, nats", "share of S"])


def draw(rows, path, trained=()):
    """Draw accuracy, entropy of layer 0 and share of S against lambda, a column a reading."""
    from referee.plot import WIDTH, colour_of, legend, plt, save
    shown = dict(top1="accuracy in %", entropy="entropy of layer 0\nin nats",
                 share="share of S\nthat is not 0")
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 6), sharex=True, sharey="row")
    for column, reading in zip(axes.T, ("paper", "released")):
        for ax, (name, label) in zip(column, shown.items()):
            for network in dict.fromkeys(row["network"] for row in rows):
                own = [r for r in rows if (r["network"], r["form"]) == (network, reading)]
                ax.plot(range(len(own)), [row[name] for row in own], "o-", markersize=4,
                        color=colour_of("rpc" if "rpc" in network else "symmetric"),
                        label=f"weights of {network}, not trained again")
            looks = {name: ("full", "trained with this lambda")}
            if name == "top1":
                looks["pgd 2/255"] = "none", "the same, under PGD-20 at 2/255"
            for key, (fill, words) in looks.items():
                own = [r for r in trained if r["form"] == reading and key in r]
                ax.plot([LAMBDAS.index(r["lambd"]) for r in own], [r[key] for r in own], "*",
                        markersize=9, fillstyle=fill, color="black", label=words if own else None)
            if name == "entropy":
                ax.axhline(rows[0]["uniform"], color="black", linewidth=0.8, linestyle=":")
            ax.set(ylabel=label if ax in axes[:, 0] else None)
        column[0].set_title(f"reading `{reading}`, 4 steps")
        column[2].set(xlabel="lambda", xticks=range(len(LAMBDAS)))
        column[2].set_xticklabels([f"{x:g}".replace("inf", "∞") for x in LAMBDAS], rotation=45)
    legend(figure, axes[0, 0], "lower center", ncols=2)
    save(figure, path)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ckpt", nargs="+", type=Path, help="classifiers of the rendered scenes")
    p.add_argument("--as_trained", action="store_true", help="measure layer 0 as it was trained, "
                   "which must be RPC, instead: a JSON line each")
    p.add_argument("--out_dir", type=Path, default=Path("out/line"))
    p.add_argument("--format", choices=["png", "pdf", "svg"], default="png")
    args = p.parse_args(argv)
    if args.as_trained:
        for path, model, *given in networks_and_images(args.ckpt):
            if model.config.layer_attn(0) != "rpc":
                raise common.InputError(f"{path}: layer 0 is not RPC")
            print(json.dumps(dict(run=path.name, **attend(model, *given))))
        return
    args.out_dir.mkdir(parents=True, exist_ok=True)
    sweep(args.ckpt, args.out_dir, args.format)


if __name__ == "__main__":
    common.run(main)
