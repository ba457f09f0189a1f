"""Cost of a training: passes of every epoch by its objective, and of the validation after it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from components.attacks.settings import ApgdSettings, PgdSettings
from components.certify.cost import CostedModel
from components.certify.estimate import patch_work
from components.certify.patch.cost import ablation_lengths
from components.certify.patch.settings import AblationSettings
from components.core.errors import CasemateError
from components.core.pass_counts import CLEAN, NO_PASSES, PassCounts
from components.models.costs import costs_of_shapes
from components.models.tokens import patch_size_of
from components.train.objectives.settings import ObjectiveSettings, UserObjectiveSettings
from components.train.settings import TrainSettings
from pipelines.recipe import denoisers
from pipelines.recipe.costs import (
    MACS,
    AtOneLevel,
    CostedNetwork,
    Question,
    StepCost,
    Work,
    image_side,
    network_of,
    num_training_items,
    unknown_step,
)
from pipelines.recipe.facts import known_channels, source_info
from pipelines.recipe.schema.recipe import MAIN, Recipe

OPTIMIZER_STATES = {"adamw": 2, "sgd": 1}  # values that an optimiser keeps of each weight
KEPT_CHECKPOINTS = 2
FILES = 4  # model.safetensors, model.json, history.json, metrics.json


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One step per trained model."""
    if recipe.train is None:
        return []
    return [_step(recipe, model, asked) for model in recipe.model_names()]


