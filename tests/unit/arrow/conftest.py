"""The fixture of both kernels."""

from tests.support.kernels import kernel

__all__ = ["kernel"]
