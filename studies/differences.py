"""Accuracies of networks as paired differences to a baseline's: intervals, tables, a figure.

Runs are (arm, seed); arms are compared on the same images, paired by seed. No study itself.
"""

import numpy as np

import common
from robust import corruptions, metrics
from robust.rows import weights_of
from robust.tables import title
from studies.tables import half_width

BASELINE = "symmetric"
FAMILIES = dict(noise=corruptions.NAMES[:3], blur=corruptions.NAMES[3:7],
                weather=corruptions.NAMES[7:11], digital=corruptions.NAMES[11:])
NONE = 0, np.nan, (np.nan, np.nan), (np.nan, np.nan)       # a difference that is not there


def current(rows, folders):
    """The rows of these networks as they are: not those from before a run was trained further."""
    weights = {str(folder): weights_of(common.load(folder)["model"])
               for folder in folders.values()}
    return [row for row in rows if weights.get(row["checkpoint"]) == row["weights"]]


def outcomes(rows, folders, limit, same=()):
    """{measure: {(arm, seed): how often each image was right (n,), in [0, 1]}}, in a fixed order.

    rows: of eval_robust.py. folders: {(arm, seed): folder}. same: arms that hide no gradient, for
    which the adaptive attack is PGD.
    """
    found = {name: {} for name in ("clean", "15 corruptions", *FAMILIES)}
    runs, types, hows = {str(folder): run for run, folder in folders.items()}, {}, {}
    for row in (row for row in rows if row["checkpoint"] in runs):
        run, name = runs[row["checkpoint"]], title(row)
        packed = row["right"] if isinstance(row["right"], list) else [row["right"]]
        right = np.mean([metrics.unpack(text, row["images"]).numpy() for text in packed], 0)
        if row["images"] != limit:
            name += f", {row['images']} images"
        how = row["setting"], row.get("conditions")
        if hows.setdefault(name, how) != how:
            raise ValueError(f"{name} was measured in two ways, {hows[name]} and {how}: keep the "
                             "rows of one")
        if row["measure"] == "corruptions":
            types.setdefault(run, {})[name] = right
        else:
            found.setdefault(name, {})[run] = right

    # means over the corruptions of a family
    for run, of in types.items():
        for family, names in {"15 corruptions": corruptions.NAMES, **FAMILIES}.items():
            if set(names) <= set(of):
                found[family][run] = np.mean([of[name] for name in names], 0)

    # the adaptive attack on what hides no gradient is PGD
    for name in [name for name in found if name.startswith("adaptive_pgd")]:
        plain = found.get(name.removeprefix("adaptive_"), {})
        found[name] |= {run: right for run, right in plain.items() if run[0] in same}
    return {name: runs for name, runs in found.items() if runs}


def difference(first, second):
    """Points of accuracy between paired runs. first, second: (seeds, images), in [0, 1].

    Returns (mean, its t-interval over seeds (low, high), nan for one seed, its bootstrap interval
    over images); all intervals 95 %.
    """
    gaps = 100 * (np.asarray(first, float) - np.asarray(second, float))
    mean, half = gaps.mean(), half_width(gaps.mean(1))
    return mean, (mean - half, mean + half), metrics.bootstrap(gaps.mean(0))


def compare(found, arms, baseline=BASELINE):
    """{(measure, arm): (number of pairs, mean, over seeds, over images)}, where there are pairs."""
    result = {}
    for name, runs in found.items():
        for arm in arms:
            seeds = sorted(s for a, s in runs if a == arm and (baseline, s) in runs)
            if arm != baseline and seeds:
                first, second = ([runs[which, s] for s in seeds] for which in (arm, baseline))
                result[name, arm] = (len(seeds), *difference(first, second))
    return result


# --- tables and figure ----------------------------------------------------------------------------

def tables(found, compared, arms, baseline=BASELINE):
    """Markdown: accuracies, differences with intervals over seeds, intervals over images."""
    def accuracy(name, arm):
        values = [100 * right.mean() for (a, _), right in found[name].items() if a == arm]
        std = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        return f"{np.mean(values):.1f}{std} ({len(values)})" if values else ""

    def over_seeds(name, arm):
        if (name, arm) not in compared:
            return ""
        n, mean, (low, high), _ = compared[name, arm]
        text = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" if n > 1 else f"{mean:+.1f}"
        return f"**{text}**" if low > 0 or high < 0 else text

    def over_images(name, arm):
        *_, (low, high) = compared.get((name, arm), NONE)
        return f"{low:+.1f} to {high:+.1f}".replace("+nan to +nan", "")

    def part(text, columns, cell):
        body = [[name, *(cell(name, arm) for arm in columns)] for name in found]
        return text + "\n\n" + common.table(body, ["measure", *columns])

    others = [arm for arm in arms if arm != baseline]
    return "\n\n".join([
        part("Accuracy in per cent, mean ± standard deviation (seeds):", arms, accuracy),
        part(f"Difference to {baseline} in points, paired by seed (95 % t-interval over seeds), "
             "bold where that excludes 0:", others, over_seeds),
        part("The same differences, 95 % bootstrap interval over images:", others, over_images)])


def draw(compared, arms, path, baseline=BASELINE):
    """Differences as points, arms in rows, measures in columns: thick over seeds, thin: images.

    A measure that only few arms have is left to the tables.
    """
    from studies.look import WIDTH, plt
    arms = [arm for arm in arms if any(a == arm for _, a in compared)]
    names = list(dict.fromkeys(name for name, _ in compared))
    names = [name for name in names if 2 * sum((name, a) in compared for a in arms) > len(arms)]
    figure, axes = plt.subplots(2, (len(names) + 1) // 2, sharey=True, squeeze=False,
                                figsize=(1.3 * WIDTH, 1.6 + 0.62 * len(arms)))
    for ax, name in zip(axes.flat, names):
        ends = [0]
        for y, arm in enumerate(arms):
            n, mean, seeds, images = compared.get((name, arm), NONE)
            ends += [*images, *(seeds if n > 2 else ())]   # of two seeds: as wide as any panel
            colour = "tab:red" if seeds[0] > 0 or seeds[1] < 0 else "tab:blue"
            ax.plot(images, [y + 0.25] * 2, color="tab:gray", linewidth=1)
            ax.plot(seeds, [y, y], color="tab:blue", linewidth=2.5)
            ax.plot(mean, y, "o", color=colour, markersize=5)
        ax.axvline(0, color="black", linewidth=0.8)
        room = 0.05 * (np.nanmax(ends) - np.nanmin(ends)) + 0.1
        ax.set(title=name, ylim=(len(arms) - 0.5, -0.5), yticks=range(len(arms)), yticklabels=arms,
               xlim=(np.nanmin(ends) - room, np.nanmax(ends) + room))
    for ax in axes.flat[len(names):]:
        ax.set_visible(False)
    figure.supxlabel(f"points of accuracy more than {baseline}; blue: 95 % over seeds (red point: "
                     "without 0), gray: 95 % over images", fontsize=9)
    figure.savefig(path)
    plt.close(figure)
