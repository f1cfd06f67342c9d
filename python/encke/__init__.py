"""Exact ring and dilated attention, forward and backward, for sequences too long for one device."""

from encke._encke import __version__

__all__ = ["__version__"]
