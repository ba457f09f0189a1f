"""Casemate from Python: everything that the command line does, for notebooks and scripts.

    from pipelines import api

    model = api.load_model(my_network, image_size=32)      # or "timm:resnet18", a folder, net.pt2
    api.attack(model, images, labels, eps=8 / 255)          # AutoAttack
    api.evaluate(model, images, labels, corruptions={}, spatial={})
    api.certify_patch(model, images, labels, patch_sizes=[5], band=4)
    api.certify_l2(model, images, labels, sigma=0.25)

Images are (N, C, H, W) pixels in [0, 1], or uint8. Attacks, suites and certificates are computed in
this process; `run` runs whole recipes on Ray. Importing this module is cheap: what a function needs
is imported when it is called.
"""

from pipelines.api.across_runs import Scaling, scaling
from pipelines.api.analyses import AnalysisReport, analyze
from pipelines.api.attacks import AttackReport, attack
from pipelines.api.cards import Card, card
from pipelines.api.certificates import (
    Certificate,
    TsvFile,
    certify_l2,
    certify_patch,
    export_tsv,
    load_certificate,
    recertify,
    verify,
)
from pipelines.api.clusters import doctor, manifest, submit
from pipelines.api.comparisons import ComparedModel, Comparison, compare
from pipelines.api.datasets import FetchedData, get_data
from pipelines.api.evaluations import EvaluationReport, evaluate
from pipelines.api.gates import Check, Gate, figures, gate
from pipelines.api.leaderboards import Leaderboard, leaderboard
from pipelines.api.models import load_model
from pipelines.api.published import ACCELERATOR, published
from pipelines.api.runs import (
    RunResult,
    estimate,
    lint,
    load_recipe,
    results,
    run,
    steps,
)
from pipelines.api.signatures import Signed, sign
from pipelines.api.starting import StartedRecipe, init
from pipelines.api.storages import Cleanup, flow_steps, flows, gc
from pipelines.api.tables import Accuracy

__all__ = [
    "ACCELERATOR",
    "Accuracy",
    "AnalysisReport",
    "AttackReport",
    "Card",
    "Certificate",
    "Check",
    "Cleanup",
    "ComparedModel",
    "Comparison",
    "EvaluationReport",
    "FetchedData",
    "Gate",
    "Leaderboard",
    "RunResult",
    "Scaling",
    "Signed",
    "StartedRecipe",
    "TsvFile",
    "analyze",
    "attack",
    "card",
    "certify_l2",
    "certify_patch",
    "compare",
    "doctor",
    "estimate",
    "evaluate",
    "export_tsv",
    "figures",
    "flow_steps",
    "flows",
    "gate",
    "gc",
    "get_data",
    "init",
    "leaderboard",
    "lint",
    "load_certificate",
    "load_model",
    "load_recipe",
    "manifest",
    "published",
    "recertify",
    "results",
    "run",
    "scaling",
    "sign",
    "steps",
    "submit",
    "verify",
]
