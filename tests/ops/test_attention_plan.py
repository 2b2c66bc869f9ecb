"""Plans: what many calls of attention share beside lengths and bias, made once and read by each."""

from collections import Counter

import pytest
import torch

from fat5.ops import DistanceBias, flash_attention, joined_attention, plan_attention
from fat5.ops.attention.api import op_arguments
from fat5.ops.attention.hopper import dispatch, launch
from fat5.ops.attention.hopper import plan as hopper_plan
from fat5.ops.attention.plan import AttentionPlan
from fat5.ops.attention.shared import shared_attention
from tests.ops.attention_comparison import DEVICE, relative_error, reproducible
from tests.ops.plan_counts import count_making
from tests.ops.test_hopper_kernels import launches  # noqa: F401

BF16 = torch.bfloat16
HEADS, DIM, TOTAL = 2, 64, 190


@pytest.fixture
def made(monkeypatch):
    return count_making(monkeypatch)


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def lengths_of(layout):
    if layout == "padded":
        return {
            "key_starts": torch.tensor([3, 0], device=DEVICE),
            "key_lengths": torch.tensor([60, 31], device=DEVICE),
        }
    if layout == "rows":
        return {}
    ends = offsets(0, 7, 8, 8, 150, 150)  # 40 rows of no document
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 142, "max_seqlen_k": 142}


def leaves_of(layout):
    shape = (TOTAL,) if layout == "packed" else (2, 80)
    q, k, v = (torch.randn(*shape, HEADS, DIM, device=DEVICE).to(BF16).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(HEADS, 41, device=DEVICE, requires_grad=True)


def run(leaves, options, plan):
    *parts, table = leaves
    out = flash_attention(*parts, bias=DistanceBias(table), softmax_scale=0.125, backend="hopper", plan=plan, **options)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


@pytest.mark.parametrize(
    ("layout", "causal"),
    [
        ("packed", True),
        ("padded", False),
        ("rows", True),
        pytest.param("packed", False, marks=pytest.mark.slow),
        pytest.param("padded", True, marks=pytest.mark.slow),
    ],
)
def test_a_plan_changes_no_bit_and_saves_what_it_holds(layout, causal, made):
    options = lengths_of(layout) | {"causal": causal}
    leaves = leaves_of(layout)
    ragged = layout != "rows"
    with reproducible("hopper"):
        alone = run(leaves, options, None)
        assert made == Counter(write_table=3, **({"write_records": 3} if ragged else {}))
        made.clear()
        plan = plan_attention(
            *leaves[:2], bias=DistanceBias(leaves[3]), softmax_scale=0.125, backend="hopper", **options
        )
        assert made == Counter(write_table=2, **({"write_records": 2} if ragged else {}))
        made.clear()
        planned = run(leaves, options, plan)
        # The deterministic form's other tiles of queries have records of their own.
        assert made == Counter(**({"write_records": 1} if ragged else {}))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(alone, planned, strict=True))


def test_the_order_of_tiles_changes_no_bit(monkeypatch):
    """Causal tiles of a head at a time, as in large batches of a few heads at a time."""
    options, leaves = lengths_of("packed") | {"causal": True}, leaves_of("packed")
    with reproducible("hopper"):
        together = run(leaves, options, None)
        monkeypatch.setattr(hopper_plan, "_TURNS_A_GROUP", {True: 0, False: 0})
        apart = run(leaves, options, None)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_one_plan_serves_joined_and_shared_projections(made):
    options = lengths_of("packed") | {"backend": "hopper", "softmax_scale": 0.125}
    joined = torch.randn(TOTAL, 3, HEADS, DIM, device=DEVICE).to(BF16).requires_grad_()
    shared = torch.randn(TOTAL, 2, 2, HEADS, DIM, device=DEVICE).to(BF16).requires_grad_()
    plan = plan_attention(joined[:, 0], joined[:, 1], **options)
    made.clear()
    out = joined_attention(joined, plan=plan, **options)
    link = shared
    for layer in range(2):
        out, link = shared_attention(shared, link, out, layer=layer, first=layer, plan=plan, **options)
    grads = torch.autograd.grad(out.float().square().sum(), (joined, shared))
    assert not made
    assert all(g.isfinite().all() and g.any() for g in grads)


def test_a_plan_without_gradients_serves_the_forward_alone(made):
    options, leaves = lengths_of("packed"), leaves_of("packed")
    with torch.no_grad():
        plan = plan_attention(
            *leaves[:2], bias=DistanceBias(leaves[3]), softmax_scale=0.125, backend="hopper", **options
        )
    assert made == Counter(write_table=1, write_records=1)
    with reproducible("hopper"):
        made.clear()
        ours = run(leaves, options, plan)
        assert made == Counter(write_table=1, write_records=2)  # all of the backward
        assert all(torch.equal(a, b) for a, b in zip(ours, run(leaves, options, None), strict=True))


