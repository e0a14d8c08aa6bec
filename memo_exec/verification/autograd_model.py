"""Reference for every gradient: the same models in plain torch with autograd, written without our kernels.

Attention is a masked softmax over a full matrix, rotary positions are complex products, and the loss is torch's own.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from memo_exec.kernels import StepScalars
from memo_sim.contract.adapters import Adapters
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LATENT_NORM_EPS, LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.program.layout.parameters import SELECTION_BIAS

HELD_SCORES = 2**23
"""Attention scores of a layer that autograd saves; with more of them one head at a time runs again in its backward."""


class AutogradModel:
    """The model as a function of named leaf tensors."""

    def __init__(
        self,
        model: Model,
        parameters: dict[str, Tensor],
        dtype: torch.dtype = torch.float64,
        adapters: Adapters | None = None,
    ) -> None:
        """``adapters``: they alone have gradients; their sides are among ``parameters``."""
        self.model, self.adapters = model, adapters
        self.p = {name: value.detach().clone().to(dtype) for name, value in parameters.items()}
        self.trained = {name: p for name, p in self.p.items() if adapters is None or ".lora_" in name}
        """The leaves that have gradients, by name."""
        for leaf in self.trained.values():
            leaf.requires_grad_()
        self.routes: dict[str, Tensor] = {}
        """By layer, the experts (tokens, per_token) that the next tokens go to, in place of those with the best
        scores."""
        self.moved: dict[str, tuple[int, float]] = {}
        """By layer: how many of these are not among the best, and how far off the furthest one is (``_note``)."""

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        scale: float,
        rollout: Tensor | None = None,
        scalars: StepScalars | None = None,
    ) -> Tensor:
        """Return ``scale`` times the sum of losses; ids and labels are (sequences, tokens).

        ``rollout``: (sequences, tokens, 3) numbers of a policy's objective, whose constants ``scalars`` has.
        """
        logits = self.logits(ids)
        if rollout is not None:
            return _policy(logits, labels, rollout, scalars or StepScalars()) * scale
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return summed * scale

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of every token, (sequences, tokens, vocabulary)."""
        x = self.p["embed/tokens.weight"][ids]
        if self.model.scaled_embeddings:
            x = x * math.sqrt(self.model.hidden)
        if "embed/positions.weight" in self.p:
            x = x + self.p["embed/positions.weight"][torch.arange(ids.shape[1])]
        for i in range(self.model.layers):
            x = self._layer(x, f"layer.{i}/", self.model.layer(i))
        x = self._norm(x, "head/norm")
        return F.linear(x, self.p.get("head/classifier.weight", self.p["embed/tokens.weight"]))

    def _layer(self, x: Tensor, at: str, layer: LayerShape) -> Tensor:
        x = x + self._behind(self._attention(self._norm(x, f"{at}norm1"), at, layer), f"{at}post_attn")
        if layer.experts is not None:
            return x + self._experts(self._norm(x, f"{at}norm2").flatten(0, 1), layer.experts, at).view_as(x)
        up = self._linear(self._norm(x, f"{at}norm2"), f"{at}ffn_up")
        if self.model.gated:
            gate, up = up.chunk(2, dim=-1)
            act = (F.silu(gate) if self.model.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        else:
            act = F.gelu(up, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")
        return x + self._behind(self._linear(act, f"{at}ffn_down"), f"{at}post_mlp")

    def _behind(self, x: Tensor, name: str) -> Tensor:
        """Return the norm behind attention or the MLP, in models with one."""
        return self._norm(x, name) if self.model.post_norms else x

    def _experts(self, x: Tensor, experts: Experts, at: str) -> Tensor:
        """Return the sum of each token's experts; ``x`` is (tokens, hidden). There are no losses of the router.

        Scores are computed in fp32 or wider.
        """
        probs, chosen = self._routed(x, experts, at)
        out = torch.zeros_like(x)
        for expert in range(experts.count):
            tokens, place = torch.nonzero(chosen == expert, as_tuple=True)
            part = self._expert(x[tokens], experts, expert, at)
            out = out.index_add(0, tokens, part * probs[tokens, place, None])
        if experts.shared:
            gate, wide = self._linear(x, f"{at}shared_up").chunk(2, dim=-1)
            beside = self._linear(F.silu(gate) * wide, f"{at}shared_down")
            factor = self._linear(x, f"{at}shared_gate").sigmoid() if experts.shared_gate else 1.0
            out = out + factor * beside
        return out

    def _expert(self, x: Tensor, experts: Experts, expert: int, at: str) -> Tensor:
        """Return what one expert makes of rows."""
        up = self.p[f"{at}experts_up.weight"].view(experts.count, -1, x.shape[1])
        down = self.p[f"{at}experts_down.weight"].view(experts.count, x.shape[1], -1)
        biases = [self.p.get(f"{at}experts_{each}.bias") for each in ("up", "down")]
        up_bias, down_bias = (None if each is None else each.view(experts.count, -1)[expert] for each in biases)
        gate, wide = F.linear(x, up[expert], up_bias).chunk(2, dim=-1)
        if experts.activation == "clamped":
            gate = gate.clamp(max=7.0)
            act = gate * torch.sigmoid(1.702 * gate) * (wide.clamp(-7.0, 7.0) + 1)
        else:
            act = F.silu(gate) * wide
        return F.linear(act, down[expert], down_bias)

    def _routed(self, x: Tensor, experts: Experts, at: str) -> tuple[Tensor, Tensor]:
        """Return each token's probabilities and experts, (tokens, per_token).

        The selection bias's "gradient" is the number of rows of each expert, as in the programs.
        """
        logits, bias = self._linear(x, f"{at}router"), self.p.get(f"{at}{SELECTION_BIAS}")
        scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
        rated = scores.detach() + (0 if bias is None else bias.detach())
        allowed = rated
        if experts.groups > 1:
            groups = _group_scores(rated, experts)
            best = groups.topk(experts.groups_per_token, dim=1).indices
            outside = torch.ones(len(x), experts.groups, dtype=torch.bool).scatter(1, best, False)
            members = rated.view(len(x), experts.groups, -1)
            allowed = members.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
        chosen = allowed.topk(experts.per_token).indices
        if at in self.routes:
            self._note(at, chosen, rated, experts)
            chosen = self.routes[at]
        probs = scores.gather(1, chosen)
        if experts.renormalize:
            probs = probs / probs.sum(-1, keepdim=True)
        if bias is not None:
            loads = torch.bincount(chosen.flatten(), minlength=experts.count).to(bias.dtype)
            bias.grad = loads if bias.grad is None else bias.grad + loads
        return probs * experts.scale, chosen

    def _note(self, at: str, best: Tensor, rated: Tensor, experts: Experts) -> None:
        """Note how far the experts that were given for a layer are from the best ones.

        A token that goes to another group is as far off as its worst group is; of the others the worst expert counts.
        ``rated``: what experts are chosen by. Distances are relative to the largest rating of all tokens.
        """
        given = self.routes[at]
        gaps = (rated.gather(1, best).amin(1) - rated.gather(1, given).amin(1)) / rated.abs().max()
        if experts.groups > 1:
            groups, each = _group_scores(rated, experts), experts.count // experts.groups
            worst = groups.gather(1, given // each).amin(1)
            off = (groups.topk(experts.groups_per_token, dim=1).values.amin(1) - worst) / groups.abs().max()
            gaps = torch.where(off > 0, off, gaps)
        elsewhere = given.numel() - int((given[:, :, None] == best[:, None, :]).sum())
        count, furthest = self.moved.get(at, (0, 0.0))
        self.moved[at] = (count + elsewhere, max(furthest, float(gaps.max())))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, width = self.p[f"{name}.weight"], x.shape[-1:]
        if self.model.family == "gpt":
            return F.layer_norm(x, width, weight, self.p[f"{name}.bias"], self.model.norm_eps)
        return F.rms_norm(x, width, weight, self.model.norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        result = F.linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias"))
        return result if f"{name}.lora_a" not in self.p else result + self._adapter(x, name, result.shape[-1])

    def _adapter(self, x: Tensor, name: str, width: int) -> Tensor:
        """Return what a product's adapters add to its result of ``width`` features; 0 in those of other targets."""
        m, adapters = self.model, self.adapters
        assert adapters is not None  # its sides are there
        targets = {
            "qkv": {"q": m.q_width, "k": m.kv_width, "v": m.kv_width},
            "proj": {"proj": width},
            "ffn_up": {"gate": width // 2, "up": width // 2} if m.gated else {"up": width},
            "ffn_down": {"down": width},
        }[name.rpartition("/")[2]]
        adapted = {target: rows for target, rows in targets.items() if target in adapters.targets}
        lows = torch.split(self.p[f"{name}.lora_a"], adapters.rank)
        outs = torch.split(self.p[f"{name}.lora_b"], list(adapted.values()))
        added = {t: adapters.scale * F.linear(F.linear(x, a), b) for t, a, b in zip(adapted, lows, outs, strict=True)}
        nothing = {t: x.new_zeros(*x.shape[:-1], rows) for t, rows in targets.items()}
        return torch.cat([added.get(t, nothing[t]) for t in targets], dim=-1)

    def _attention(self, x: Tensor, at: str, layer: LayerShape) -> Tensor:
        m = self.model
        if m.latent is not None:
            return self._attended(*self._from_latents(x, at, m.latent), at, layer)
        packed = self._linear(x, f"{at}qkv").view(*x.shape[:-1], -1, m.head_dim).transpose(1, 2)
        q, k, v = torch.split(packed, [m.heads, m.kv_heads, m.kv_heads], dim=1)
        if m.qk_norm:
            q = F.rms_norm(q, q.shape[-1:], self.p[f"{at}q_norm.weight"], m.norm_eps)
            k = F.rms_norm(k, k.shape[-1:], self.p[f"{at}k_norm.weight"], m.norm_eps)
        if not m.learned_positions:
            q, k = self._rotated(q, layer.rope_theta), self._rotated(k, layer.rope_theta)
        k, v = (t.repeat_interleave(m.heads // m.kv_heads, dim=1) for t in (k, v))
        return self._attended(q, k, v, at, layer)

    def _from_latents(self, x: Tensor, at: str, latent: LatentAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V that latents make, each (sequences, heads, tokens, features)."""

        def heads(name: str, source: Tensor) -> Tensor:
            return torch.unflatten(self._linear(source, f"{at}{name}"), -1, (self.model.heads, -1)).transpose(1, 2)

        def normed(part: Tensor, name: str) -> Tensor:
            return F.rms_norm(part, part.shape[-1:], self.p[f"{at}{name}_norm.weight"], LATENT_NORM_EPS)

        parts = torch.split(self._linear(x, f"{at}latent"), [latent.q_rank, latent.kv_rank, latent.rope_dim], dim=-1)
        q = heads("q_up", normed(parts[0], "q_latent") if latent.q_rank else x)
        expanded = heads("kv_up", normed(parts[1], "kv_latent"))
        k, v = torch.split(expanded, [latent.nope_dim, latent.value_dim], dim=-1)
        shared = self._turned(parts[2].unsqueeze(1), latent).expand(-1, self.model.heads, -1, -1)
        own, rotary = torch.split(q, [latent.nope_dim, latent.rope_dim], dim=-1)
        q = torch.cat((own, self._turned(rotary, latent)), dim=-1) * latent.score_scale
        return q, torch.cat((k, shared), dim=-1), v

    def _turned(self, x: Tensor, latent: LatentAttention) -> Tensor:
        """Return rotary features after their rotation, sorted into halves."""
        return self._rotated(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if latent.interleaved else x, 0.0)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, at: str, layer: LayerShape) -> Tensor:
        """Return the projection of attention; each tensor is (sequences, heads, tokens, features)."""
        m = self.model
        if m.heads * q.shape[2] ** 2 <= HELD_SCORES:
            out = self._heads(q, k, v, layer.window, self.p.get(f"{at}sinks"))
        else:
            parts = [[t[:, head : head + 1] for t in (q, k, v)] for head in range(m.heads)]
            sinks = torch.split(self.p[f"{at}sinks"], 1) if m.sinks else [None] * m.heads
            out = torch.cat(
                [
                    checkpoint(self._heads, *part, layer.window, sink, use_reentrant=False)
                    for part, sink in zip(parts, sinks, strict=True)
                ],
                dim=1,
            )
        return self._linear(out.transpose(1, 2).flatten(2), f"{at}proj")

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Tensor:
        """Return the attention of some heads, each tensor (sequences, heads, tokens, head_dim)."""
        scores = q @ k.transpose(2, 3) / math.sqrt(self.model.query_scalar or self.model.head_dim)
        if not self.model.bidirectional:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~(seen.triu(1 - window) if window else seen), -torch.inf)
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v

    def _rotated(self, x: Tensor, theta: float) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        own = (theta or 1.0) ** (torch.arange(self.model.rotary_dim // 2, dtype=x.dtype) * (-2 / self.model.rotary_dim))
        frequencies = own if theta else self._frequencies(x.shape[2]).to(x.dtype)
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * frequencies
        scaling = None if theta else self.model.rope_scaling
        size = torch.full_like(angles, 1.0 if scaling is None else scaling.attention_factor)
        turned = torch.complex(first, second) * torch.polar(size, angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _frequencies(self, tokens: int) -> Tensor:
        m = self.model
        found = []
        for i in range(m.rotary_dim // 2):
            frequency = m.rope_theta ** (-2 * i / m.rotary_dim)
            if (s := m.rope_scaling) is not None:
                frequency = self._scaled(s, frequency, i, tokens)
            found.append(frequency)
        return torch.tensor(found, dtype=torch.float64)

    def _scaled(self, s: RopeScaling, frequency: float, i: int, tokens: int) -> float:
        """Return frequency number ``i`` of a sequence of ``tokens`` after scaling."""
        turns = s.original_max_positions * frequency / (2 * math.pi)
        match s.kind:
            case "linear":
                return frequency / s.factor
            case "llama3":
                share = min(1.0, max(0.0, (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)))
            case "yarn":
                share = 1.0 - self._interpolated(s, i)
            case "dynamic":
                longer = max(1.0, tokens / s.original_max_positions)
                grown = s.factor * longer - s.factor + 1
                return float(frequency * grown ** (-2 * i / (self.model.rotary_dim - 2)))
            case "longrope":
                return frequency / (s.long_factors if tokens > s.original_max_positions else s.short_factors)[i]
        return (1 - share) * frequency / s.factor + share * frequency

    def _interpolated(self, s: RopeScaling, i: int) -> float:
        """Return yarn's ramp at frequency number ``i``: 0 keeps the frequency, 1 divides it."""
        size, theta = self.model.rotary_dim, self.model.rope_theta
        ends = [
            size * math.log(s.original_max_positions / (2 * math.pi * b), theta) / 2 for b in (s.beta_fast, s.beta_slow)
        ]
        if s.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(0, ends[0]), min(size - 1, ends[1])
        return min(1.0, max(0.0, (i - low) / ((high - low) or 0.001)))


def _group_scores(rated: Tensor, experts: Experts) -> Tensor:
    """Return each group's score, (tokens, groups): the sum of its two best experts' ratings."""
    return rated.view(len(rated), experts.groups, -1).topk(2, dim=2).values.sum(2)


def _policy(logits: Tensor, labels: Tensor, rollout: Tensor, scalars: StepScalars) -> Tensor:
    """Return the sum of GRPO's losses over the tokens that count, as TRL writes it (``GRPOTrainer``, token level)."""
    counted = labels != -100
    chosen = torch.gather(logits.log_softmax(-1), -1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    advantages, drawn, reference = rollout.to(logits.dtype).unbind(-1)
    ratio = torch.exp(chosen - drawn)
    clipped = torch.clamp(ratio, 1 - scalars.clip_ratio, 1 + scalars.clip_ratio_high)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    kl = torch.exp(reference - chosen) - (reference - chosen) - 1
    return torch.where(counted, losses + scalars.kl_weight * kl, 0.0).sum()
