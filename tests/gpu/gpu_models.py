"""Models that need no download: a configuration, random weights that vLLM makes itself, and a tokenizer of numbered words.

``gpu_models.py NAME FOLDER``, with the engine's Python: it needs tokenizers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WORDS = 32000

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "dense": LLAMA_8B,
    "small": {**LLAMA_8B, "num_hidden_layers": 4},
    "moe": {
        **{key: value for key, value in LLAMA_8B.items() if key != "mlp_bias"},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "tiny": {
        **LLAMA_8B,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    },
}


def make(name: str, folder: Path) -> None:
    """Config and tokenizer; for vLLM's ``--load-format dummy``."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write(folder / "config.json", MODELS[name])


def weight_bytes(name: str) -> int:
    """Bytes of all weights together, two each."""
    c = MODELS[name]
    hidden, heads, kv = (
        c["hidden_size"],
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    experts = c.get("num_local_experts", 1)
    layer = hidden * (heads + 2 * kv) + heads * hidden + experts * 3 * hidden * c["intermediate_size"]
    return 2 * (2 * c["vocab_size"] * hidden + c["num_hidden_layers"] * layer)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
