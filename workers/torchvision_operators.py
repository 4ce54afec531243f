"""`workers.images.torchvision_operators`, under the name that installations of version 0.3 look for."""

from workers.images.torchvision_operators import install

__all__ = ["install"]
