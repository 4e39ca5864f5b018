"""What the simulated GPU's build reads from an installation, and what it says where that lacks."""

from __future__ import annotations

from pathlib import Path

import native_build
import pytest
import simgpu_build

ROOT = Path(__file__).resolve().parent.parent

HEADER = """
#define CUDA_VERSION 13000
#define cuMemAlloc                          cuMemAlloc_v2
#define cuMemcpyHtoD                    __CUDA_API_PTDS(cuMemcpyHtoD_v2)
#define cuMemcpyHtoDAsync                   __CUDA_API_PTSZ(cuMemcpyHtoDAsync_v2)
#define cuStreamSynchronize                 __CUDA_API_PTSZ(cuStreamSynchronize)
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place where the build looks for Python packages; no toolkit is installed."""
    monkeypatch.setattr(
        simgpu_build,
        "_package_folder",
        lambda name: tmp_path / name if (tmp_path / name).exists() else None,
    )
    monkeypatch.setattr(simgpu_build, "TOOLKITS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return tmp_path


def headers(folder: Path, version: int = 13000, crt: bool = True, nv: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "cuda.h").write_text(HEADER.replace("13000", str(version)))
    (folder / "cuda_runtime_api.h").write_text("")
    if crt:
        (folder / "crt").mkdir()
        (folder / "crt" / "host_config.h").write_text("")
    if nv:
        (folder / "nv").mkdir()
        (folder / "nv" / "target").write_text("")
    return folder


def test_plain_names_mean_the_version_that_the_header_chooses() -> None:
    functions, newest = simgpu_build.driver_functions(HEADER)
    assert newest["cuMemAlloc"] == "cuMemAlloc_v2"
    assert newest["cuMemcpyHtoDAsync"] == "cuMemcpyHtoDAsync_v2"
    assert "cuStreamSynchronize" not in newest
    assert {"cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2"} <= set(functions)


def test_without_torch_the_build_says_what_to_install(packages: Path) -> None:
    with pytest.raises(native_build.BuildError, match=r"PyTorch is not installed.*pip install"):
        simgpu_build.find_runtime()


def test_a_torch_for_cpu_only_is_named_as_such(packages: Path) -> None:
    (packages / "torch" / "lib").mkdir(parents=True)
    with pytest.raises(native_build.BuildError, match=r"built for the CPU only.*pip install torch"):
        simgpu_build.find_runtime()


def test_headers_come_from_pips_packages(packages: Path) -> None:
    folder = headers(packages / "nvidia" / "cu13" / "include")
    assert simgpu_build.find_headers(13).folders == (folder,)


def test_crt_may_come_from_another_package(packages: Path) -> None:
    main = headers(packages / "nvidia" / "cuda_runtime" / "include", 12080, crt=False)
    crt = packages / "nvidia" / "cuda_nvcc" / "include"
    (crt / "crt").mkdir(parents=True)
    (crt / "crt" / "host_config.h").write_text("")
    assert simgpu_build.find_headers(12).folders == (main, crt)


def test_headers_of_another_version_do_not_do(packages: Path) -> None:
    headers(packages / "nvidia" / "cu13" / "include")
    with pytest.raises(native_build.BuildError) as caught:
        simgpu_build.find_headers(12)
    assert "pip install 'nvidia-cuda-runtime-cu12==12.*'" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "package"),
    [(13000, "'nvidia-cuda-crt==13.*'"), (12080, "'nvidia-cuda-nvcc-cu12==12.*'")],
)
def test_missing_crt_names_the_package_that_has_it(
    packages: Path, version: int, package: str
) -> None:
    headers(packages / "nvidia" / "some" / "include", version, crt=False)
    with pytest.raises(native_build.BuildError) as caught:
        simgpu_build.find_headers(version // 1000)
    assert f"pip install {package}" in str(caught.value)


def test_missing_headers_of_the_library_name_their_package(packages: Path) -> None:
    headers(packages / "nvidia" / "cu13" / "include", nv=False)
    with pytest.raises(native_build.BuildError) as caught:
        simgpu_build.find_headers(13)
    assert "pip install 'nvidia-cuda-cccl==13.*'" in str(caught.value)
