"""Every .cu file compiles for the GPUs that are in use, on a machine without any."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstore.kernels.module import KERNELS, OPTIONS, source_of

ARCHITECTURES = ["80", "90", "100"]


def nvrtc_path():
    """The run-time compiler of NVIDIA's wheel, where the wheel is installed."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*") if "alt" not in path.name]
    return max(found, default=None, key=lambda path: path.name)


def compile_with_nvrtc(library, file, architecture, folder):
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    source = source_of(file).read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None) == 0
    for name in KERNELS[file]:
        assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
    options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}"]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (status, log.value.decode().strip()) == (0, "")  # No warnings either.
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, cubin) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def compile_with_nvcc(compiler, file, architecture, folder):
    # Templates are only compiled where they are used.
    uses = ", ".join(f"(void*){name}" for name in KERNELS[file])
    unit, cubin = folder / "unit.cu", folder / "unit.cubin"
    unit.write_text(f'#include "{source_of(file)}"\nvoid* uses[] = {{{uses}}};\n')
    flags = [*OPTIONS, f"-arch=sm_{architecture}", "-cubin", "-Werror", "all-warnings", "-o", str(cubin)]
    run = subprocess.run([compiler, *flags, str(unit)], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return cubin.read_bytes()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", list(KERNELS))
def test_kernels_compile(file, architecture, tmp_path):
    library, compiler = nvrtc_path(), shutil.which("nvcc")
    if library is not None:
        cubin = compile_with_nvrtc(library, file, architecture, tmp_path)
    elif compiler is not None:
        cubin = compile_with_nvcc(compiler, file, architecture, tmp_path)
    else:
        pytest.skip("needs nvidia-cuda-nvrtc (the dev extra) or nvcc, found neither")
    for name in KERNELS[file]:
        assert name.split("<")[0].encode() in cubin


def test_every_file_is_listed():
    assert sorted(KERNELS) == sorted(path.name for path in source_of("pack.cu").parent.glob("*.cu"))
