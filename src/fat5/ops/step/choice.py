"""`choose_next`: greedy search's choice, and what it notes of each row, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels

if HAS_TRITON:
    import triton

    from fat5.ops.launching import on_device
    from fat5.ops.step.choice_kernel import choice_kernel

BLOCK, WARPS = 16_384, 16


@dataclass(frozen=True)
class Rows:
    """What greedy search knows of its rows, all on one device and changed in place.

    Attributes:
        tokens: int64 [rows, 1], the last token of each.
        sequences: int64 [rows, room], all of them.
        places: int64 [rows], where in `sequences` the next one goes.
        lengths: int64 [rows], how many were chosen, the one that ended the row included.
        ended: bool [rows].
    """

    tokens: Tensor
    sequences: Tensor
    places: Tensor
    lengths: Tensor
    ended: Tensor


def choose_next(logits: Tensor, rows: Rows, eos: Tensor, pad_token_id: int, *, backend: str = "auto") -> None:
    """Append to each row its most likely token, or padding where it has ended.

    Compared are the logits as float32, and the lowest of equal tokens is taken, as in `torch.argmax`.

    Args:
        logits: [rows, vocabulary].
        rows: Changed in place.
        eos: int64 [n], the tokens that end a row; empty where none does.
        pad_token_id: Padding.
        backend: "auto", "torch", or "triton" for one kernel, on a GPU.

    Raises:
        ValueError: Shapes that do not fit, or an unknown backend or one that does not work.
    """
    if logits.ndim != 2 or logits.shape[0] != rows.tokens.shape[0] or logits.shape[1] == 0:
        raise ValueError(
            f"choose_next: got logits {list(logits.shape)} for {rows.tokens.shape[0]} rows; expected [rows, vocabulary]"
        )
    if takes_kernels("choose_next", backend, logits):
        _run(logits if logits.stride(1) == 1 else logits.contiguous(), rows, eos, pad_token_id)
        return
    chosen = logits.float().argmax(-1)
    running = ~rows.ended
    if len(eos):
        chosen = chosen.where(running, pad_token_id)
        rows.ended.logical_or_((chosen[:, None] == eos).any(-1))
    rows.lengths.add_(running)
    rows.sequences.scatter_(1, rows.places[:, None], chosen[:, None])
    rows.places.add_(1)
    rows.tokens.copy_(chosen[:, None])


def _run(logits: Tensor, rows: Rows, eos: Tensor, pad_token_id: int) -> None:
    vocab_size = logits.shape[1]
    with on_device(logits):
        choice_kernel[(logits.shape[0],)](
            logits, rows.tokens, rows.sequences, rows.places, rows.lengths, rows.ended, eos if len(eos) else None,
            logits.stride(0), rows.sequences.stride(0), vocab_size, rows.sequences.shape[1], pad_token_id, len(eos),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)), BLOCK_EOS=triton.next_power_of_2(max(1, len(eos))),
            num_warps=WARPS,
        )  # fmt: skip
