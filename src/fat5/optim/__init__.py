"""The optimizer, which parameters decay, and learning rate schedules."""

from fat5.optim.adamw_scale import AdamWScale
from fat5.optim.config import OptimizerConfig, ScheduleConfig, build_optimizer, build_schedule, is_sharded
from fat5.optim.groups import parameter_groups
from fat5.optim.schedules import get_schedule

__all__ = [
    "AdamWScale",
    "OptimizerConfig",
    "ScheduleConfig",
    "build_optimizer",
    "build_schedule",
    "get_schedule",
    "is_sharded",
    "parameter_groups",
]
