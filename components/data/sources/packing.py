"""Packed arrays whose declared size is checked before any of it is unpacked."""

from components.core.errors import CasemateError

UNCHECKED = 2**28  # bytes; less than this fits any machine
MAX_RATIO = 200  # unpacked to packed; images of photographs and digits reach 20


def check_ratio(where: object, *, packed: int, unpacked: int) -> None:
    """Refuse a small file that unpacks to a huge one, as no file of images does."""
    if unpacked > UNCHECKED and unpacked > MAX_RATIO * packed:
        remedy = f"would unpack {packed:,} bytes to {unpacked:,}; store it uncompressed"
        raise CasemateError("data.path", where, remedy)
