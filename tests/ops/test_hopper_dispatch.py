"""When the Hopper kernels serve, and who takes over when they do not."""

import dataclasses
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch

from fat5.ops import flash_attention
from fat5.ops.attention import backends
from fat5.ops.attention.hopper import dispatch, self_check
from fat5.ops.attention.hopper.configuration import (
    EVERYWHERE,
    Configuration,
    ForwardShape,
    backward_configuration,
    forward_configuration,
    forward_shape,
)
from fat5.ops.attention.hopper.support import backward_refused, refused
from fat5.ops.attention.problem import Problem

CPU = torch.device("cpu")
FORWARD = Configuration("forward", 64, torch.bfloat16, False, True, 91, False, False)
cuda = torch.cuda.is_available()


def problem(queries=128, keys=128, dim=64, dtype=torch.bfloat16, **changes):
    q, k, v = (torch.zeros(2, n, 3, dim, dtype=dtype) for n in (queries, keys, keys))
    table = torch.zeros(3, 2 * 91 + 1)
    nothing = dict.fromkeys(("offsets", "key_starts", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "seed"))
    plain = Problem(
        q, k, v, table, "distance", keys - queries, softmax_scale=1.0, causal=False, dropout_p=0.0, **nothing
    )
    return dataclasses.replace(plain, **changes)


def packed(**changes):
    offsets = torch.tensor([0, 50, 128], dtype=torch.int32)
    q = torch.zeros(128, 3, 64, dtype=torch.bfloat16)
    plain = {"q": q, "k": q, "v": q, "offset": None, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    return problem(**plain | changes)


ROWS = torch.tensor([1, 2])
MANY = dict.fromkeys("qkv", torch.empty(2**15, 16, 3, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dim": 96}, "not torch.bfloat16 and 96"),
        ({"dtype": torch.float32}, "not torch.float32 and 64"),
        ({"bias_kind": "dense"}, "no dense bias"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"softmax_scale": 0.0}, "0.0 is outside"),
        ({"bias": torch.zeros(3, 2 * 2000 + 1)}, "not 2000"),
        ({"bias": torch.zeros(3), "bias_kind": "alibi", "offsets": ROWS, "offset": None}, "without a bound"),
        ({"queries": 1}, "a step of decoding"),
        ({"k": torch.zeros(2, 128, 3, 68, dtype=torch.bfloat16)[..., :64]}, "multiples of 16 bytes; k has"),
        ({"v": torch.zeros(2, 128, 64, 3, dtype=torch.bfloat16).transpose(2, 3)}, "neighbouring elements"),
        ({"v": torch.zeros(2, 128, 1, 64, dtype=torch.bfloat16).expand(2, 128, 3, 64)}, "v has"),
        ({"k": torch.zeros(2, 200, 3, 64, dtype=torch.bfloat16)[:, :128], "key_lengths": ROWS}, "evenly apart"),
        ({"q": torch.empty(2, 2**29, 3, 64, dtype=torch.bfloat16, device="meta")}, "32-bit indices"),
    ],
)
def test_what_the_kernels_refuse_has_a_reason(changes, reason):
    assert refused(problem()) is None
    assert reason in refused(problem(**changes))


def test_rows_of_a_longer_buffer_are_taken_where_no_padding_is_told():
    assert refused(problem(k=torch.zeros(2, 200, 3, 64, dtype=torch.bfloat16)[:, :128])) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(bias=torch.zeros(3), bias_kind="alibi"), "no gradient of ALiBi's slopes"),
        (problem(keys=140), "multiple of 64 apart"),
        (packed(cu_seqlens_k=torch.tensor([0, 60, 128], dtype=torch.int32)), "between different documents"),
        (packed(offsets=ROWS), "packed documents and query offsets"),
        (problem(queries=16, keys=16, bias=torch.zeros(3, 2 * 1024 + 1), **MANY), "near tiles of"),
    ],
)
def test_what_the_backward_refuses_has_a_reason(asked, reason):
    assert refused(asked) is None
    assert reason in backward_refused(asked, torch.zeros_like(asked.q), True)
    assert backward_refused(asked, torch.zeros_like(asked.q), False) is None


@pytest.mark.parametrize(
    "asked",
    [
        problem(),
        problem(keys=256),
        problem(key_lengths=ROWS),
        problem(keys=140, key_starts=ROWS),
        problem(offsets=ROWS),
        packed(),
    ],
)
def test_table_gradients_that_the_kernels_take(asked):
    assert backward_refused(asked, torch.zeros_like(asked.q), True) is None


def test_every_choice_of_shape_fits_a_multiprocessor():
    forwards = [x for x in self_check.all_configurations() if x.kernel == "forward"]
    assert {(x.shape.consumers, x.head_dim) for x in forwards} == {(2, 64), (3, 64), (2, 128)}
    for forward in forwards:  # any length of a chunk fits
        shape = dataclasses.replace(forward.shape, chunk=ForwardShape().chunk)
        assert shape in self_check.all_shapes(forward.head_dim)
    assert {shape.stages for shape in self_check.all_shapes(128)} == {2}


