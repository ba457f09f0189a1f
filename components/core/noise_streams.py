"""Addresses of the draws of l2 certificates. Light to import: fingerprints depend on it.

Changing `NOISE_IMPL` changes every l2 certificate: it is part of their identity.
"""

NOISE_IMPL = "certv1-philox-numpy"
PLAIN_METHOD = "fixed"  # its stream names have no prefix


def noise_impl(method: str) -> str:
    """Address scheme of the draws of an l2 certificate, as recorded with its votes."""
    return NOISE_IMPL if method == PLAIN_METHOD else f"{NOISE_IMPL}-{method}"


def noise_stream(method: str, stream: str) -> str:
    """Stream from which a method draws; the votes record it as `stream`.

    Methods never share draws: choosing another method after seeing votes needs new draws, and a
    re-run detects votes of another method.
    """
    return stream if method == PLAIN_METHOD else f"{method}-{stream}"
