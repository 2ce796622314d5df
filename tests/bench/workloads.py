"""What is embedded: English prose from the sample corpus, cut to lengths that are drawn once and for all."""
from __future__ import annotations

import json
import math
import random
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "embeddings" / "sample" / "corpus.jsonl"
TOKENS_PER_WORD = 1.35                                      # of this prose, with all-MiniLM-L6-v2's vocabulary


def words() -> list[str]:
    with SAMPLE.open() as lines:
        return [word for line in lines for word in json.loads(line)["text"].split()]


def _texts(lengths: list[int], draw: random.Random) -> list[str]:
    """Texts of about so many tokens, special ones included, each beginning somewhere else."""
    stock = words()
    texts = []
    for tokens in lengths:
        count = max(round((tokens - 2) / TOKENS_PER_WORD), 1)
        start = draw.randrange(len(stock) - count)
        texts.append(" ".join(stock[start:start + count]))
    return texts


def mixed(count: int) -> list[str]:
    """Lognormal lengths between 20 and 256 tokens, median 64."""
    draw = random.Random(1)
    lengths = [min(max(int(math.exp(draw.gauss(math.log(64), 0.6))), 20), 256) for _ in range(count)]
    return _texts(lengths, draw)


def long(count: int) -> list[str]:
    """Lognormal lengths between 20 and 512 tokens, median 128."""
    draw = random.Random(3)
    return _texts([min(max(int(math.exp(draw.gauss(math.log(128), 0.8))), 20), 512) for _ in range(count)], draw)


def short(count: int) -> list[str]:
    return _texts([16] * count, random.Random(2))


def single() -> str:
    """12 tokens"""
    return "how does a sailing boat move against the wind"


DECODER = {"model_type": "qwen3", "architectures": ["Qwen3Model"], "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16,
           "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 512, "max_position_embeddings": 512,
           "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 1e6, "attention_bias": False}
"""One block of Qwen3-Embedding-0.6B's shape, random weights."""
DECODER_LENGTHS = (40, 200, 97, 175)
