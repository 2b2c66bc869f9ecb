"""What is built from the repository installs into an empty environment and works there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from fat5.version import __version__

ROOT = Path(__file__).resolve().parents[1]
KEPT_OUT = (".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", "build", "dist", "site", "runs", "quickstart")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with sdist and wheel; the wheel is made from the sdist."""
    pytest.importorskip("build")
    root = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, root / "source", ignore=shutil.ignore_patterns(*KEPT_OUT))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(root / "dist"), str(root / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return root / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """An environment that holds the wheel, and sees the packages of this one for what it needs."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=True)
    [packages] = root.glob("lib/python*/site-packages")
    [wheel] = built.glob("*.whl")
    install = [root / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # A line of a .pth adds a folder without reading the .pth files in it: an editable install there stays unseen.
    theirs = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (packages / "needs.pth").write_text("\n".join(sorted(theirs)) + "\n")
    return root


def run(environment: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [str(environment / "bin" / words[0]), *words[1:]]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=clean | {"CUDA_VISIBLE_DEVICES": ""}
    )


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_should(built):
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    assert f"-{__version__}-py3-none-any" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {
        f"fat5-{__version__}.data/data/share/fat5/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/**/*.yaml")
    }
    assert len(configs) > 20
    assert {"fat5/py.typed", "fat5/data/sample/sample_fr.txt.gz", "fat5/training/quickstart.yaml"} | configs <= names
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "fat5").rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for path in ("LICENSE", "README.md", "CITATION.cff", "mkdocs.yml", "docs/index.md", "configs/minipile.yaml"):
        assert path in inside, path
    assert "tests/test_packaging.py" in inside


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(installed, tmp_path):
    shown = run(installed, "fat5", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "pretrain" in shown.stdout
    code = (
        "import torch, fat5, pathlib, sys\n"
        "from fat5.ops import RelativeBias, flash_attention\n"
        "from fat5.data.sample import sample_documents\n"
        "q, k, v = torch.randn(3, 2, 9, 4, 16)\n"
        "table = torch.randn(32, 4, requires_grad=True)\n"
        "flash_attention(q, k, v, bias=RelativeBias(table, bidirectional=True)).sum().backward()\n"
        "assert table.grad.any() and len(list(sample_documents())) == 1718\n"
        "assert (pathlib.Path(sys.prefix) / 'share/fat5/configs/french-small.yaml').is_file()\n"
        "print(fat5.__file__)\n"
    )
    done = run(installed, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)
    config = installed / "share" / "fat5" / "configs" / "french-small.yaml"
    printed = run(installed, "fat5", "pretrain", str(config), "--print-config", cwd=tmp_path)
    assert "d_model: 512" in printed.stdout, printed.stderr


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_changelog_has_a_section_for_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert sections[0] == "Unreleased"
    if "dev" not in __version__:
        assert __version__ in sections
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
