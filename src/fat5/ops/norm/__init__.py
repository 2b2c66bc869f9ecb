"""Root mean square normalisation."""

from fat5.ops.norm.api import add_rms_norm, rms_norm
from fat5.ops.norm.residual import add_residual

__all__ = ["add_residual", "add_rms_norm", "rms_norm"]
