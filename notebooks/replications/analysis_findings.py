"""Published findings on the inside of ViTs: what they compare, and what was measured.

Papers: Understanding robustness of transformers for image classification (Bhojanapalli et al.
2021), sec. 3.5 and 4; the thesis Adversarially robust vision transformers, sec. 4.3. The former
shows these findings in figures only: most comparisons have a published sign and no size.
"""

from notebooks.replications.analysis_measures import (
    BUDGETS,
    GENERATORS,
    JUDGES,
    NAMES,
    NOISE,
    PARTS,
    PATCH,
    SIGNS,
    STEPS,
    Lines,
    Measure,
    alignment,
    cls_only,
    neighbours,
    recognised,
    whole,
    within,
    within_all,
    without,
    without_later,
    without_several,
    without_worst_later,
)
from notebooks.replications.evaluation_findings import (
    RESNET,
    ROBUST_RESNET,
    ROBUST_VIT,
    SIGN,
    VIT,
)
from notebooks.replications.experiments import Contrast, Experiment


def experiments_of(lines: Lines) -> list[Experiment]:
    """All findings on one kind of images."""
    makers = (
        _first_block,
        _attention_and_mlp,
        _later_blocks,
        _class_token,
        _near_patches,
        _class_token_only,
        _semantics,
        _alignment,
    )
    return [make(lines) for make in makers]


