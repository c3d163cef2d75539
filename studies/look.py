"""How the figures of the studies look: matplotlib without a screen, 900 px wide."""

import sys

try:
    import matplotlib
except ImportError:
    sys.exit("error: studies.plot needs matplotlib: pip install matplotlib")

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 9,
                     "axes.titlesize": 9.5, "legend.fontsize": 8, "axes.spines.top": False,
                     "axes.spines.right": False})
WIDTH = 9                                                  # inches


def band(ax, xs, low, high, colour):
    ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def legend(figure, ax, where, **look):
    """The labels of ax, outside of all panels."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc=f"outside {where}", frameon=False, **look)
