"""What a terminal was sent, as lines of text."""

import re

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(written: str) -> list[str]:
    """Lines without control sequences; what is drawn over another line is a line of its own."""
    return CONTROL.sub("", written).replace("\r", "\n").split("\n")
