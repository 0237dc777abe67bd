"""Write the golden data of `test_speculators_parity.py` with the speculators package itself.

The package pins an older transformers and imports training dependencies at import time, so it runs in an environment of
its own, once, and its outputs are committed:

    python -m venv spec && spec/bin/pip install "torch>=2.11,<2.14" transformers==5.19.0 pydantic-settings loguru
    spec/bin/pip install --no-deps speculators==0.9.0
    spec/bin/python tests/drafters/make_speculators_golden.py tests/drafters/data

Every case is a directory as `save_pretrained` of the package writes it, plus `golden.safetensors`: the text, the
target's features, embedding and head, and for each anchor the package's hidden states, its logits corrected by the
Markov head along the text that follows the anchor, and its confidence logits.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file

VOCABULARY, WIDTH, LENGTH, ANCHORS = 96, 32, 26, (3, 9, 17)
BACKBONE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
CASES = {
    "dspark_vanilla": ("dspark", BACKBONE, {"draft_vocab_size": VOCABULARY, "markov_head_type": "vanilla"}),
    "dspark_gated_reduced": ("dspark", BACKBONE, {"draft_vocab_size": 40, "markov_head_type": "gated"}),
    "dspark_vanilla_reduced_masks_only_causal": (
        "dspark",
        BACKBONE | SLIDING,
        {"draft_vocab_size": 40, "markov_head_type": "vanilla", "sample_from_anchor": False},
    ),
    "dspark_rnn_masks_only_window": (
        "dspark",
        BACKBONE | SLIDING,
        {
            "draft_vocab_size": VOCABULARY,
            "markov_head_type": "rnn",
            "sample_from_anchor": False,
            "sliding_window_non_causal": True,
            "confidence_head_with_markov": False,
        },
    ),
    "dflash_reduced": ("dflash", BACKBONE, {"draft_vocab_size": 40}),
}


class StubTrainingImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for what the package imports but the models never use."""

    ROOTS = ("openai", "datasets", "hs_connectors")

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.ROOTS else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module) -> None:
        pass


def main(out: Path) -> None:
    sys.meta_path.insert(0, StubTrainingImports())
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    classes = {
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    }
    for seed, (name, (kind, backbone, fields)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        layers = Qwen3Config(**backbone)
        layers._attn_implementation = "eager"
        config_class, model_class = classes[kind]
        heads = {"markov_rank": 6} if kind == "dspark" else {}
        config = config_class(
            transformer_layer_config=layers,
            block_size=4,
            aux_hidden_state_layer_ids=[0, 3],
            mask_token_id=VOCABULARY - 1,
            **heads,
            **fields,
        )
        model = model_class(config).eval()
        head = torch.randn(VOCABULARY, WIDTH) * 0.2
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.normal_(1.0, 0.2)
                else:
                    parameter.normal_(0.0, 0.25)
            words = torch.arange(VOCABULARY)
            if model.use_draft_vocab:
                words = torch.randperm(VOCABULARY)[: model.draft_vocab_size].sort().values
                mask = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, words, True)
                model.load_vocab_mappings(mask, words - torch.arange(len(words)))
            model.lm_head.weight.copy_(head[words])
        golden = reference(model, kind)
        golden |= {"embedding": model.embed_tokens.weight, "head": head}
        directory = out / name
        model.save_pretrained(directory)
        save_file({k: v.detach().contiguous().clone() for k, v in golden.items()}, directory / "golden.safetensors")
        (directory / "config.py").unlink(missing_ok=True)  # the package copies its own source next to its models
        for file in directory.iterdir():
            file.chmod(0o644)


@torch.no_grad()
def reference(model, kind: str) -> dict[str, torch.Tensor]:
    """The package's own outputs for every anchor of one text."""
    text = torch.randint(VOCABULARY, (1, LENGTH))
    features = torch.randn(1, LENGTH, 2 * WIDTH)
    golden = {"text": text[0], "features": features[0], "anchors": torch.tensor(ANCHORS)}
    for anchor in ANCHORS:
        only = torch.zeros(1, LENGTH, dtype=torch.bool)
        only[0, anchor] = True
        hidden, logits, _, _, slots = model._backbone_forward(
            features,
            text,
            only,
            torch.zeros(1, LENGTH, WIDTH),
            torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=1,
        )
        golden[f"{anchor}.hidden"] = hidden[0]
        if kind == "dspark":
            block = text[0, slots].view(1, -1)
            previous = block if model.config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], 1)
            embedded = model.markov_head.prev_embeddings(previous)
            logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
            with_markov = model.config.confidence_head_with_markov
            golden[f"{anchor}.confidence"] = model.confidence_head(
                torch.cat([hidden, embedded], -1) if with_markov else hidden
            )[0]
        golden[f"{anchor}.logits"] = logits[0]
    return golden


if __name__ == "__main__":
    main(Path(sys.argv[1]))
