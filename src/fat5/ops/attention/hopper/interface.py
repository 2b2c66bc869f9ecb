"""The parts of Gluon's interface that move between Triton's versions, under one name each.

Only this file knows where they stand. A Triton that lacks one of them fails here, at import, and attention then runs on
the portable kernels.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# async_copy_global_to_shared and async_copy_shared_to_global became async_load and async_store after 3.6.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# Shared memory under another type, shape and layout: a method with a public name since 3.7.
_buffer = gl.shared_memory_descriptor
reinterpret = _buffer.reinterpret if hasattr(_buffer, "reinterpret") else _buffer._reinterpret

# The barrier of a warp group's own threads.
group_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile in shared memory to global memory, as `async_atomic_add` does since 3.7: 3.6 hides it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def await_previous():
    """Wait until the kernel before this one has ended and what it wrote is to be seen.

    At once over, unless this kernel was launched ahead of that end: see `dependent_launch.py`.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_next():
    """Let the kernel after this one, if it is to be launched early, start as this one's programs end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
