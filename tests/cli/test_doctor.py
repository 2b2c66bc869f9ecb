"""`fat5 doctor` says what works here, and finds what does not."""

from __future__ import annotations

import platform

import pytest
import torch

from fat5 import doctor
from fat5.cli import main as cli
from fat5.ops.attention.backends import BACKENDS


@pytest.fixture(autouse=True)
def torch_backend_alone(monkeypatch):
    """Leave out backends that need a GPU or an interpreter of their own; they have their tests elsewhere."""
    for name in set(BACKENDS) - {"torch"}:
        monkeypatch.delitem(BACKENDS, name)


def test_a_working_machine_is_healthy(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for expected in (
        platform.python_version(),
        torch.__version__,
        "transformers",
        "cores",
        "Everything that FAT5 needs",
    ):
        assert expected in text
    for name in BACKENDS:
        assert name in text
    assert "FAIL" not in text


def test_every_backend_is_checked_on_the_cpu_or_explained():
    checks = {check.name: check for check in doctor.examine().checks if check.section == "attention backends"}
    assert checks["torch on cpu"].ok
    assert "differ from the reference by" in checks["torch on cpu"].detail
    assert {name.split()[0] for name in checks} == set(BACKENDS)


def test_a_wrong_backend_is_found(monkeypatch, capsys):
    right = doctor.flash_attention
    monkeypatch.setattr(doctor, "flash_attention", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "does not work here: torch on cpu" in text


def test_a_backend_that_only_forwards_rightly_is_found(monkeypatch):
    right = doctor.flash_attention

    def without_bias_gradient(*args, bias, **kwargs):
        frozen = doctor.RelativeBias(bias.table.detach() + 0 * bias.table, bidirectional=True)
        return right(*args, bias=frozen, **kwargs)

    monkeypatch.setattr(doctor, "flash_attention", without_bias_gradient)
    assert not doctor.examine().healthy


def test_a_backend_that_fails_is_named_with_its_reason(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(doctor, "flash_attention", fail)
    (check,) = (check for check in doctor.examine().checks if check.name == "torch on cpu")
    assert (check.ok, check.detail) == (False, "fails: no such kernel")


def test_a_backend_that_is_not_there_is_no_fault(monkeypatch):
    monkeypatch.setitem(BACKENDS, "imagined", lambda: "needs a machine nobody has")
    report = doctor.examine()
    (check,) = (check for check in report.checks if check.name == "imagined")
    assert (check.ok, check.detail) == (None, "not available: needs a machine nobody has")
    assert report.healthy


def test_hopper_kernels_that_differ_are_named_and_no_fault(monkeypatch):
    pytest.importorskip("triton")
    from fat5.ops.attention.hopper import dispatch

    monkeypatch.setattr(dispatch, "examine", lambda c, device: "its dq differs" if c.head_dim == 128 else None)
    first, *others = doctor._hopper_kernels(torch.device("cpu"))
    assert "configurations agree" in first.detail
    assert all("the portable kernels take over: " in c.detail and "D128" in c.detail for c in others)
    assert {c.ok for c in (first, *others)} == {None}
    assert int(first.detail.split()[0]) + len(others) == int(first.detail.split()[2])


def test_a_missing_package_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "_NEEDED", (*doctor._NEEDED, "a-package-nobody-made"))
    report = doctor.examine()
    (check,) = (check for check in report.checks if check.name == "a-package-nobody-made")
    assert check.detail == "not installed"
    assert not report.healthy


def test_a_folder_that_cannot_be_written_is_a_fault(monkeypatch, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    monkeypatch.setenv("HF_HOME", str(folder / "below"))
    (check,) = (check for check in doctor.examine().checks if check.name == "HF_HOME")
    assert check.ok is False
    assert "cannot be written" in check.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_is_described():
    (check,) = (check for check in doctor.examine().checks if check.name == "gpu 0")
    assert torch.cuda.get_device_name() in check.detail
    assert "compute capability" in check.detail
