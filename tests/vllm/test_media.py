"""Two recordings in the same text are two contents, and one is one, with a real multimodal model.

An audio model, because most image models of vLLM need torchvision, which `make test-vllm` has to leave out.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from asking import reported

VOCABULARY = 2048  # of `prompt_of`; the words of the model that are no text come behind
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<unk>")
NUM_BEFORE, NUM_OF_CLIP, NUM_AFTER = 40, 25, 100
HERTZ = 16_000
_seeds = itertools.count(400_000, 10)


def save_model(folder):
    """Make a small Qwen2-Audio with random weights, and a tokenizer and processor for it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    words = {f"w{number}": number for number in range(VOCABULARY)}
    words |= {name: VOCABULARY + at for at, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>",
        additional_special_tokens=list(SPECIAL[:3]),
    )  # fmt: skip
    hears = WhisperFeatureExtractor(feature_size=16, sampling_rate=HERTZ, hop_length=160, chunk_length=30)
    Qwen2AudioProcessor(feature_extractor=hears, tokenizer=tokenizer).save_pretrained(folder)
    torch.manual_seed(1)
    text = Qwen2Config(
        vocab_size=VOCABULARY + 16, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32,
        max_source_positions=1500, initializer_range=0.1,
    )  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=audio.to_dict(), text_config=text.to_dict(), audio_token_index=VOCABULARY, dtype="float32"
    )
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    Qwen2AudioForConditionalGeneration(config).float().save_pretrained(folder)
    rename_as_published(folder)


def rename_as_published(folder):
    """Give the weights the names that the published model's have: some releases of transformers write others."""
    from safetensors.torch import load_file, save_file

    for path in Path(folder).glob("*.safetensors"):
        weights = load_file(path)
        named = {name.replace("model.model.model.", "model.model."): weight for name, weight in weights.items()}
        save_file(named, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("audio"))
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def engines(model_folder, start_engine, connector, unit):
    """One on each node."""
    made = [
        start_engine(model_folder, block_size=unit, connector=connector(node), skip_tokenizer_init=False)
        for node in (0, 1)
    ]
    return [engine.wait_started() for engine in made]


@pytest.fixture
def text(prompt_of):
    """Tokens with one place for a recording."""
    tokens = prompt_of(NUM_BEFORE + NUM_AFTER, next(_seeds))
    return [*tokens[:NUM_BEFORE], VOCABULARY, *tokens[NUM_BEFORE:]]


def clip(seed):
    """Make a second of noise, another array each time."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(HERTZ).astype(np.float32), HERTZ


def asked(text, seed, name="asked"):
    return [(name, text, {"audio": clip(seed)})]


@pytest.fixture
def wanted(engines, text):
    """What is said to each of two recordings, computed without the store."""
    answers = [engines[1].run(asked(text, seed), cold=True, salt="apart")[0] for seed in (1, 2)]
    assert answers[0]["logprobs"] != answers[1]["logprobs"]
    return answers


@pytest.fixture
def full(unit):
    return (NUM_BEFORE + NUM_OF_CLIP + NUM_AFTER) // unit * unit


def test_the_same_recording_is_shared_and_another_one_is_not(engines, text, wanted, full, same, unit):
    one, other = engines
    before = NUM_BEFORE // unit * unit
    same(one.run(asked(text, 1)), wanted[:1])
    for seed, num_cached in ((1, full), (2, before), (2, full), (1, full)):
        assert other.reset()
        (answer,) = other.run(asked(text, seed))
        same([answer], [wanted[seed - 1]])
        assert answer["num_cached"] == num_cached, f"recording {seed}"
    assert one.reset()
    together = one.run(asked(text, 1, "one") + asked(text, 2, "other"))
    same(together, wanted)
    assert [answer["num_cached"] for answer in together] == [full, full]


def test_a_salt_keeps_the_same_recording_apart(engines, text, wanted, full, same):
    one, other = engines
    one.run(asked(text, 1), salt="a")
    for salt, num_cached in (("b", 0), (None, 0), ("a", full)):
        assert other.reset()
        (answer,) = other.run(asked(text, 1), salt=salt)
        same([answer], wanted[:1])
        assert answer["num_cached"] == num_cached, f"salt {salt}"


def test_a_ticket_is_for_the_recording_that_was_prefilled(engines, text, wanted, full, same):
    one, other = engines
    begun = one.run(asked(text, 1), max_tokens=1, transfer={"do_remote_decode": True})
    for seed, num_missed in ((2, 1), (1, 0)):
        before = other.stats()["worker"].get("num_failed_fetches_not_found", 0)
        (answer,) = other.run(asked(text, seed), transfer=begun[0]["transfer"])
        same([answer], [wanted[seed - 1]])
        assert other.stats()["worker"].get("num_failed_fetches_not_found", 0) == before + num_missed
    assert answer["num_cached"] == reported(begun[0]["transfer"], full)


def test_media_that_vllm_only_counts_are_neither_stored_nor_found(
    model_folder, start_engine, connector, text, prompt_of, same, unit, is_clean
):
    """Each engine calls its first recording the same; another one's KV must not come for it."""
    begun = []
    for seed in (1, 2):
        engine = start_engine(
            model_folder, block_size=unit, connector=connector(0, salt="counted"), skip_tokenizer_init=False,
            enable_prefix_caching=False, mm_processor_cache_gb=0,
        ).wait_started()  # fmt: skip
        (answer,) = engine.run(asked(text, seed))
        assert answer["num_cached"] == 0
        assert engine.run(asked(text, seed), cold=True, salt="apart")[0]["logprobs"] == answer["logprobs"]
        begun.append(engine)
    assert [engine.stats()["scheduler"]["num_unnamed_media_requests"] for engine in begun] == [2, 2]
    plain_text = prompt_of(100, next(_seeds))
    assert [engine.run([("text", plain_text, {})])[0]["num_cached"] for engine in begun] == [0, 100 // unit * unit]
    is_clean(*begun)


def test_engines_that_process_media_otherwise_do_not_share(
    engines, model_folder, start_engine, connector, text, full, same, unit, is_clean
):
    """vLLM gives a recording the same name in both, whatever its `--mm-processor-kwargs` make of it."""
    engine = start_engine(
        model_folder, block_size=unit, connector=connector(1), skip_tokenizer_init=False,
        mm_processor_kwargs={"n_fft": 200},
    ).wait_started()  # fmt: skip
    (wanted,) = engine.run(asked(text, 1), cold=True, salt="apart")
    (before,) = engines[0].run(asked(text, 1))
    assert before["logprobs"] != wanted["logprobs"]
    for num_cached in (0, full):
        assert engine.reset()
        (answer,) = engine.run(asked(text, 1))
        same([answer], [wanted])
        assert answer["num_cached"] == num_cached
    is_clean(engine)


def test_nothing_is_left(engines, is_clean):
    is_clean(*engines)
