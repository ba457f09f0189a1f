"""Colours and style of all charts."""

# CSS variable of the page -> stand-in; these values are also the page's light scheme.
COLOURS = {
    "ink": "#1f2733",
    "muted": "#5d6878",
    "grid": "#dfe3e8",
    "paper": "#fdfdfc",
    "measured": "#6f7b8a",
    "attacked": "#b8480f",
    "proven": "#14568f",
    # models side by side; apart from the three kinds of results
    "violet": "#7b3f9e",
    "teal": "#11766f",
    "ochre": "#8a6500",
}
INK, MUTED, GRID, PAPER, MEASURED, ATTACKED, PROVEN, *_ = COLOURS.values()

STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "text.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "axes.linewidth": 0.8,
}
