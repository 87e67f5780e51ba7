"""CUDA source is compiled wherever there is an nvcc, also where no GPU can run it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sardonyx
from sardonyx.toolchain import compiler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py builds for it")

CPP = """
void Plain(In<float> x, Out<float> y, Parallel) { std::copy(x.begin(), x.end(), y.begin()); }
"""


def declare(cuda: str) -> Any:
    signature = "unbuilt::Plain(Tensor<float32> x) -> Tensor<float32>"
    return sardonyx.custom_op(signature, cpp=CPP, cuda=cuda)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_source_that_does_not_compile_is_refused_at_its_line() -> None:
    line = sys._getframe().f_lineno + 3
    source = """
        void Plain(In<float> x, Out<float> y, cudaStream_t stream) {
          undeclared<<<1, 1, 0, stream>>>(x.data());
        }
        """
    with pytest.raises(compiler.CompilerError, match="unbuilt::Plain: the kernel for the GPU does not") as caught:
        declare(source)
    assert f'{__file__}({line}): error: identifier "undeclared" is undefined' in str(caught.value)
    assert not hasattr(torch.ops.unbuilt, "Plain")


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that notes what it is told, and compiles nothing."""
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"""#!{sys.executable}
import sys
if "--version" in sys.argv:
    print("release 0.0")
    sys.exit()
source = open(sys.argv[sys.argv.index("-c") + 1]).read()
open({str(tmp_path / "told")!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
open(sys.argv[sys.argv.index("-o") + 1], "w")
if "int64_t wrong" in source:
    sys.exit("what sardonyx puts around the kernel(1): error: no such function")
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(shutil.which('g++') or '').parent}")
    compiler.nvcc.cache_clear()
    yield tmp_path / "told"
    compiler.nvcc.cache_clear()


def test_source_that_compiles_is_compiled_once_and_not_linked(imitation: Path) -> None:
    for _ in range(2):
        op = declare("void Plain(In<float> x, Out<float> y, cudaStream_t stream) {}")
        assert op(torch.ones(2)).tolist() == [1, 1]
        op.close()
    (told,) = imitation.read_text().splitlines()
    assert "-arch=sm_80" in told
    assert "-shared" not in told


def test_a_kernel_of_other_parameters_is_told_what_is_expected(imitation: Path) -> None:
    with pytest.raises(
        compiler.CompilerError, match=r"void Plain\(In<float> x, Out<float> output, cudaStream_t stream\)"
    ):
        declare("void Plain(int64_t wrong) {}")


def test_without_nvcc_and_gpu_the_source_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(shutil.which("g++") or "").parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if compiler.find_nvcc() is not None:
        pytest.skip("nvcc is where g++ is")
    op = declare("this is not compiled")
    assert op(torch.ones(2)).tolist() == [1, 1]
    op.close()