def _step(recipe: Recipe, model: str, asked: Question) -> StepCost:
    step = f"train.{model}"
    try:
        training = TrainingCost.of(recipe, model, asked)
    except CasemateError as error:
        return unknown_step(step, error)
    kept = training.network.weight_bytes
    return StepCost(
        step=step,
        num_items=training.num_train,
        works=training.works(asked),
        memory=training.memory(asked.num_workers or recipe.cluster.train_workers),
        storage=kept,
        objects=FILES + bool(recipe.model_of(model).pretrained),
        num_workers=recipe.cluster.train_workers,
        assumed=training.assumed(asked),
        own={
            "epochs": training.epochs,
            "steps": training.epochs * training.num_steps,
            "checkpoint_bytes": KEPT_CHECKPOINTS * training.state_bytes(),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """The passes of one model's training."""

    recipe: Recipe
    model: str
    train: TrainSettings
    objective: ObjectiveSettings
    epochs: int
    num_train: int
    num_val: int
    network: CostedNetwork
    flops: float
    """Of a forward pass in training, where tokens may be dropped."""
    denoiser_flops: float
    """Of the denoiser in front of each forward pass."""

    @staticmethod
    def of(
        recipe: Recipe, model: str, asked: Question, *, train_items: int | None = None
    ) -> "TrainingCost":
        """`train_items`: how many a trial uses at most."""
        assert recipe.train is not None
        num_train, num_val = num_training_items(recipe, asked)
        network, objective = network_of(recipe, model), recipe.objective_of(model)
        return TrainingCost(
            recipe=recipe,
            model=model,
            train=recipe.train,
            objective=objective,
            epochs=recipe.epochs_of(model),
            num_train=min(num_train, train_items or num_train),
            num_val=num_val,
            network=network,
            flops=_seen_flops(recipe, model, network),
            denoiser_flops=_denoiser_flops(recipe, model),
        )

    @property
    def batch_size(self) -> int:
        """Items of a step; a set smaller than a batch is one."""
        real = self._real_size()
        return self.train.batch_size if self._num_samples() >= real else self._num_samples()

    @property
    def num_steps(self) -> int:
        """Whole batches of an epoch."""
        return max(self._num_samples() // self._real_size(), 1)

    def _num_samples(self) -> int:
        augment = self.train.augment
        return self.num_train * (augment.copies if augment.clean_copy else 1)

    def _real_size(self) -> int:
        size, synthetic = self.train.batch_size, self.recipe.data.synthetic
        return size - (int(Fraction(str(synthetic.ratio)) * size) if synthetic else 0)

    def epoch_counts(self, epoch: int) -> PassCounts:
        """Passes of an epoch, its search of scales included."""
        own, num_steps = self.objective, self.num_steps
        per_item = own.epoch_counts(epoch, num_steps=num_steps)
        searched = own.search_counts(epoch, num_steps=num_steps, batch_size=self.batch_size)
        return self.batch_size * num_steps * per_item + searched

    def attack_counts(self) -> PassCounts:
        """Passes of a validation item that withstands the attack after every epoch."""
        train = self.train
        if train.validation_eps(self.objective) is None or self.objective.is_denoiser:
            return NO_PASSES
        if train.val_attack == "train":
            return 2 * CLEAN + self.objective.craft_counts()
        settings = ApgdSettings if train.val_attack == "apgd-ce" else PgdSettings
        return settings(num_steps=train.val_steps).pass_counts(2)

    def works(self, asked: Question) -> list[Work]:
        """Steps, and validation after every epoch."""
        most = sum(self.epoch_counts(epoch).cost for epoch in range(self.epochs))
        forward = sum(self.epoch_counts(epoch).forward for epoch in range(self.epochs))
        behind = forward * self.denoiser_flops / most if most else 0.0
        clean = self.epochs * self.num_val * self.objective.validation_counts().cost
        attacked = self.epochs * min(self.train.val_items, self.num_val)
        heavy, light = self.attack_counts().cost, 1.0 if self.attack_counts().cost else 0.0
        low, high = asked.between(attacked * light, attacked * heavy)
        steps = Work(
            what="steps",
            most=most,
            least=most,
            flops=self.flops + behind,
            net=self.network.net,
            probe=lambda lab: lab.training(self).steps,
        )
        validation = Work(
            what="validation",
            most=clean,
            least=clean,
            flops=self.flops + self.denoiser_flops,
            net=self.network.net,
            probe=lambda lab: lab.training(self).validation,
        )
        attack = Work(
            what="attacked validation",
            most=high,
            least=low,
            flops=self.network.flops,
            net=self.network.net,
            probe=lambda lab: lab.training(self).attacked,
        )
        return [steps, validation, *([attack] if heavy else [])]

    def state_bytes(self) -> int:
        """A checkpoint: weights, what the optimiser keeps of them, averages and the best ones."""
        train = self.train
        copies = 1 + OPTIMIZER_STATES[train.optimizer.kind]
        copies += (train.average is not None) + (train.select == "best")
        return copies * self.network.weight_bytes

    def memory(self, num_workers: int) -> int:
        """Bytes of one of the workers at most: its state, the gradient and activations of its share
        of a batch.
        """
        share = -(-self.batch_size // num_workers)
        rows = min(share, self.train.micro_batch or share)
        passes = max(self.objective.epoch_counts(self.epochs - 1, num_steps=1).to_weights, 1)
        activations = rows * passes * self.network.costs.activation_bytes
        return int(self.state_bytes() + self.network.weight_bytes + activations)

    def assumed(self, asked: Question) -> list[str]:
        """What the figures hold for."""
        found = []
        if self.train.patience is not None:
            found.append("patience does not end the training early")
        if self.train.recompute:
            found.append("activations are kept: recompute needs less memory and more time")
        if isinstance(self.objective, UserObjectiveSettings) and not hasattr(
            self.objective.settings, "epoch_counts"
        ):
            found.append(f"a step of {self.objective.kind.rpartition(':')[2]} is a plain step")
        if self.attack_counts().cost and asked.withstand is None:
            found.append("from no to all validation items withstand the attack on them")
        return found


def _seen_flops(recipe: Recipe, model: str, network: CostedNetwork) -> float:
    """FLOPs of a forward pass; on average over positions where hidden tokens are dropped."""
    section, trained = recipe.model_of(model), recipe.objective_of(model).trained_ablation()
    blocks = getattr(network.net, "blocks", None)
    if trained is None or section.token_policy != "drop" or blocks is None:
        return network.flops
    (kind, band), side = trained, image_side(recipe)
    channels = known_channels(recipe.data) or 3
    costed = CostedModel(
        key="train.objective",
        net=network.net,
        costs=network.costs,
        channels=channels,
        num_classes=source_info(recipe.data).num_classes or 2,
        side=side,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        trained_ablation=trained,
    )
    token = patch_size_of(network.net)
    every = AblationSettings(
        kind=kind,  # type: ignore[arg-type]
        model=MAIN,
        patch_sizes=(1,),
        band=min(band, side),
    )
    work = patch_work(
        num_items=1,
        bands_of_length=ablation_lengths(every, costed, token=token),
        width=int(getattr(network.net, "embed_dim")),  # noqa: B009
        depth=len(blocks),
        num_classes=costed.num_classes,
        token_inputs=channels * token[0] * token[1],
        num_prefix=int(getattr(network.net, "num_prefix_tokens", 1)),
    )
    return work.flops_per_item / work.passes_per_item


def _denoiser_flops(recipe: Recipe, model: str) -> float:
    """FLOPs of one pass of the denoiser that a classifier is trained behind."""
    objective = recipe.objective_of(model)
    if objective.denoiser_name is None:
        return 0.0
    side, channels = image_side(recipe), known_channels(recipe.data) or 3
    key = f"{recipe.objective_key(model)}.objective"
    found = denoisers.check_use(recipe, key, objective, channels=channels, side=side)
    if found is None:
        source = denoisers.folder_behind(recipe, objective.denoiser_name)
        remedy = "is not on this machine: what it costs is unknown; estimate where it is"
        raise CasemateError(f"{key}.denoiser", source, remedy)
    net = AtOneLevel(found.network(image_size=side, channels=channels))
    return float(MACS * costs_of_shapes(net, image_size=side, channels=channels).flops)


def mean_works(trials: Sequence[Sequence[Work]]) -> list[Work]:
    """The same kinds of work, on average over trials."""
    named: dict[str, list[Work]] = {}
    for works in trials:
        for work in works:
            named.setdefault(work.what, []).append(work)
    found = []
    for own in named.values():
        most = sum(work.most for work in own)
        flops = sum(work.most * work.flops for work in own) / most if most else 0.0
        least, count = sum(work.least for work in own), len(trials)
        found.append(replace(own[0], most=most / count, least=least / count, flops=flops))
    return found
