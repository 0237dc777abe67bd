"""Tokenizers made on the spot with the `tokenizers` library: one of each kind that the targets use."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["a stop is a stop", "la presidencia de la república", "def stop(n): return n", "ab abc abcd 😀 €5 été"]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's kind: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback_tokenizer(strip_first_space: bool = False) -> PreTrainedTokenizerFast:
    """Gemma's kind, or with `strip_first_space` Llama 2's: words, and bytes for characters outside the vocabulary."""
    pieces = [
        "<unk>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdeinoprst",
        "▁a",
        "▁stop",
        "is",
        "ab",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip_first_space)
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
