"""Training forward pass of the drafter: all blocks of a row share the keys and values of its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.drafters.model import DSparkModel
from surefoot.training.batches import Batch
from surefoot.training.loss import CONFIDENCE, confidence_loss, vocabulary_loss


def block_hidden(model: DSparkModel, batch: Batch) -> Tensor:
    """Hidden states of all blocks of a batch, [N, A, block_size, d].

    Equal to a dense pass with a mask over the whole row, computed as two smaller products per layer: every slot against
    the context of its row, and every block against itself. A dense mask would also compute scores between blocks.
    """
    config = model.config
    size, groups = config.block_size, config.num_attention_heads // config.num_key_value_heads
    context, rotations = model.context(batch.features), model.rotations(batch.positions)
    distance = batch.anchor_positions.unsqueeze(2) - batch.positions.unsqueeze(1)  # [N, A, C]
    visible = (distance > 0) & (batch.anchor_owner.unsqueeze(2) == batch.owner.unsqueeze(1))
    causal = torch.ones(size, size, dtype=torch.bool, device=context.device).tril()

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer, window = model.layers[index], config.window(index)
        past_key, past_value = layer.self_attn.key_value(context, rotations[layer.layer_type])  # [N, C, Hkv, D]
        count, slots = query.shape[:2]
        # [N, Hkv, A, G * block, D]: slots of a block and query heads of a key head in one dimension.
        heads = query.view(count, -1, size, config.num_key_value_heads, groups, config.head_dim)
        heads = heads.permute(0, 3, 1, 4, 2, 5).flatten(3, 4) * config.scaling
        own_key, own_value = (t.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4) for t in (key, value))

        past = heads.flatten(2, 3) @ past_key.permute(0, 2, 3, 1)  # [N, Hkv, A * G * block, C]
        seen = visible if window is None else visible & (distance <= window)
        past = past.unflatten(2, (-1, groups * size)).masked_fill(~seen[:, None, :, None], -torch.inf)
        own = heads @ own_key.transpose(-1, -2)  # [N, Hkv, A, G * block, block]
        if window is not None and not config.sliding_window_non_causal:
            own = own.masked_fill(~causal.repeat(groups, 1), -torch.inf)
        weights = torch.cat([past, own], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
        length = past.shape[-1]
        mixed = (weights[..., :length].flatten(2, 3) @ past_value.transpose(1, 2)).unflatten(2, (-1, groups * size))
        mixed = mixed + weights[..., length:] @ own_value  # [N, Hkv, A, G * block, D]
        mixed = mixed.unflatten(3, (groups, size)).permute(0, 2, 4, 1, 3, 5)  # [N, A, block, Hkv, G, D]
        return mixed.reshape(count, slots, -1, config.head_dim)

    tokens = model.block_tokens(batch.anchors).flatten(1)
    positions = model.block_positions(batch.anchor_positions).flatten(1)
    return model.backbone(tokens, positions, attend).unflatten(1, (batch.anchors.shape[1], -1))


@dataclass(frozen=True)
class Measured:
    """Per position of all blocks of a batch; detached."""

    acceptance: Tensor  # [N, A, gamma] float32, 1 - TV
    agrees: Tensor | None  # [N, A, gamma] bool, accepted at temperature 0; None while gradients are recorded
    confidence: Tensor | None  # [N, A, gamma] float32 logits


class DraftLoss(nn.Module):
    """Maps a batch to the weighted sum of the loss; the module that DistributedDataParallel wraps.

    `markov_w1` of the model is indexed by `Batch.previous` (tokens seen), not by target ids.
    """

    head: Tensor

    def __init__(self, model: DSparkModel, head: Tensor, dtype: torch.dtype) -> None:
        """
        Args:
            head: [V_draft, d_target] float32, frozen.
            dtype: of the products.
        """
        super().__init__()
        self.model, self.dtype = model, dtype
        self.register_buffer("head", head, persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Measured]:
        model, config = self.model, self.model.config
        device = batch.features.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            slots = block_hidden(model, batch)  # [N, A, block_size, d]
            first, gamma = config.first_slot, config.gamma
            blocks = slots.flatten(0, 1)
            hidden = blocks[:, first : first + gamma]  # [B, gamma, d]
            embedded = latent = None
            markov = model.markov_head
            if markov is not None:
                embedded = markov.embed(batch.previous.flatten(0, 1))
                if first:  # a recurrent state runs through the anchor's slot as well
                    latent = markov.latents(torch.cat([embedded[:, :1], embedded], 1), blocks)[:, 1:]
                else:
                    latent = markov.latents(embedded, hidden)
            confidence = None
            if model.confidence_head is not None:  # its inputs are detached: it must not train the backbone
                read = embedded.detach() if embedded is not None and config.confidence_head_with_markov else None
                confidence = model.confidence_head(hidden.detach(), read)
        weight = batch.weight.flatten()
        # A narrower drafter reaches the head through `head_proj`. Folded into the head once per batch, the products per
        # position have the drafter's width.
        head = self.head if model.head_proj is None else self.head @ model.head_proj.weight
        scores = vocabulary_loss(
            hidden.flatten(0, 1),
            head,
            None if latent is None else latent.flatten(0, 1),
            None if markov is None else markov.markov_w2.weight,
            batch.labels,
            batch.label_rows.flatten(),
            weight,
            softcap=config.final_logit_softcapping,
            dtype=self.dtype,
            compare=not torch.is_grad_enabled(),
        )
        loss = scores.loss
        if confidence is not None:
            loss = loss + CONFIDENCE * confidence_loss(confidence.flatten().to(weight.dtype), scores.acceptance, weight)
        shape = batch.weight.shape
        return loss, Measured(
            scores.acceptance.view(shape),
            None if scores.agrees is None else scores.agrees.view(shape),
            None if confidence is None else confidence.detach().view(shape),
        )