def test_configurations_tell_apart_what_is_compiled_apart():
    assert forward_configuration(problem(keys=128)).tails is False
    assert forward_configuration(problem(keys=129)).tails is True
    assert forward_configuration(packed()).ragged is True
    assert forward_configuration(problem(queries=4096, keys=4096)).shape.consumers == 3
    assert forward_configuration(problem(queries=4096, keys=4096, causal=True)).shape.consumers == 2
    assert forward_configuration(problem(queries=4097, keys=4097)).shape.consumers == 2
    wide = [forward_configuration(problem(queries=n, keys=n, dim=128, causal=True)).shape for n in (1024, 4096)]
    assert [shape.ahead for shape in wide] == [False, True]
    assert forward_configuration(problem(bias=torch.zeros(3), bias_kind="alibi")).radius == EVERYWHERE
    assert forward_configuration(problem(bias=None, bias_kind="none")).bias is False
    assert forward_configuration(problem(bias=None, bias_kind="none", causal=True)).bias is True  # the mask
    assert backward_configuration(problem(), True, True).one_pass is False
    assert backward_configuration(problem(key_lengths=ROWS), True, False).phased is False
    assert backward_configuration(problem(key_starts=ROWS), True, False).phased is True
    assert backward_configuration(problem(key_starts=ROWS), False, False).phased is False
    assert len(set(self_check.all_configurations())) == len(list(self_check.all_configurations())) > 200


@pytest.fixture
def fresh(monkeypatch):
    """No verdict and no warning yet, and no capture under way."""
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return monkeypatch


