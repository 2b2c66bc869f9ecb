"""Root mean square normalisation."""

from fat5.ops.norm.api import rms_norm

__all__ = ["rms_norm"]
