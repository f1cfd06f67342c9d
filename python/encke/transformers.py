"""``import encke.transformers`` registers ``attn_implementation="encke"``; see
:mod:`encke.integrations.transformers`."""

from encke.integrations.transformers import register

__all__ = ["register"]

register()
