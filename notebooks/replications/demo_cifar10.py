"""The page of the recipe `demo-cifar10`: figures of a finished run, read from its files.

`python -m notebooks.replications.demo_cifar10 --storage runs --time time.json` verifies the
certificates, keeps the figures in `demo-cifar10.json` and writes the page from that file; without
`--storage` it only writes the page again. `time.json` says what was measured outside of the run:
`minutes` (pairs of what and how many), `remark`, `data`, and `notes` on what did not work.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.numpy import load_file

from components.core.errors import CasemateError
from components.core.files import write_json, write_text
from components.core.shares import interval_ends, shown
from components.evaluate.metrics import ALL, METRICS_NAME, read_metrics
from notebooks.replications import page
from notebooks.replications.runs import RESULTS, finished
from pipelines import api
from pipelines.flow.plan import plan
from pipelines.recipe.load import load

RECIPE = "demo-cifar10"
EPS = "4/255"
MODELS = {
    "main": "XCiT, FGSM training",
    "standard": "ViT, standard training",
    "columns": "ViT on column ablations",
    "noisy": "ViT on noisy images",
}
PARTS = {"block": "block", "attn": "attention", "mlp": "MLP", "local": "patch interaction"}
EVALUATED = ("main", "standard")
CORRUPTIONS = "corruptions"
SHOWN = ("clean", CORRUPTIONS, "transfer", "spatial", "lesions", "correlation")
GROUPS = ("noise", "blur", "weather", "digital")

INTRODUCTION = """# The whole chain on photographs: `{recipe}`

Made by `python -m notebooks.replications.demo_cifar10` from [demo-cifar10.json](demo-cifar10.json), figures of one finished
run; do not edit.

{short}

```bash
# needs: the network, and about half an hour
casemate data get cifar10 --to data/cifar10
casemate run {recipe}
```

{data}

