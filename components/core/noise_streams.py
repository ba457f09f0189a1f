"""How the draws of l2 certificates are addressed. Light to import: fingerprints depend on it.

Changing `NOISE_IMPL` changes every l2 certificate: it is part of their identity.
"""

NOISE_IMPL = "certv1-philox-numpy"
PLAIN_METHOD = "fixed"  # its streams have the bare names


def noise_impl(method: str) -> str:
    """How the draws of an l2 certificate are addressed, as its votes record it."""
    return NOISE_IMPL if method == PLAIN_METHOD else f"{NOISE_IMPL}-{method}"


def noise_stream(method: str, stream: str) -> str:
    """The stream from which a method draws what the votes call `stream`.

    No two methods share draws: choosing another method after seeing votes needs new draws, and
    votes of another method are detected when they are repeated.
    """
    return stream if method == PLAIN_METHOD else f"{method}-{stream}"
