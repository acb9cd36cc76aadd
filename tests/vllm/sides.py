"""A scheduler's half without an engine, and requests for it."""

from __future__ import annotations

from types import SimpleNamespace

SIZE = 16


class Lookups:
    """Answers each question at once: nothing is stored. Prompts are hashed."""

    num_unhashed_tokens = 0

    def ask(self, question):
        question.hash_all()
        question.done = True


def scheduler_side(save="prompt", events=False, **more):
    """Make one of an engine with one worker, with a store that has nothing."""
    import kvstore
    from kvstore.integrations.vllm import options, stats
    from kvstore.integrations.vllm.scheduler_side import handoffs, saving, scheduler

    shape = kvstore.KVShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_size=SIZE)
    made = scheduler.SchedulerSide(
        options.Options(save=options.SavePolicy(save)), SIZE, 1,
        loads=True, produces=True, emits_events=events, stats=stats.Stats(), **more,
    )  # fmt: skip
    made.space, made.lookups, made.is_open = kvstore.Namespace(model="m", shape=shape), Lookups(), True
    made.saving = saving.Saving(made.space, SIZE, 1, save == "all", made.stats)
    made.handoffs = handoffs.HandoffSide(made.space, SIZE, 1, True, 10.0, made.stats)
    made.ending.open([None])
    return made


def request(name="r", num_tokens=40, **more):
    """Make one with as much of vLLM's as the scheduler's half looks at."""
    tokens = list(range(num_tokens))
    fields = {
        "prompt_token_ids": tokens, "all_token_ids": list(tokens), "num_prompt_tokens": num_tokens,
        "num_tokens": num_tokens, "num_computed_tokens": 0, "lora_request": None, "mm_features": None,
        "cache_salt": None, "prompt_embeds": None, "status": None, "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
    }  # fmt: skip
    return SimpleNamespace(request_id=name, **(fields | more))
