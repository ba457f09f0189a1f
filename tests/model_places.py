"""Models as users have them, and stand-ins for hubs and packages that tests cannot reach.

The programs and the code are real. The hub is a folder in the layout of Hugging Face's cache, read
by timm and huggingface_hub; `robustbench` is a package with the signatures of RobustBench's own.
"""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

SIDE, CLASSES = 8, 10
CODE = """
from torch import nn

SIDE = 8


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * SIDE * SIDE, num_classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def build(num_classes):
    return Net(num_classes)


def fixed():
    return build(10)
"""


def write_code(folder: Path) -> Path:
    """A file with a network and two functions that build it."""
    path = folder / "digit_net.py"
    path.write_text(CODE)
    return path


def digits() -> tuple[Tensor, Tensor]:
    """(N, 1, 8, 8) pixels in [0, 1] and labels."""
    found = load_digits()
    images = (torch.tensor(found.images) / 16 * 255).round() / 255
    return images.float()[:, None], torch.tensor(found.target)


def trained_network(folder: Path) -> nn.Module:
    """The network of `write_code`, trained for a second on noisy digits, in eval mode."""
    spec = spec_from_file_location("digit_net", write_code(folder))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    net: nn.Module = module.fixed()
    images, labels = digits()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(120):
        rows = torch.randint(1000, (64,))
        noisy = images[rows] + 0.1 * torch.randn(64, 1, SIDE, SIDE)
        loss = nn.functional.cross_entropy(net(noisy), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def export_pt2(net: nn.Module, path: Path, *, batch: int | None = None) -> Path:
    """A .pt2 file for any batch, or for batches of one size."""
    images = torch.rand(batch or 2, 1, SIDE, SIDE)
    shapes = ({0: torch.export.Dim("batch")},) if batch is None else None
    torch.export.save(torch.export.export(net, (images,), dynamic_shapes=shapes), str(path))
    return path


def write_repository(cache: Path, name: str, config: dict[str, Any], state: dict[str, Tensor]):
    """A repository as huggingface_hub keeps it in its cache after a download."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for file, content in config.items():
        (snapshot / file).write_text(json.dumps(content))
    save_file(
        {key: value.contiguous() for key, value in state.items()}, snapshot / "model.safetensors"
    )


TIMM_OPTIONS = {"patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}


def timm_config() -> dict[str, Any]:
    """config.json of a small ViT, as timm's `push_to_hf_hub` writes it."""
    return {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": CLASSES,
        "num_features": 16,
        "model_args": {**TIMM_OPTIONS, "img_size": SIDE, "in_chans": 1},
        "pretrained_cfg": {
            "input_size": [1, SIDE, SIDE],
            "fixed_input_size": True,
            "mean": [0.5],
            "std": [0.25],
            "num_classes": CLASSES,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


ROBUSTBENCH = {
    "__init__.py": "from robustbench.utils import load_model\n",
    "utils.py": """
from pathlib import Path
from typing import Optional, Union

import torch
from torch import nn

from robustbench.model_zoo import model_dicts as all_models
from robustbench.model_zoo.enums import BenchmarkDataset, ThreatModel


def load_model(model_name: str,
               model_dir: Union[str, Path] = './models',
               dataset: Union[str, BenchmarkDataset] = BenchmarkDataset.cifar_10,
               threat_model: Union[str, ThreatModel] = ThreatModel.Linf,
               custom_checkpoint: str = "",
               norm: Optional[str] = None) -> nn.Module:
    found = all_models[BenchmarkDataset(dataset)][ThreatModel(threat_model)][model_name]
    model = found['model']()
    path = Path(model_dir) / BenchmarkDataset(dataset).value / ThreatModel(threat_model).value
    print(f'Downloading {path}')
    model.load_state_dict(torch.load(path / f'{model_name}.pt'))
    return model.eval()
""",
    "model_zoo/__init__.py": "from robustbench.model_zoo.models import model_dicts\n",
    "model_zoo/enums.py": """
from enum import Enum


class BenchmarkDataset(Enum):
    cifar_10 = 'cifar10'
    cifar_100 = 'cifar100'
    imagenet = 'imagenet'


class ThreatModel(Enum):
    Linf = "Linf"
    L2 = "L2"
    corruptions = "corruptions"
""",
    "model_zoo/models.py": """
from collections import OrderedDict

from torch import nn

from robustbench.model_zoo.enums import BenchmarkDataset, ThreatModel


class Stand2020In(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x):
        return self.head(((x - 0.5) / 0.25).flatten(1))


model_dicts = OrderedDict([
    (BenchmarkDataset.cifar_10,
     OrderedDict([(ThreatModel.Linf,
                   OrderedDict([('Stand2020In', {'model': Stand2020In, 'gdrive_id': 'none'})]))])),
])
""",
}


def write_robustbench(folder: Path) -> Path:
    """A package robustbench below a folder, to be put on `sys.path`."""
    for name, text in ROBUSTBENCH.items():
        path = folder / "robustbench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
