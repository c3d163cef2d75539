"""Accuracy of each class, and which class is taken for which: --per_class."""

import csv
from pathlib import Path

import torch

from common import table
from robust.score import all_sum, batches, logits_of, to_pixels


def per_class(m, measure, images, args):
    """Counts [[true class, predicted class, images], ...], and the lowest accuracy of a class."""
    K = len(args.classes)
    matrix = torch.zeros(K, K, dtype=torch.int64)
    for x, labels, *_ in batches(images, args, f"per class, {m.about['model']}"):
        predicted = logits_of(m, to_pixels(x), args).argmax(1)
        matrix += (labels * K + predicted).bincount(minlength=K * K).cpu().view(K, K)
    matrix = all_sum(matrix)
    there = matrix.sum(1) > 0
    share = 100 * matrix.diag()[there] / matrix.sum(1)[there]
    i, j = matrix.nonzero().T
    return dict(lowest=share.min().item(), class_names=args.classes,
                confusion=torch.stack([i, j, matrix[i, j]], 1).tolist())


def tables(rows, folder):
    """Write per_class.csv and confusion.csv of rows into the folder; returns them as Markdown."""
    found, accuracies, confusions = [], [], []
    for row in (row for row in rows if "confusion" in row):
        names, cells = row["class_names"], {(i, j): n for i, j, n in row["confusion"]}
        totals = [sum(cells.get((i, j), 0) for j in range(len(names))) for i in range(len(names))]
        own = [[row["model"], name, n, f"{100 * cells.get((i, i), 0) / n:.2f}" if n else ""]
               for i, (name, n) in enumerate(zip(names, totals))]
        accuracies += own
        confusions += [[row["model"], names[i], names[j], n] for (i, j), n in cells.items()]
        found.append(f"{row['model']}, {row['images']} images\n\n" + table(
            [line[1:] for line in own], ["class", "images", "accuracy, per cent"]))
        if len(names) <= 20:
            body = [[name, *(cells.get((i, j), "") for j in range(len(names)))]
                    for i, name in enumerate(names)]
            found.append(table(body, ["is, taken for", *names]))
    head = ["model", "class"]
    for file, lines, more in (("per_class.csv", accuracies, ["images", "accuracy"]),
                              ("confusion.csv", confusions, ["predicted", "images"])):
        with open(Path(folder, file), "w", newline="") as f:
            csv.writer(f).writerows([head + more, *lines])
    return "\n\n" + "\n\n".join(found)
