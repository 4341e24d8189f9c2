"""The Llama architecture (Touvron et al., 2023) in PyTorch, with the names of `mlx_lm.models.llama`."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Fields of `config.json`: two million parameters, 8 MiB in float32."""

    vocab_size: int = 1536
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) by halves; `x` is (batch, heads, length, head_dim)."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
            for projection, heads in [
                (self.q_proj, self.heads),
                (self.k_proj, self.key_heads),
                (self.v_proj, self.key_heads),
            ]
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        grouped = self.heads != self.key_heads
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropped(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.dropped(self.mlp(self.post_attention_layernorm(x)))

    def dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Decoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary); the head is the embedding.

    A row may hold several conversations: each begins with the token `begin`, and none sees another.
    """

    def __init__(self, shape: Shape, begin: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.begin = shape, begin
        self.model = Decoder(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.04 / (2 * shape.num_hidden_layers) ** 0.5 if last else 0.04)

    def forward(self, tokens: Tensor) -> Tensor:
        half = torch.arange(self.shape.head_dim // 2, device=tokens.device)
        frequencies = self.shape.rope_theta ** (-2 * half / self.shape.head_dim)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        conversation = (tokens == self.begin).cumsum(dim=1)
        mask = (conversation[:, :, None] == conversation[:, None, :]).tril()[:, None]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def configuration(shape: Shape, begin: int, end: int, pad: int) -> dict[str, object]:
    """`config.json` as mlx-lm and transformers read it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
