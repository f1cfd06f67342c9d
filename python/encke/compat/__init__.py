"""Encke in the place of other packages' attention, inside their own models.

:mod:`encke.compat.torchscale`
    The dilated attention of torchscale's LongNet, and of packages that contain a copy of it, such
    as prov-gigapath's slide encoder.
"""
