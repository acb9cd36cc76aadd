import pytest

from cpu_shim import build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory, repo_root):
    """The kernels as CPU code."""
    return build_shim(tmp_path_factory.mktemp("shim"), repo_root)