def _first_block(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 8, top."""
    first = lines.vits[0]
    return Experiment(
        key=f"first block, {lines.data}",
        claim="Any single block but the first can be removed from a trained ViT without "
        "a substantial loss of accuracy.",
        table=lines.changed(
            {f"without block {i}": without("block", i) for i in range(lines.depth)}
        ),
        contrasts=[
            *lines.contrasts(
                "accuracy without block 0 minus without the most important other block",
                without("block", 0),
                without_worst_later,
                sign=-1,
            ),
            lines.contrast(
                first,
                "accuracy without another block, on average, minus the whole network",
                without_later("block"),
                whole,
                sign=0,
            ),
        ],
        remark=f'{lines.depth} blocks, so that each is a quarter of the network and "any other" are '
        f"{lines.depth - 1} blocks. Accuracy cannot fall below chance, so that two heavy losses look alike; the "
        "loss of a network that is hardly better than chance says little.",
    )


def _attention_and_mlp(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 8, bottom."""
    first, several = lines.vits[0], range(2, lines.depth)
    measures: dict[str, Measure] = {}
    for part, name in PARTS.items():
        measures[f"{name}, 1 removed"] = without_later(part)
        measures |= {f"{name}, {n} removed": without_several(part, n) for n in several}
    attn, mlp = ({n: without_several(part, n) for n in several} for part in ("attn", "mlp"))
    what = "accuracy without attention minus without MLP"
    return Experiment(
        key=f"parts of blocks, {lines.data}",
        claim="Removing attention from several blocks hurts more than removing their MLPs; "
        "removing whole blocks hurts more than either.",
        table=lines.changed(measures),
        contrasts=[
            *lines.contrasts(f"{what} in 2 blocks", attn[2], mlp[2], sign=-1),
            *(
                lines.contrast(first, f"{what} in {n} blocks", attn[n], mlp[n], sign=-1)
                for n in several[1:]
            ),
            lines.contrast(
                first,
                f"{what} in 1 block",
                without_later("attn"),
                without_later("mlp"),
                sign=-1,
            ),
            lines.contrast(
                first,
                "accuracy without 2 blocks minus without the attention of 2",
                without_several("block", 2),
                attn[2],
                sign=-1,
            ),
        ],
        remark="The first block is always kept. A figure is the mean over all sets of n among the other "
        f"{lines.depth - 1} blocks (3, 3 and 1 sets), not over 25 samples. As in the paper, an MLP has twice the "
        "weights of an attention.",
    )


def _later_blocks(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 7, left, and Figure 31."""
    return Experiment(
        key=f"later blocks, {lines.data}",
        claim="Outputs of blocks, all tokens, are more correlated towards the end of the network.",
        table=lines.table(lines.vits, _pairs(lines, "all")),
        contrasts=lines.contrasts(
            "correlation of the last two blocks minus that of the first two",
            neighbours("all", -1),
            neighbours("all", 0),
            sign=+1,
        ),
        remark="Absolute Pearson correlation over all entries of all tokens and test items, in "
        "hundredths. Three pairs of neighbouring blocks; groups of blocks, which the paper sees, need more.",
    )


def _class_token(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 7, right, and Figure 32."""
    return Experiment(
        key=f"class token, {lines.data}",
        claim="The class token changes slowly at the beginning and rapidly in later blocks, where "
        "patches hardly change.",
        table=lines.table(lines.vits, _pairs(lines, "cls")),
        contrasts=[
            *lines.contrasts(
                "correlation of the last two blocks minus that of the first two",
                neighbours("cls", -1),
                neighbours("cls", 0),
                sign=-1,
            ),
            *lines.contrasts(
                "last two blocks, class token minus all tokens",
                neighbours("cls", -1),
                neighbours("all", -1),
                sign=-1,
            ),
        ],
        remark="As above, of the class token alone. Two blocks are the beginning and two the end.",
    )


def _pairs(lines: Lines, tokens: str) -> dict[str, Measure]:
    return {f"blocks {i} and {i + 1}": neighbours(tokens, i) for i in range(lines.depth - 1)}


def _near_patches(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 9, left and centre."""
    distances = (0, 1, 2)
    names = {"spatial": "at most {} apart", "random": "equally many as {}, random"}
    return Experiment(
        key=f"near patches, {lines.data}",
        claim="Attention between near patches only costs less accuracy than attention between "
        "equally many pairs chosen at random.",
        table=lines.changed(
            {name.format(d): within(kind, d) for d in distances for kind, name in names.items()}
        ),
        contrasts=lines.contrasts(
            "accuracy, near minus random patches, mean over distances",
            within_all("spatial"),
            within_all("random"),
            sign=+1,
        )
        + [
            lines.contrast(
                lines.vits[0],
                f"accuracy, near minus random patches, distance {d}",
                within("spatial", d),
                within("random", d),
                sign=+1,
            )
            for d in distances
        ],
        remark="Grids of 8x8 patches of 4 px and 4x4 patches of 8 px, 24x24 in the paper. The mean is "
        "over the distances from 1 that mask some pairs. One random order of pairs per seed, the same for all "
        "distances.",
    )


def _class_token_only(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 9, right."""
    counts = range(1, lines.depth + 1)
    return Experiment(
        key=f"no attention between patches, {lines.data}",
        claim="Without attention between patches in the last blocks accuracy hardly falls, in the first "
        "blocks it falls much.",
        table=lines.changed(
            {
                f"{where} {k}": cls_only(where, k)
                for where in ("first", "last")
                for k in counts
                if (where, k) != ("last", lines.depth)
            }
        ),
        contrasts=[
            *lines.contrasts(
                "accuracy with the last 2 blocks restricted minus with the first 2",
                cls_only("last", 2),
                cls_only("first", 2),
                sign=+1,
            ),
            *lines.contrasts(
                "accuracy with the last 2 blocks restricted minus with the first 1",
                cls_only("last", 2),
                cls_only("first", 1),
                sign=+1,
            ),
        ],
        remark="Patches see themselves and the class token. The paper has one such model of 12 blocks. "
        "In the last block the restriction changes no prediction, here and in the paper: the head reads the "
        "class token, which still sees all patches. The last 2 blocks against the first 1 are therefore one "
        "restricted block each.",
    )


def _semantics(lines: Lines) -> Experiment:
    """The thesis, Table 9: means over the three judges."""
    measures: dict[str, Measure] = {
        f"{name}, {NAMES[judge]}": recognised(sign, judge)
        for sign, name in SIGNS.items()
        for judge in JUDGES
    }
    compared = [
        ("+43.7", ROBUST_VIT, VIT, +1),
        ("+39.3", ROBUST_RESNET, RESNET, +1),
        ("+4.5", ROBUST_VIT, ROBUST_RESNET, +1),
        ("about none", VIT, NOISE, 0),
        ("about none", RESNET, NOISE, 0),
    ]
    return Experiment(
        key=f"meaning of perturbations, {lines.data}",
        claim="Standard classifiers recognise the class of an image in the perturbation alone if "
        "it was computed for an adversarially trained network; otherwise they guess.",
        table=lines.table([*GENERATORS, NOISE], measures),
        contrasts=[
            Contrast(
                f"pictures of {name}: {NAMES[first]} minus {NAMES[second]}",
                figure,
                lines.between(recognised(sign, *JUDGES), first, second),
                expected,
            )
            for sign, name in SIGNS.items()
            for figure, first, second, expected in compared
        ],
        remark=f"PGD-{STEPS}, PGD-100 in the thesis, eps {BUDGETS[lines.data]}, 500 items. The mean over two judges of this "
        "page, which are far weaker than the published ones; the ResNet puts 45 to 100 % of the pictures of a "
        "generator into one class, so that it tells little. First of 10 classes (chance 10 %) instead "
        "of first five of 1000 (0.5 %). The published sign of delta is not known: the text says x_adv - x "
        "(+delta), the author's code stores x - x_adv (-delta); an untargeted attack moves away from the "
        "class. Noise is the random start of PGD alone: what is recognised in it comes from clipping at "
        "black and white, which marks the strokes of digits, and is not a meaning of the model. PGD ends "
        "nearer to +-eps than noise does, so that clipping shows more in its pictures.",
    )


def _alignment(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, sec. 3.5 and Figure 5; the score is ours."""
    pairs = ((VIT, RESNET), (ROBUST_VIT, ROBUST_RESNET))
    return Experiment(
        key=f"patch borders, {lines.data}",
        claim="Perturbations of ViTs follow the borders of patches; those of ResNets do not.",
        table=lines.table(
            [*GENERATORS, NOISE], {"change at borders over change inside": alignment}
        ),
        contrasts=[
            Contrast(
                f"change at borders: {NAMES[vit]} minus {NAMES[resnet]}",
                SIGN,
                lines.between(alignment, vit, resnet),
                +1,
            )
            for vit, resnet in pairs
        ],
        remark=f"The paper shows pictures. Mean change of gray level between neighbouring pixels on the "
        f"borders of {PATCH}x{PATCH} patches, as a share of that between other neighbours; 100 % for noise. The same "
        "perturbations as above.",
    )