def test_a_plan_of_something_else_is_left_aside(made):
    """Equal lengths in other memory, another mask or another bias may be other ones by the time of the call."""
    options, leaves = lengths_of("packed"), leaves_of("packed")
    settings = {"bias": DistanceBias(leaves[3]), "softmax_scale": 0.125, "backend": "hopper"}
    right = plan_attention(*leaves[:2], **settings, **options)
    wrong = [
        plan_attention(*leaves[:2], **settings, **lengths_of("packed")),
        plan_attention(*leaves[:2], **settings, **options, causal=True),
        plan_attention(*leaves[:2], **settings | {"bias": DistanceBias(leaves[3].detach() + 1)}, **options),
        plan_attention(*(x[:180] for x in leaves[:2]), **settings, **options),
    ]
    with torch.no_grad():
        parts, want = leaves[:3], flash_attention(*leaves[:3], **settings, **options)
        for plan in (*wrong, right):
            made.clear()
            assert torch.equal(flash_attention(*parts, plan=plan, **settings, **options), want)
            assert bool(made) == (plan is not right)


def test_a_plan_of_another_length_is_left_aside(made):
    """Such as one made where there were more multiprocessors."""
    options, leaves = lengths_of("packed"), leaves_of("packed")
    settings = {"bias": DistanceBias(leaves[3]), "softmax_scale": 0.125, "backend": "hopper"} | options
    plan = plan_attention(*leaves[:2], **settings)
    other = AttentionPlan(plan.content[:-32], plan.sizes, plan.arguments)
    with torch.no_grad():
        assert torch.equal(
            flash_attention(*leaves[:3], plan=other, **settings), flash_attention(*leaves[:3], **settings)
        )


def test_where_making_plans_fails_calls_do_without(made, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dispatch, "_without_plans", set())
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(launch, "make_plan", fail)
    leaves = leaves_of("packed")
    settings = {"bias": DistanceBias(leaves[3]), "softmax_scale": 0.125, "backend": "hopper"} | lengths_of("packed")
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        plan = plan_attention(*leaves[:2], **settings)
    with torch.no_grad():
        out = flash_attention(*leaves[:3], plan=plan, **settings)
        assert made == Counter(write_table=1, write_records=1)
        assert torch.equal(out, flash_attention(*leaves[:3], **settings))


@pytest.mark.parametrize("backend", ["torch", "auto"] if DEVICE == "cpu" else ["torch", "triton"])
def test_other_backends_have_no_plans(backend):
    q, k, _, table = leaves_of("packed")
    assert plan_attention(q, k, bias=DistanceBias(table), backend=backend, **lengths_of("packed")) is None


def test_there_is_nothing_to_plan_without_lengths_and_bias():
    q, k, *_ = leaves_of("rows")
    assert plan_attention(q, k, backend="hopper").content.numel() == 0


def test_opcheck():
    q, k, _, table = leaves_of("packed")
    ends = offsets(0, 7, 8, 8, 150, 150)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 142, "max_seqlen_k": 142}
    settings = op_arguments(q, k, k, bias=DistanceBias(table.detach()), causal=True, **lengths)
    arguments = (q.detach(), k.detach(), True, *settings)
    # Not that all of it has a value: what no tile is left for is not written.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.fat5.hopper_attention_plan.default, arguments, test_utils=checks)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_whole_with_one_plan_for_all_layers(compiler, made):
    """The plan is one node of the forward's graph, and goes to the backward as it is; also where lengths change."""
    options, (*parts, table) = lengths_of("packed"), leaves_of("packed")
    whole = torch.stack([x.detach() for x in parts], 1)

    def stack(joined, table, ends):
        settings = options | {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "backend": "hopper", "softmax_scale": 0.125}
        settings |= {"bias": DistanceBias(table * 2)}
        plan = plan_attention(joined[:, 0], joined[:, 1], **settings)
        for _ in range(2):
            out = joined_attention(joined, plan=plan, **settings)
            joined = joined + out[:, None]
        return joined

    any_length = compiler == "inductor"
    compiled = torch.compile(stack, fullgraph=True, backend=compiler, dynamic=any_length)
    for total in (TOTAL, TOTAL - 30)[: 1 + any_length]:
        joined, results = whole[:total].clone().requires_grad_(), []
        for function in (stack, compiled):
            made.clear()
            with reproducible("hopper"):
                out = function(joined, table, options["cu_seqlens_q"])
                torch.manual_seed(1)
                results.append([out, *torch.autograd.grad(out, (joined, table), torch.randn_like(out))])
            assert made == Counter(write_table=2, write_records=2 + 2)
        for ours, theirs in zip(*results, strict=True):
            assert relative_error(ours.detach(), theirs.detach()) < (1e-2 if any_length else 1e-12)
