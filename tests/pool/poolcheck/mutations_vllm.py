"""Bugs of the connector for vLLM: old weights, and blocks of another prompt. They need an environment with vLLM."""

from __future__ import annotations

from poolcheck.mutant import Mutant, bug

SCHEDULER, LOOKUPS = (f"kvstore.integrations.vllm.scheduler_side.{name}" for name in ("scheduler", "lookups"))
HANDOFFS, KEYS = (f"kvstore.integrations.vllm.scheduler_side.{name}" for name in ("handoffs", "keys"))
WEIGHTS = "tests/vllm/test_new_weights.py"

CONNECTOR: tuple[Mutant, ...] = (
    bug(
        "a clearing that failed is forgotten",
        "ours: vLLM does not look at what its reset returns",
        SCHEDULER,
        "        else:\n            self.cleared.set()\n",
        "        self.cleared.set()\n",
        WEIGHTS,
    ),
    bug(
        "a failed clearing is not tried again",
        "ours: the engine went without the store for good",
        LOOKUPS,
        "            if self._link.clear():\n                cleared.wait(CLEAR_PAUSE_S)\n",
        "            if self._link.clear():\n                return\n",
        WEIGHTS,
    ),
    bug(
        "a clearing before the store is there is forgotten",
        "ours: beside other connectors the store is found in the first step",
        SCHEDULER,
        "            is_clear = self._clear()\n",
        "            is_clear = self.is_open and self._clear()\n",
        WEIGHTS,
    ),
    bug(
        "what vLLM keeps of before in its own cache is stored",
        "ours: a request ran during the reset, and the next one hit its blocks",
        SCHEDULER,
        "own.num_gpu_blocks - own.get_num_free_blocks() > 1",
        "False",
        WEIGHTS,
    ),
    bug(
        "of media that overlap one counts",
        "ours: as vLLM's own keys of a block",
        KEYS,
        "        if where.offset < end and begin < where.offset + where.length:\n",
        "        if index <= at and where.offset < end and begin < where.offset + where.length:\n",
        "tests/vllm/test_keys.py",
    ),
    bug(
        "a ticket is for any tail of its full blocks",
        "ours: the name had no more than the last full block's hash",
        HANDOFFS,
        "full[-1] + tracked.tail",
        "full[-1] + full[-1]",
        "tests/vllm/test_handoff_ranks.py::test_params_never_say_what_their_blocks_are",
    ),
    bug(
        "a tail has no length",
        "a tail of zeros would be a longer tail",
        KEYS,
        "encode_key((end % size, token_bytes(tokens), *keys))",
        "encode_key((token_bytes(tokens).rstrip(bytes(1)), *keys))",
        "tests/vllm/test_keys.py",
    ),
)