Figures show that the chain works and what to expect of it. They are not those of the papers: networks have 0.2 to 0.5 million
weights, start from random ones and see few images, and one seed says nothing about the next. Shares of items are cut off
after the first decimal, never rounded up; intervals are those of Wilson, 95 %, over test items.
"""


def collect(storage: Path, time: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Everything that the page shows."""
    recipe = load(RECIPE, overrides=list(overrides))
    folders = {step.step.name: finished(step) for step in plan(recipe, storage)}
    for part in recipe.certify:
        if problems := api.verify(folders[f"certify.{part}"]).problems:
            raise CasemateError("storage", folders[f"certify.{part}"], problems[0])
    return {
        "time": dict(time),
        "splits": _read(folders["prepare"] / "dataset.json")["splits"],
        "training": {name: _training(folders[f"train.{name}"]) for name in MODELS},
        "tune": _read(folders["tune"] / "trials.json")["rows"],
        "attacks": {part: _attack(folders[f"attack.{part}"]) for part in recipe.attack},
        "same_items": _same_items(folders),
        "measured": [row for name in folders for row in _measured(name, folders[name])],
        "certificates": {part: _certificate(folders[f"certify.{part}"]) for part in recipe.certify},
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _training(folder: Path) -> dict[str, Any]:
    history = _read(folder / "history.json")["rows"]
    weights = sum(array.size for array in load_file(folder / "model/model.safetensors").values())
    return {
        "epochs": len(history),
        "num_weights": weights,
        **{key: history[-1].get(key) for key in ("val_accuracy", "val_robust_accuracy")},
    }


def _attack(folder: Path) -> dict[str, Any]:
    models = _read(folder / "summary.json")["models"]
    kept = ("clean_accuracy", "robust_accuracy", "num_items")
    return {
        model: {key: found[key] for key in kept}
        | {"attacks": [attack["name"] for attack in found["attacks"]]}
        | {"verdict": found["sanity"]["verdict"], "reasons": found["sanity"]["reasons"]}
        for model, found in models.items()
    }


def _same_items(folders: Mapping[str, Path]) -> dict[str, int]:
    """Robust items of `main` under both lists, counted on the items that AutoAttack attacked."""
    robust = {}
    for part in ("linf", "autoattack"):
        table = pd.read_parquet(folders[f"attack.{part}"] / "attacks.parquet")
        table = table[table["model"] == "main"].set_index("item_id")
        robust[part] = table["adversarial_prediction"] == table["label"]
    items = robust["autoattack"].index
    counts = {part: int(verdicts[items].sum()) for part, verdicts in robust.items()}
    return {"num_items": len(items), **counts}


def _measured(step: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of suites and studies, without single corruptions."""
    if not step.startswith(("evaluate", "analyze")):
        return []
    names = ("suite", "model", "item", "metric", "level", "value", "n", "lo95", "hi95")
    return [
        {name: getattr(row, name) for name in names}
        for row in read_metrics(folder / METRICS_NAME)
        if row.value is not None
        and row.suite in SHOWN
        and not (row.suite == CORRUPTIONS and row.item != ALL)
    ]


def _certificate(folder: Path) -> dict[str, Any]:
    document = _read(folder / "certificate.json")
    summary = document["summary"]
    return {
        "sound": document["sound"],
        "settings": document["evidence"]["settings"],
        "standard_accuracy": summary["standard_accuracy"],
        "certified": summary["certified"],
        "challenge": _read(folder / "challenge.json"),
    }


def render(found: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [INTRODUCTION.format(recipe=RECIPE, data=found["time"]["data"], short=_short(found))]
    parts += [_time(found), _trainings(found), _attacks(found), _suites(found), _inside(found)]
    parts += [_certificates(found)]
    notes = "\n".join(f"- {note}" for note in found["time"]["notes"])
    return "\n".join([*parts, f"## What did not work\n\n{notes}\n"])


def _short(found: Mapping[str, Any]) -> str:
    """One line for each of the main results."""
    whole = found["attacks"]["autoattack"]["main"]
    lines = [
        f"- {MODELS[model]}: {cut(one['clean_accuracy']['value'])} % of {one['num_items']} test items are right, "
        f"{cut(one['robust_accuracy']['value'])} % under {' + '.join(one['attacks'])} at {EPS}."
        for model, one in found["attacks"]["linf"].items()
    ]
    lines.append(
        f"- {MODELS['main']} under AutoAttack: {cut(whole['robust_accuracy']['value'])} % of {whole['num_items']} items."
    )
    for part in ("patch", "l2"):
        one = found["certificates"][part]
        first, num_items = one["certified"][0], one["standard_accuracy"]["num_items"]
        budget = (
            f"a patch of {first['patch_size']} pixel"
            if "patch_size" in first
            else f"l2 {first['radius']:g}"
        )
        model = MODELS["columns" if "patch_size" in first else "noisy"]
        lines.append(
            f"- {model}: {cut(first['accuracy']['value'])} % of {num_items} items are certified against {budget}."
        )
    return "\n".join(lines)


def cut(share: float) -> str:
    """A share in percent; decimals are cut off, never rounded up."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}"


def _share(entry: Mapping[str, Any]) -> str:
    """A share with its interval; the interval is rounded outwards."""
    share = shown(entry)
    return f"{cut(entry['value'])} [{', '.join(interval_ends(share['low'], share['high']))}]"


def _table(rows: Iterable[Mapping[str, object]]) -> str:
    return page.markdown(pd.DataFrame(rows).fillna(""))


def _time(found: Mapping[str, Any]) -> str:
    time = found["time"]
    rows = [{"what": key, "minutes": value} for key, value in time["minutes"]]
    return f"## Time\n\n{_table(rows)}\n{time['remark']}\n"


def _trainings(found: Mapping[str, Any]) -> str:
    rows = [
        {
            "model": MODELS[name],
            "weights": f"{one['num_weights']:,}",
            "epochs": one["epochs"],
            "validation, %": cut(one["val_accuracy"]),
            f"under PGD-10 at {EPS}, %": ""
            if one["val_robust_accuracy"] is None
            else cut(one["val_robust_accuracy"]),
        }
        for name in MODELS
        for one in [found["training"][name]]
    ]
    trials = [
        {
            **{key.rpartition(".")[2]: value for key, value in row["values"].items()},
            "epochs": row["epochs"],
            "validation under attack, %": _share(row["val_robust_accuracy"]),
            "tied with the best": "yes" if row["tied_with_best"] else "no",
        }
        for row in found["tune"]
    ]
    text = "The columns model is validated on ablations, the noisy one on noisy images."
    return f"## Training and tuning\n\n{_table(rows)}\n{text}\n\n{_table(trials)}"


def _attacks(found: Mapping[str, Any]) -> str:
    rows = [
        {
            "model": MODELS[model],
            "attacks": " + ".join(one["attacks"]),
            "items": one["num_items"],
            "clean, %": _share(one["clean_accuracy"]),
            "robust, %": _share(one["robust_accuracy"]),
            "sanity checks": one["verdict"],
        }
        for part in ("linf", "autoattack")
        for model, one in found["attacks"][part].items()
    ]
    reasons = [
        f"{MODELS[model]}: {reason}."
        for part in ("linf", "autoattack")
        for model, one in found["attacks"][part].items()
        for reason in one["reasons"]
    ]
    same = found["same_items"]
    text = (
        f"On the {same['num_items']} items of AutoAttack alone, the other list leaves {same['linf']} robust and "
        f"AutoAttack {same['autoattack']}.\n"
    )
    return "\n".join([f"## Attacks, l-inf at {EPS}\n", _table(rows), text, *reasons])


def _rows_of(found: Mapping[str, Any], **where: Any) -> list[dict[str, Any]]:
    return [r for r in found["measured"] if all(r[key] == value for key, value in where.items())]


def _one(found: Mapping[str, Any], **where: Any) -> str:
    """The only number with these names, as a share."""
    (row,) = _rows_of(found, **where)
    return cut(row["value"])


def _suites(found: Mapping[str, Any]) -> str:
    """Evaluation: corruptions, transferred perturbations, rotations and shifts."""
    rows = []
    for model in EVALUATED:
        of = {"model": model}
        row = {
            "model": MODELS[model],
            "clean, %": _one(found, **of, suite="clean", item=ALL, metric="accuracy"),
        }
        row["15 corruptions, %"] = _one(found, **of, suite=CORRUPTIONS, item=ALL, metric="mean75")
        for group in GROUPS:
            row[f"{group}, %"] = _one(
                found, **of, suite=CORRUPTIONS, item=ALL, metric=f"mean_{group}"
            )
        for source in EVALUATED:
            (transfer,) = _rows_of(
                found, **of, suite="transfer", item=f"pgd/{source}", metric="accuracy"
            )
            row[f"PGD of {MODELS[source]}, %"] = cut(transfer["value"])
        (grid,) = {r["item"] for r in _rows_of(found, **of, suite="spatial") if "x" in r["item"]}
        row["worst rotation and shift, %"] = _one(
            found, **of, suite="spatial", item=grid, metric="accuracy"
        )
        rows.append(row)
    (clean,) = {r["n"] for r in _rows_of(found, suite="clean", item=ALL, metric="accuracy")}
    (moved,) = {
        r["n"] for r in _rows_of(found, suite="spatial", metric="accuracy") if "x" in r["item"]
    }
    text = f"{clean} test items, rotations and shifts {moved}. Corruptions at five severities; perturbations of {EPS}."
    return f"## Evaluation\n\n{_table(rows)}\n{text}\n"


def _inside(found: Mapping[str, Any]) -> str:
    """Lesions and correlation."""
    lesions, pairs = [], []
    for model in EVALUATED:
        row = {
            "model": MODELS[model],
            "whole, %": _one(found, model=model, suite="lesions", item="none", metric="accuracy"),
        }
        for part, name in PARTS.items():
            single = _rows_of(
                found, model=model, suite="lesions", item=part, metric="single_accuracy"
            )
            row[f"without one {name}, by block, %"] = ", ".join(
                cut(r["value"]) for r in sorted(single, key=lambda r: r["level"])
            )
        lesions.append(row)
        near = [
            r
            for r in _rows_of(found, model=model, suite="correlation", metric="pearson_flat")
            if _neighbours(r["item"])
        ]
        pairs.append(
            {"model": MODELS[model]}
            | {r["item"].replace("all/", "blocks "): f"{r['value']:.2f}" for r in near}
        )
    return f"## Inside\n\n{_table(lesions)}\nCorrelation of the outputs of neighbouring blocks, all tokens:\n\n{_table(pairs)}"


def _neighbours(item: str) -> bool:
    tokens, _, pair = item.partition("/")
    first, _, second = pair.partition("-")
    return tokens == "all" and second.isdigit() and int(second) == int(first) + 1


def _certificates(found: Mapping[str, Any]) -> str:
    texts = ["## Certificates\n"]
    for part in ("patch", "l2"):
        one = found["certificates"][part]
        patch = "patch_size" in one["certified"][0]
        budgets = {
            (f"{e['patch_size']}x{e['patch_size']}" if patch else f"{e['radius']:g}"): e["accuracy"]
            for e in one["certified"]
        }
        model = MODELS["columns" if patch else "noisy"]
        num_items = one["standard_accuracy"]["num_items"]
        kind = "patch" if patch else "l2 radius"
        table = [{kind: budget, "certified, %": _share(share)} for budget, share in budgets.items()]
        hit = one["challenge"]
        texts.append(
            f"**{part}**: {model}, {num_items} test items, smoothed accuracy "
            f"{_share(one['standard_accuracy'])} %. The {hit['attack']} broke {hit['broken_certified']} certified items "
            f"of the {hit['num_items']} that it tried.\n\n{_table(table)}"
        )
    texts.append(
        "Every claim was computed again from its votes when this page was made. `casemate verify` does the same.\n"
    )
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.replications.demo_cifar10")
    parser.add_argument(
        "--storage", type=Path, help="the finished run; default: the figures kept here"
    )
    parser.add_argument("--time", type=Path, help="JSON of what was measured outside of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="as the run had them"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    kept = given.out / f"{RECIPE}.json"
    if given.storage:
        time = _read(given.time) if given.time else _read(kept)["time"]
        write_json(kept, collect(given.storage, time, given.set))
    write_text(kept.with_suffix(".md"), render(_read(kept)))


if __name__ == "__main__":
    main()
