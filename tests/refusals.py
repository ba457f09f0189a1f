"""How a call refuses bad input."""

from collections.abc import Callable
from typing import Any

import pytest

from components.core.errors import CasemateError


def refusal_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The one line of the error that `call` raises."""
    with pytest.raises(CasemateError) as caught:
        call(*arguments, **options)
    (line,) = str(caught.value).splitlines()
    return line
