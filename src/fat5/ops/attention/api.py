"""`flash_attention`: one attention function for padded and packed batches, with T5's bias and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fat5.ops.attention.backends import choose_backend, torch_attention
from fat5.ops.attention.bias import AlibiBias, AttentionBias, DenseBias, DistanceBias, RelativeBias
from fat5.ops.attention.one_query import attend_one_query
from fat5.ops.attention.problem import Problem
from fat5.ops.operators import call, plain_calls

if TYPE_CHECKING:
    from fat5.ops.attention.plan import AttentionPlan

_MAX_SEED = 2**31 - 1


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: AttentionBias | None = None,
    causal: bool = False,
    softmax_scale: float = 1.0,
    query_offset: int | Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window_size: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    plan: AttentionPlan | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention whose scores never exist all at once: `softmax(softmax_scale * q k^T + bias) v`.

    The position of query i is `i + query_offset`, that of key j is j. The bias is a function of their distance
    `j - i - query_offset`; causal attention shows key j to query i where that distance is at most 0, so that the
    corner of the last query and the last key is visible by default. A row that sees no key gives 0 and passes no
    gradient. Accumulation is in float32 (float64 for float64 inputs); memory is linear in the length for every bias
    but a dense one.

    Args:
        q: [B, Lq, H, D], or packed [total_q, H, D].
        k: [B, Lk, H, D], or packed [total_k, H, D]; type and device of q.
        v: shaped as k.
        bias: `RelativeBias`, `DistanceBias`, `AlibiBias`, `DenseBias` (not packed) or None. Its gradient is summed in
            float32 (the one-pass backward of `hopper` adds tiles near the diagonal in the type of q).
        causal: hide the keys that come after the query.
        softmax_scale: factor of the scores. T5's is 1.0, the default; others use `D ** -0.5`.
        query_offset: int or int tensor [B] (packed: [documents]). By default Lk - Lq, of each document when packed.
        key_starts: int tensor [B], index of the first real key of each row; by default 0. Moves no position.
        key_lengths: int tensor [B], number of real keys from there on; by default all that remain. What the other
            slots of k and v hold does not matter, be it NaN.
        window_size: reserved, None.
        cu_seqlens_q: int tensor [documents + 1], offsets of the documents in packed q, from 0. Tail entries that
            repeat the last offset are empty documents; rows beyond it give 0.
        cu_seqlens_k: the same for k and v. Both name the same documents in order; one without keys gives 0.
        max_seqlen_q: length of the longest document, or an upper bound, as a host int; needed when packed.
        max_seqlen_k: the same for k.
        dropout_p: probability of dropping an attention weight; the seed is drawn from the device's torch generator.
        plan: what `plan_attention` made for this call and others with the same lengths and bias. It saves time, and is
            left aside where it does not fit.
        backend: "auto" for the fastest that takes these inputs, or a name in `BACKENDS`.

    Returns:
        Shaped and typed as q. Under autocast, q, k and v are cast to autocast's type at the door.

    Raises:
        ValueError: shapes, types or devices that do not fit, or an unknown backend.

    Source: Dao et al., FlashAttention (2022); Raffel et al., T5 (2020).
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    if softmax_scale < 0:  # the kernels take the maximum before the scale
        q, softmax_scale = -q, -softmax_scale
    arguments = op_arguments(
        q, k, v, bias=bias, causal=causal, softmax_scale=softmax_scale, query_offset=query_offset,
        key_starts=key_starts, key_lengths=key_lengths, window_size=window_size, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, dropout_p=dropout_p,
        plan=plan,
    )  # fmt: skip
    op = choose_backend(backend, q)
    if op is torch_attention and plain_calls():
        out = attend_one_query(Problem(q, k, v, *arguments))
        if out is not None:
            return out
    out, _ = call(op, q, k, v, *arguments)
    return out


def autocast(x: Tensor) -> Tensor:
    """Return a tensor in autocast's type where autocast is on."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def op_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: AttentionBias | None = None,
    causal: bool = False,
    softmax_scale: float = 1.0,
    query_offset: int | Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window_size: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    plan: AttentionPlan | None = None,
) -> tuple[Any, ...]:
    """Check the arguments of `flash_attention`, and return what its custom ops take behind the tensors."""
    if window_size is not None:
        raise ValueError(f"got window_size={window_size!r}; it is reserved and must be None in this version")
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_inputs(q, k, v, packed)
    if packed:
        _check_packed(bias, key_starts, key_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise ValueError("got max_seqlen_q or max_seqlen_k without cu_seqlens; they belong to packed inputs")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"got dropout_p={dropout_p}; expected 0 <= dropout_p < 1")
    rows = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    for name, value in (("query_offset", query_offset), ("key_starts", key_starts), ("key_lengths", key_lengths)):
        if isinstance(value, Tensor):
            _check_row_values(name, value, rows, q.device)
    bias_tensor, bias_kind = _unpack_bias(q, k, bias, packed)

    offset = query_offset if not isinstance(query_offset, Tensor) else None
    if query_offset is None and not packed:
        offset = k.shape[1] - q.shape[1]
    arguments = (
        bias_tensor,
        bias_kind,
        offset,
        query_offset if isinstance(query_offset, Tensor) else None,
        key_starts,
        key_lengths,
        cu_seqlens_q,
        cu_seqlens_k,
        float(softmax_scale),
        causal,
        float(dropout_p),
        torch.randint(_MAX_SEED, (), device=q.device) if dropout_p > 0 else None,
        None,
    )
    return arguments if plan is None or not plan.fits(q, k, arguments) else (*arguments[:-1], plan.content)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    ndim, layout = (3, "[total, heads, head_dim]") if packed else (4, "[batch, length, heads, head_dim]")
    if not q.ndim == k.ndim == v.ndim == ndim:
        raise ValueError(f"got {_shapes(q, k, v)}; expected {'packed' if packed else 'padded'} inputs {layout}")
    if k.shape != v.shape or q.shape[-2:] != k.shape[-2:] or (not packed and q.shape[0] != k.shape[0]):
        raise ValueError(
            f"got {_shapes(q, k, v)}; expected k and v alike, and the batch, heads and head_dim of q: {layout}"
        )
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"got {kinds}; expected one floating type and one device")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _check_packed(
    bias: AttentionBias | None,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError(
            "packed attention needs all four of cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; got "
            f"{[x is not None for x in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)]}"
        )
    if isinstance(bias, DenseBias):
        raise ValueError("got a DenseBias with packed inputs; a dense bias has no packed form: pad the batch instead")
    if key_starts is not None or key_lengths is not None:
        raise ValueError("got key_starts or key_lengths with packed inputs; cu_seqlens alone say which keys are real")
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] < 1:
        raise ValueError(
            f"got cu_seqlens_q {list(cu_seqlens_q.shape)} and cu_seqlens_k {list(cu_seqlens_k.shape)}; "
            "expected one dimension and the same number of documents in both"
        )
    for name, offsets, longest in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        if offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"got cu_seqlens_{name} of type {offsets.dtype}; expected int32 or int64")
        # On a GPU this would wait for the device, and in a traced graph there is no value to look at.
        if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and offsets.shape[0] > 1:
            found = int((offsets[1:] - offsets[:-1]).max())
            if found > longest:
                raise ValueError(f"got a document of {found} tokens with max_seqlen_{name}={longest}; raise the latter")


