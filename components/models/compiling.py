"""Networks compiled by torch.compile, in place; where that fails they stay as they were."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from components.models.pixels import PixelModel


def compile_network(model: PixelModel, *, rows: int = 2) -> str | None:
    """Compile the network in place; the reason if that fails, and then it stays as it was.

    The compiler needs a C++ compiler on CPUs and triton on GPUs. A pass on grey images tries it;
    other numbers of rows may be compiled anew.
    """
    net, spec = model.net, model.spec
    trial = torch.full((rows, spec.channels, spec.image_size, spec.image_size), 0.5)
    training = net.training
    try:
        net.compile()
        net.eval()  # no running statistics change
        with torch.no_grad(), _limits_are_errors():
            model(trial.to(model.mean.device))
    except Exception as error:
        net._compiled_call_impl = None
        said = " ".join(str(error).split()) or type(error).__name__
        return f"torch.compile failed: {said[:200]}"
    finally:
        net.train(training)
    return None


def _limits_are_errors() -> AbstractContextManager[None]:
    """After some networks of one class torch stops compiling without a word; here it says so."""
    import torch._dynamo  # loads the compiler

    limits: AbstractContextManager[None] = torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True
    )
    return limits


@contextmanager
def eager(net: nn.Module) -> Iterator[None]:
    """Run a compiled network by its own code inside the context.

    Compiled code does not notice hooks and replaced parts of a network.
    """
    compiled, net._compiled_call_impl = net._compiled_call_impl, None
    try:
        yield
    finally:
        net._compiled_call_impl = compiled
