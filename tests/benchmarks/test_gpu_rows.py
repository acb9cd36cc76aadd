"""The benchmarks that need a GPU say so where there is none."""

import click
import pytest
import torch

from benchmarks import gpu_rows


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(click.ClickException, match="wanted a CUDA device"):
        gpu_rows.print_rows([("part", lambda: pytest.fail("measured"))], as_json=True)
