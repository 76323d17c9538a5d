"""The transformer of this project in plain PyTorch: what "right" means for its logits, loss and gradients.

Llama's decoder, in any precision: RMSNorm, rotary positions, grouped-query causal attention, SwiGLU, no
biases, untied head. The parameters bear the names of Hugging Face's LlamaForCausalLM. make_golden.py runs it
to write the files that the tests read; pytorch_speed.py measures it."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -1  # a target that does not count


@dataclasses.dataclass
class Config:
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self):
        return self.d_model // self.heads


def rotary_table(positions, config, dtype):
    """Cosine and sine of position x frequency, each [sequence, head_size / 2]."""
    pair = torch.arange(config.head_size // 2, dtype=torch.float64, device=positions.device)
    frequency = config.rope_theta ** (-2 * pair / config.head_size)
    angle = positions[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_half(x, cos, sin):
    """Turns the pairs (i, i + head_size / 2) by their angles. x: [batch, heads, sequence, head_size]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def plain_attention(q, k, v):
    """q: [batch, heads, sequence, head_size]; k, v: [batch, kv_heads, sequence, head_size]."""
    group = q.shape[1] // k.shape[1]  # query head h reads key-value head h / group
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [batch, heads, query, key]
    future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


class Attention(nn.Module):
    def __init__(self, config, core):
        super().__init__()
        self.head_size, self.core = config.head_size, core
        kv_size = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_size, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_size, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x, cos, sin):
        batch, sequence, _ = x.shape
        q, k, v = (
            proj(x).view(batch, sequence, -1, self.head_size).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.core(rotate_half(q, cos, sin), rotate_half(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, core):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.self_attn = Attention(config, core)
        self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config, core):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, core) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)

    def forward(self, tokens, positions):
        x = self.embed_tokens(tokens)
        cos, sin = rotary_table(positions, self.config, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, config, core=plain_attention):
        super().__init__()
        self.model = Decoder(config, core)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens, positions):
        """tokens: [batch, sequence]; positions: [sequence]; the logits: [batch, sequence, vocab_size]."""
        return self.lm_head(self.model(tokens, positions))


def micro_batch_loss(logits, targets, target_tokens):
    """This micro-batch's share of the global batch's loss, so that shares, and their gradients, are summed.
    target_tokens: targets of the *global* batch that are not ignored."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / target_tokens


def adamw(model, lr, weight_decay, **options):
    """AdamW that decays the matrices, embedding and head included, but not the norms."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, **options)
