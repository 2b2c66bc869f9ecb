"""The compilations of every family of kernels but attention: a module each, found by `tests.ops.compile_gate`.

A module has `KERNELS`, its kernels by name, and `cases(everything)`, which returns the compilations: with `everything`
those of every row and flag, without it the worst.
"""
