"""Packs this environment for a GPU machine that reaches no package registry.

    .venv-3.12/bin/python benchmark/gpu/bundle.py pack bundle/ --there numpy,scipy,... --piece-mb 54
    python3 bundle.py unpack bundle/ --into site/      (on the GPU machine)

The machine must have the same Python, CUDA of the same major version and NVIDIA's libraries
as wheels (of any torch for this CUDA): the libraries that torch is linked against are taken
from there. Device code of GPUs other than `--sm` is blanked in the libraries, so that they
compress to a fifth. There, in a clone of this repository:

    PYTHONPATH=site:site/nvidia_cutlass_dsl/dsl_packages:python python3 -m sglang.launch_server ...
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Distributions that no server started here imports, by weight: other models, front ends,
# kernels that SGLang compiles or loads only for models with them, and what checks this code.
LEFT_OUT = frozenset(
    """
    anthropic apache-tvm-ffi-dev ast-serialize babel blobfile
    cuda-tile cuda-toolkit cryptography cython datasets
    deepseek-recipe fonttools flashinfer-python hf-xet humming-kernels
    hypothesis kiwisolver kubernetes-validate librt llvmlite lxml material matplotlib
    mergedeep mistral-common mkdocs mkdocs-get-deps mkdocs-material
    mkdocs-material-extensions modelscope modelscope-hub mooncake-transfer-engine-non-cuda
    mypy mypy-extensions nccl-extensions nccl4py numba nvshmem4py-cu13 pandas pip
    promql-parser pyarrow pycountry pycryptodomex ruff scikit-image
    scipy sgl-deep-ep sgl-deep-gemm sgl-flash-mla simpy sglang-router sympy tilelang timm
    tml-renderers torchaudio torchcodec triton wcwidth z3-solver zstandard
    """.split()  # noqa: SIM905
)
# NVIDIA's libraries come with the machine, but for these.
CARRIED = (
    "nvidia-nccl-cu13",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
)
SKIPPED = re.compile(
    r"(^|/)(__pycache__|multimodal_gen|sm100)/|\.(pyc|a|pyi)$|\.dist-info/licenses/"
    r"|^torch/(include|share|test)/|^torch/bin/(?!torch_shm_manager)"
    r"|_cutlass_ir\.cu12|^nvidia_cutlass_dsl/cu12/|^sgl_kernel/(infllm|flashmla)_ops|^sglang/srt/rust_extensions/_(bench|grpc)"
)

COMPRESS = ("-q", "-T0", "-12", "--long=31", "-c")

_FATBIN = re.compile(b"\x50\xed\x55\xba")
_ELF = 2


def blank_others(data: bytearray, sm: int) -> int:
    """Fill the device code in a library that is not for one GPU architecture with zeros.

    The container is a header (magic, version, header's size, size) and entries (kind,
    version, header's size, payload's size, ..., architecture at byte 28), as `cuobjdump`
    lists them; CUDA picks one entry by architecture and reads no other.

    Returns:
        How many bytes were blanked.
    """
    blanked = at = 0
    while found := _FATBIN.search(data, at):
        start = found.start()
        at = start + 4
        if start + 16 > len(data):
            break
        _, version, header, size = struct.unpack_from("<IHHQ", data, start)
        end = start + 16 + size
        if version != 1 or header != 16 or end > len(data):
            continue
        entries = _entries(data, start + 16, end)
        if entries is None:
            continue
        for payload, size, kind, architecture in entries:
            if kind != _ELF or architecture != sm:
                data[payload : payload + size] = bytes(size)
                blanked += size
        at = end
    return blanked


def _entries(data: bytearray, at: int, end: int) -> list[tuple[int, int, int, int]] | None:
    """Payload's place and size, kind and architecture of each; None where these are no entries."""
    entries = []
    while at < end - 32:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        if not 32 <= header <= 4096 or at + header + size > end:
            return None
        entries.append((at + header, size, kind, architecture))
        at += header + size
    return entries


def files_of(names: set[str], there: set[str]) -> Iterator[tuple[str, Path]]:
    """Path inside site-packages and on disk, of all distributions but those left out."""
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        nvidia = name.startswith("nvidia-") and name not in (*CARRIED, "nvidia-ml-py")
        if (name in LEFT_OUT or name in there or nvidia) and name not in names:
            continue
        for file in dist.files or ():
            path = str(file)
            # Of the package itself only the entry points: its code comes with the clone.
            own = name == "sglang-epd" and ".dist-info/" not in path
            if own or path.startswith("..") or SKIPPED.search(path):
                continue
            located = Path(str(dist.locate_file(file)))
            if located.is_file():
                yield path, located


def pack(out: Path, sm: int, piece_mb: float, there: set[str], also: set[str]) -> None:
    """Write a compressed archive in pieces, and `zstd` itself, which the machine may lack."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    zstd = shutil.which("zstd")
    if zstd is None:
        raise SystemExit("zstd is missing: apt-get install zstd")
    shutil.copy(zstd, out / "zstd")
    split = ["split", "-d", "-b", str(int(piece_mb * 2**20)), "-", str(out / "piece-")]
    with (
        subprocess.Popen(split, stdin=subprocess.PIPE) as cutting,
        subprocess.Popen([zstd, *COMPRESS], stdin=subprocess.PIPE, stdout=cutting.stdin) as packing,
        tarfile.open(fileobj=packing.stdin, mode="w|") as tar,
    ):
        for inside, path in sorted(dict(files_of(also, there)).items()):
            data = bytearray(path.read_bytes())
            if path.suffix == ".so" or ".so." in path.name:
                blank_others(data, sm)
            info = tarfile.TarInfo(inside)
            info.size, info.mode = len(data), path.stat().st_mode & 0o777
            tar.addfile(info, io.BytesIO(data))


def unpack(bundle: Path, into: Path) -> None:
    """Unpack all pieces, and link NVIDIA's libraries of the machine beside them."""
    into.mkdir(parents=True, exist_ok=True)
    pieces = [str(piece) for piece in sorted(bundle.glob("piece-*"))]
    zstd = [str(bundle / "zstd"), "-dc", "--long=31"]
    with (
        subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE) as reading,
        subprocess.Popen(zstd, stdin=reading.stdout, stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar,
    ):
        tar.extractall(into, filter="tar")
    link_nvidia(into)


def link_nvidia(into: Path) -> None:
    for site in map(Path, sys.path):
        for library in (site / "nvidia").glob("*") if (site / "nvidia").is_dir() else ():
            link = into / "nvidia" / library.name
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(library)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, default=Path("site"))
    parser.add_argument("--sm", type=int, default=90, help="of the GPU: 90 is Hopper")
    parser.add_argument("--piece-mb", type=float, default=54.0)
    parser.add_argument("--there", default="", help="distributions that the machine has")
    parser.add_argument("--also", default="", help="distributions that are left out otherwise")
    told = parser.parse_args()
    if told.action == "pack":
        pack(
            told.paths[0],
            told.sm,
            told.piece_mb,
            set(told.there.split(",")),
            set(told.also.split(",")),
        )
    else:
        unpack(told.paths[0], told.into)


if __name__ == "__main__":
    main()
