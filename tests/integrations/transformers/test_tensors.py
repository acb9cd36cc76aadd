"""Tensors whose bytes do not say all that they hold are in no digest: they are refused."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import UnsupportedModel

HOLD_MORE = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse in rows": lambda: torch.eye(3).to_sparse_csr(),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(4)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "of oneDNN": lambda: torch.ones(4).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")  # Some kinds are deprecated, or prototypes.
@pytest.mark.parametrize("kind", HOLD_MORE)
def test_tensors_that_hold_more_than_their_bytes(build, wrap, kind):
    model = build()
    model.model.register_buffer("extra", HOLD_MORE[kind]())
    with pytest.raises(UnsupportedModel, match=r"model\.extra .*pass model_id"):
        wrap(model)
