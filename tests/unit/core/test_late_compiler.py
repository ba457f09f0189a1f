"""Processes with a network do not load torch's compiler; what needs it still finds it."""

import subprocess
import sys

LIGHT = """
import sys
import pipelines.runtime.actors, pipelines.runtime.devices
from pipelines.stages.analyze import worker
from pipelines.stages.attack import worker
from pipelines.stages.certify import worker
from components.models.zoo import OWN
from components.train import session
import timm, torch, torchvision
heavy = ("torch._dynamo", "sympy", "pydantic", "ray.autoscaler", "mlflow", "pandas", "scipy.stats")
print([name for name in heavy if name in sys.modules])
boxes = torch.tensor([[0, 0.0, 0.0, 4.0, 4.0]])
print(torchvision.ops.roi_align(torch.ones(1, 1, 8, 8), boxes, 1).item())
from timm.layers import disable_compiler
print(disable_compiler(lambda x: x + 1)(2), "torch._dynamo" in sys.modules)
weight = torch.nn.Parameter(torch.ones(2))
for compiled in (False, True):  # the same steps with and without the compiler
    if compiled:
        print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    print(weight[0].item(), weight.grad, torch.is_grad_enabled(), "torch._dynamo" in sys.modules)
print(sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu"))
"""


def test_workers_load_the_compiler_only_when_something_is_compiled():
    """Fails when a release of one of the three changes its import: `late_compiler` follows."""
    run = [sys.executable, "-c", LIGHT]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    steps = ["0.5 None True False", "2.0", "0.0 None True True"]
    assert said == ["[]", "1.0", "3 False", *steps, "True"]
