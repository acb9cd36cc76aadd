"""A Hugging Face model with a prefix cache: the second answer computes only what is new.

$ python examples/transformers_generate.py
first:  0 of 600 prompt tokens from the store
second: 592 of 610 prompt tokens from the store
tokens as without a store: yes
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.integrations.transformers import PrefixCachedModel


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=704, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()  # yours: AutoModelForCausalLM.from_pretrained(...).eval()
    document, question = torch.randint(4096, (1, 600)), torch.randint(4096, (1, 10))
    store = kvstore.start("256MiB")  # joins the Ray of this machine, or starts one
    try:
        with PrefixCachedModel(model, store) as cached:
            cached.generate(document, max_new_tokens=16, do_sample=False)
            print(f"first:  {cached.stats.num_loaded_tokens} of 600 prompt tokens from the store")
            prompt = torch.cat([document, question], 1)
            answer = cached.generate(prompt, max_new_tokens=16, do_sample=False)
            print(f"second: {cached.stats.num_loaded_tokens} of 610 prompt tokens from the store")
    finally:
        store.stop()
    same = torch.equal(answer, model.generate(prompt, max_new_tokens=16, do_sample=False))
    print(f"tokens as without a store: {'yes' if same else 'no'}")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
