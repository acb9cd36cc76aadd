"""What kernels, torch and the CUDA driver raise, as errors of ours."""

from __future__ import annotations

from kvstore.errors import ConfigError, KernelError


class kernel_errors:
    """Translate errors of a body that calls kernels.

    No generator, because such bodies are where an engine waits.

    Args:
        what: was being done, for the message.

    Raises:
        ConfigError: CuPy or the driver is missing.
        KernelError: anything else that torch, a kernel or the driver refused.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Begin the body."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ImportError):
            raise ConfigError(f"{self._what}: {error}") from error
        if isinstance(error, OSError):
            fix = "install it, or use CPU tensors"
            raise ConfigError(f"{self._what}: wanted the CUDA driver, got {error}; {fix}") from error
        if isinstance(error, (RuntimeError, ValueError)):
            raise KernelError(f"{self._what} failed: {error}") from error