def test_a_configuration_is_compared_once(fresh):
    compared = []
    fresh.setattr(self_check, "compare", lambda configuration, device: compared.append(configuration))
    other = dataclasses.replace(FORWARD, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for configuration in (FORWARD, FORWARD, other, FORWARD):
            assert dispatch.verdict(configuration, CPU) is None
    assert compared == [FORWARD, other]


@pytest.mark.parametrize("error", [self_check.MismatchError("its dq differs"), RuntimeError("ptxas died\nat length")])
def test_a_mismatch_or_an_exception_warns_once_and_stays(fresh, error):
    def compare(configuration, device):
        raise error

    fresh.setattr(self_check, "compare", compare)
    message = str(error).splitlines()[0]
    with pytest.warns(RuntimeWarning, match=f"{message}; the portable kernels take over") as caught:
        reasons = [dispatch.verdict(FORWARD, CPU) for _ in range(3)]
    assert all(message in reason for reason in reasons)
    assert len(caught) == 1
    assert "forward D64 bfloat16, radius 91" in str(caught[0].message)


def test_a_capture_does_not_compare_and_does_not_condemn(fresh):
    fresh.setattr(self_check, "compare", lambda configuration, device: None)
    fresh.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(RuntimeWarning, match="Run once first") as caught:
        reasons = [dispatch.verdict(dataclasses.replace(FORWARD, causal=causal), CPU) for causal in (False, True)]
    assert all("capture" in reason for reason in reasons)
    assert len(caught) == 1
    fresh.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert dispatch.verdict(FORWARD, CPU) is None
    fresh.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dispatch.verdict(FORWARD, CPU) is None


def test_a_comparison_without_memory_is_made_again(fresh):
    answers = iter([torch.OutOfMemoryError("no room"), None])

    def compare(configuration, device):
        error = next(answers)
        if error is not None:
            raise error

    fresh.setattr(self_check, "compare", compare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "no room" in dispatch.verdict(FORWARD, CPU)
        assert dispatch.verdict(FORWARD, CPU) is None


@pytest.mark.parametrize(("error", "stays"), [(RuntimeError("no descriptor"), True), (torch.OutOfMemoryError(), False)])
@pytest.mark.skipif(cuda, reason="the portable kernels run on the CPU here")
def test_a_failing_launch_leaves_the_result_to_the_portable_kernels(fresh, error, stays):
    from fat5.ops.attention.hopper import launch

    def fail(*arguments):
        raise error

    fresh.setattr(self_check, "compare", lambda configuration, device: None)
    fresh.setattr(dispatch, "_runs_here", lambda problem: True)
    fresh.setattr(launch, "run_forward", fail)
    fresh.setattr(launch, "run_backward", fail)
    fresh.setitem(backends._reasons, "hopper", None)
    q, k, v = (torch.randn(1, 20, 1, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got = flash_attention(q, k, v, backend="hopper")
            grads = torch.autograd.grad(got.float().square().sum(), (q, k, v))
    caught = [w for w in caught if "portable kernels take over" in str(w.message)]
    assert len(caught) == (2 if stays else 0)  # forward and backward
    want = flash_attention(q, k, v, backend="triton")
    want_grads = torch.autograd.grad(want.float().square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip((got, *grads), (want, *want_grads), strict=True))


def test_the_comparison_holds_every_result(monkeypatch):
    good = torch.randn(40)
    self_check._hold("dq", good + 1e-3, good)
    spoilt = good.clone()
    spoilt[7] += 1
    for wrong in (good * 1.05, torch.full_like(good, torch.nan), torch.zeros_like(good), spoilt):
        with pytest.raises(self_check.MismatchError, match="its dq differs"):
            self_check._hold("dq", wrong, good)


@pytest.mark.parametrize("configuration", [FORWARD, dataclasses.replace(FORWARD, ragged=True, tails=True, causal=True)])
def test_the_small_problem_leads_to_its_configuration(configuration):
    small = self_check.small_problem(configuration, CPU)
    configuration = dataclasses.replace(configuration, shape=forward_shape(configuration, small.num_keys))
    assert refused(small) is None
    assert forward_configuration(small) == configuration
    phased = dataclasses.replace(FORWARD, kernel="backward", ragged=True, tails=True, table_grad=True, phased=True)
    small_phased = self_check.small_problem(phased, CPU)
    assert backward_refused(small_phased, small_phased.q, True) is None
    assert backward_configuration(small_phased, True, False) == phased
    state = torch.get_rng_state()
    again = self_check.small_problem(configuration, CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(again.bias, small.bias)


def test_auto_takes_it_on_a_hopper_and_for_its_tensors_alone_unless_it_is_switched_off(monkeypatch):
    reasons = {"triton": None, "hopper": None}
    monkeypatch.setattr(backends, "_reasons", reasons)

    def chosen(dtype=torch.bfloat16, dim=64):
        q = types.SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 5, 2, dim), device="cuda")
        return next(name for name, op in backends._OPS.items() if op is backends.choose_backend("auto", q))

    monkeypatch.setenv("FAT5_HOPPER", "0")
    assert chosen() == "triton"
    monkeypatch.delenv("FAT5_HOPPER")
    assert chosen() == chosen(torch.float16, 128) == "hopper"
    assert chosen(torch.float32) == chosen(dim=80) == "triton"
    assert chosen(torch.float64) == chosen(dim=8) == "torch"
    reasons["hopper"] = "another card"
    assert chosen() == "triton"


def test_another_card_and_another_triton_have_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (8, 0))
    assert "Hopper), and the GPU's is 8.0" in dispatch.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    monkeypatch.setattr(dispatch, "missing_interface", lambda: "this Triton's Gluon does not fit: moved")
    assert "does not fit" in dispatch.unavailable()


def test_a_gluon_that_does_not_import_is_a_reason_and_no_error():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['triton.experimental.gluon'] = None\n"
            "import fat5.ops\n"
            "from fat5.ops.attention.hopper.dispatch import missing_interface\n"
            "print(missing_interface())",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Gluon does not fit: ModuleNotFoundError" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "configuration", [c for c in self_check.all_configurations() if c.dtype == torch.bfloat16], ids=str
)
def test_a_configuration_agrees_with_the_portable_kernels(configuration):
    """`fat5 doctor` compares those in float16 too."""
    reason = backends.BACKENDS["hopper"]()
    if reason is not None:
        pytest.skip(reason)
    self_check.compare(configuration, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
def test_the_first_use_inside_a_capture_runs_the_portable_kernels(fresh):
    reason = backends.BACKENDS["hopper"]()
    if reason is not None:
        pytest.skip(reason)
    fresh.undo()
    fresh.setattr(dispatch, "_verdicts", {})
    fresh.setattr(dispatch, "_warned", set())
    q = torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    want = flash_attention(q, q, q, backend="triton")
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(RuntimeWarning, match="Run once first"), torch.cuda.graph(graph, stream=stream):
            got = flash_attention(q, q, q, backend="hopper")
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(cuda, reason="a GPU compiles the kernels in the other tests")
def test_compile_gate():
    """The worst cases compile for sm_90a without serialised products, and within spills and shared memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.hopper_gate", "--jobs", "1"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " 0 failed" in done.stdout


@pytest.mark.skipif(cuda, reason="test_attention_kernels.py does it on the device")
def test_opcheck_and_torch_compile_see_one_opaque_operation(monkeypatch):
    leaves = [torch.randn(2, n, 2, 16, requires_grad=True) for n in (17, 20, 20)]
    table = torch.randn(2, 9, requires_grad=True)
    nothing = [None] * 5
    arguments = (*leaves, table, "distance", 3, *nothing, 0.5, True, 0.0, None, None)
    torch.library.opcheck(
        backends.hopper_attention,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    monkeypatch.setitem(backends._reasons, "hopper", None)
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, causal=True, backend="hopper"), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*leaves), flash_attention(*leaves, causal=True, backend="triton"))
