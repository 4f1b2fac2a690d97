"""Make a tiny random Llama with its own tokenizer: ``python make_tiny_model.py OUT``. Run it with the engine's Python.

The model is the smallest that vLLM's CPU attention takes (it refuses a head of 16) and that splits over two ranks.
The same seed gives the same bytes, so that two machines can compare answers. Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SEED = 20260
VOCABULARY = 1000
SPECIAL = ("<s>", "</s>", "<pad>")
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
COMPLETE = ".complete"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
# Weights this wide keep greedy text from repeating one token; the usual 0.02 does not.
WEIGHT_STD = 0.25


def training_text(lines: int = 3000) -> Iterator[str]:
    """Sentences of made-up words: enough different pairs for a thousand tokens."""
    dice = random.Random(SEED)
    syllables = [a + b + c for a in "bdfgklmnprstv" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    words = ["".join(dice.choices(syllables, k=dice.randint(1, 3))) for _ in range(1500)]
    common = ["the", "of", "and", "a", "to", "in", "is", "The capital of", "Hello world"]
    for _ in range(lines):
        yield " ".join(dice.choice(common if dice.random() < 0.3 else words) for _ in range(12)) + "."


def write_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    tokenizer.save(str(out / "tokenizer.json"))
    start, end, padding = SPECIAL
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": start,
            "eos_token": end,
            "pad_token": padding,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of each weight, as Hugging Face's Llama names them."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        result |= {f"{prefix}self_attn.{name}_proj.weight": (heads, hidden) for name in "qkv"}
        result[prefix + "self_attn.o_proj.weight"] = (hidden, heads)
        result |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        result[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        result |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return result | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


def write_weights(out: Path) -> int:
    """Write the weights; returns how many numbers they are."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes().items():
        wide = torch.randn(shape, generator=generator) * WEIGHT_STD if len(shape) > 1 else torch.ones(shape)
        weights[name] = wide.to(torch.bfloat16)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def is_complete(out: Path) -> bool:
    marker = out / COMPLETE
    return marker.is_file() and marker.read_text() == stamp() and all((out / name).is_file() for name in FILES)


def stamp() -> str:
    """What the model was made from: another configuration makes it anew."""
    return json.dumps({"seed": SEED, "std": WEIGHT_STD, **CONFIG}, sort_keys=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: make_tiny_model.py OUT", file=sys.stderr)
        return 64
    out, start = Path(arguments[0]), time.monotonic()
    if is_complete(out):
        print(f"model: there already: {out}")
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / COMPLETE).unlink(missing_ok=True)
        write_json(out / "config.json", CONFIG)
        write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
        write_tokenizer(out)
        numbers = write_weights(out)
        (out / COMPLETE).write_text(stamp())
    except OSError as error:
        print(f"make_tiny_model.py: cannot write the model: {error}", file=sys.stderr)
        return 73
    print(f"model: {numbers} weights, {VOCABULARY} tokens, {time.monotonic() - start:.1f} s: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