def _check_row_values(name: str, value: Tensor, rows: int, device: torch.device) -> None:
    if value.shape != (rows,) or value.dtype not in (torch.int32, torch.int64) or value.device != device:
        raise ValueError(
            f"got {name} {list(value.shape)} {value.dtype} on {value.device}; "
            f"expected an int32 or int64 tensor [{rows}] on {device}"
        )


def _unpack_bias(q: Tensor, k: Tensor, bias: AttentionBias | None, packed: bool) -> tuple[Tensor | None, str]:
    """Return the tensor that stands for the bias in a custom op, and its kind."""
    if bias is None:
        return None, "none"
    if isinstance(bias, RelativeBias):
        bias = bias.by_distance()
    if isinstance(bias, DistanceBias):
        tensor, kind = bias.table, "distance"
    elif isinstance(bias, AlibiBias):
        tensor, kind = bias.slopes, "alibi" if bias.symmetric else "alibi-signed"
    elif isinstance(bias, DenseBias):
        tensor, kind = bias.tensor, "dense"
        (batch, queries, heads, _), keys = q.shape, k.shape[1]
        of_batch, of_heads, of_queries, of_keys = tensor.shape
        fits = of_batch in (1, batch) and of_heads in (1, heads) and of_queries in (1, queries) and of_keys == keys
        if not fits:
            raise ValueError(
                f"got a dense bias {list(tensor.shape)} for q {list(q.shape)} and k {list(k.shape)}; "
                f"expected [{batch} or 1, {heads} or 1, {queries} or 1, {keys}]"
            )
    else:
        raise ValueError(
            f"got a bias of type {type(bias).__name__}; "
            "expected RelativeBias, DistanceBias, AlibiBias, DenseBias or None"
        )
    if tensor.device != q.device:
        raise ValueError(f"got a bias on {tensor.device} for queries on {q.device}; expected one device")
    heads = q.shape[1 if packed else 2]
    if not isinstance(bias, DenseBias) and bias.num_heads != heads:
        raise ValueError(f"got a bias of {bias.num_heads} heads for queries of {heads} heads")
    return tensor, kind
