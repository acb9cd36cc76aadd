"""What kernels, torch and the CUDA driver raise, as errors of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvstore.errors import ConfigError, KernelError


@contextlib.contextmanager
def kernel_errors(what: str) -> Iterator[None]:
    """Translate errors of a body that calls kernels.

    Args:
        what: was being done, for the message.

    Raises:
        ConfigError: CuPy or the driver is missing.
        KernelError: anything else that torch, a kernel or the driver refused.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{what}: wanted the CUDA driver, got {error}; install it, or use CPU tensors") from error
    except (RuntimeError, ValueError) as error:
        raise KernelError(f"{what} failed: {error}") from error
