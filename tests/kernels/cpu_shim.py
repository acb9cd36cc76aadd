"""The .cu files, compiled for this machine's CPU by way of cuda_shim.h."""

import ctypes
import shutil
import subprocess

import pytest

from kvstore.kernels.module import KERNELS, source_of


class Shim:
    """Runs launches of the kernels on the CPU, within the memory that a test allows."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        self.library.launch.restype = ctypes.c_longlong
        self.library.stores.restype = ctypes.c_longlong

    def allow(self, *readable, writable=()):
        """Name the tensors whose memory the next launches may read, and write."""
        self.library.forbid_all()
        for tensors, flag in ((readable, 0), (writable, 1)):
            for tensor in tensors:
                size = ctypes.c_longlong(tensor.numel() * tensor.element_size())
                self.library.allow(ctypes.c_void_p(tensor.data_ptr()), size, flag)

    def run(self, launch):
        """Run one launch; return how many stores it made."""
        args = (ctypes.c_void_p * len(launch.args))(*map(ctypes.addressof, launch.args))
        faults = self.library.launch(launch.name.encode(), launch.num_ctas, launch.num_threads, args)
        assert faults == 0, f"{launch.name}: {faults} accesses out of bounds or not aligned"
        return self.library.stores()


def build_shim(folder, repo_root, changed=None):
    """Compile the kernels as CPU code; `changed` has other text for some of the files."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, found neither g++ nor c++")
    lines = ['#include "cuda_shim.h"']
    for file in KERNELS:
        path = source_of(file)
        if file in (changed or {}):
            path = folder / file
            path.write_text(changed[file])
        lines.append(f'#include "{path}"')
    names = [name for kernels in KERNELS.values() for name in kernels]
    lines += [f'static int k{at} = add("{name}", {name});' for at, name in enumerate(names)]
    (folder / "kernels.cpp").write_text("\n".join(lines) + "\n")
    library = folder / "kernels.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command += [f"-I{repo_root / 'tests/kernels'}", "-Wno-unused-variable", "-o", str(library)]
    run = subprocess.run([*command, str(folder / "kernels.cpp")], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return Shim(library)
