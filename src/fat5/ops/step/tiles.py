"""Tiles of the kernel of a linear layer for a few rows."""

BM, MOST_COLUMNS = 16, 16
"""Rows of a program, the least that a matrix unit multiplies, and most columns."""

_MANY_COLUMNS = 1024


def parts(width: int) -> int:
    """Return in how many parts, one a warp, an input of this width is multiplied."""
    return 4 if width <= 512 else 8


def columns_of_program(columns: int) -> int:
    """Return how many columns one program takes: few, so that many programs share the weights."""
    return MOST_COLUMNS if columns > _MANY_COLUMNS else 8
