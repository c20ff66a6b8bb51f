"""Timing cases for the ops of a step besides verify attention: ours, PyTorch reference, SGLang.

Weights are rotated, so that none hits the L2 cache; activations just written are small and stay
there, as in serving. `twin` is the PyTorch reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.op_inputs import Inputs, Sizes
from benchmarks.sglang_ops import SGLang
from sglang_dflash.kernels import TORCH, Noise, Ops

Call = Callable[[int], object]  # takes the call's number, which selects the copy of the weight


@dataclass(frozen=True)
class Case:
    op: str
    moved: int  # minimum bytes read and written
    ours: Call
    twin: Call | None  # None if it reads lengths on the host: no CUDA graph can capture it
    sglang: Call | None
    calls: int = 24  # per CUDA graph


def cases(requests: int, ops: Ops, sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Yield a case per op for a batch of blocks; its tensors are freed before the next is made."""
    maker = Maker(requests, sizes, dtype, device)
    theirs = SGLang.find()
    yield maker.build_block(ops, theirs)
    yield maker.index_prefixes(ops, theirs)
    yield from maker.layer_norms(ops, theirs)
    yield maker.norm_and_rotate_qkv(ops, theirs)
    yield from maker.products(ops, theirs)
    yield maker.argmax_rows(ops)
    yield maker.argmax_rows(ops, maker.noise())
    yield maker.argmax_and_sample(ops, maker.noise(scale=0.0), "argmax drafts")
    yield maker.argmax_and_sample(ops, maker.noise(), "argmax and sampled drafts")
    yield maker.peak_probabilities(ops)
    yield maker.share_rows(ops)
    yield maker.sample_rows(ops, theirs)
    yield maker.reject_by_block(ops)
    yield maker.accept(ops, theirs)
    yield maker.context_hidden(ops, theirs)
    yield maker.write_context(ops, theirs)


class Maker(Inputs):
    """Builds a case per op, each on its own tensors."""

    def build_block(self, ops: Ops, theirs: SGLang | None) -> Case:
        anchors, out = self.whole(9, self.requests), self.block()
        arguments = (anchors, self.lens, self.pool_rows, self.table)

        def call(which: Ops) -> Call:
            last = self.sizes.context
            return lambda turn: which.build_block(
                *arguments, mask_token_id=4, last_position=last, **out
            )

        return Case(
            "block building",
            sum(x.nbytes for x in out.values()) + self.table.element_size() * self.rows,
            call(ops),
            call(TORCH),
            theirs
            and (
                lambda turn: theirs.dflash._prepare_dflash_draft_block_unchecked(
                    *arguments, *out.values(), 4
                )
            ),
        )

    def index_prefixes(self, ops: Ops, theirs: SGLang | None) -> Case:
        bounds = torch.zeros(self.requests + 1, dtype=torch.int32, device=self.device)
        slots = self.whole(9, self.requests * self.sizes.context)

        def sglang(turn: int) -> None:
            assert theirs
            bounds[1:] = torch.cumsum(self.lens, dim=0)
            theirs.kv_indices[(self.requests,)](
                self.table, self.pool_rows, self.lens, bounds, None, slots, self.table.stride(0)
            )

        moved = int(self.lens.sum()) * (self.table.element_size() + slots.element_size())
        return Case(
            "prefix index",
            moved,
            lambda turn: ops.index_prefixes(self.table, self.pool_rows, self.lens, bounds, slots),
            None,
            theirs and sglang,
        )

    def layer_norms(self, ops: Ops, theirs: SGLang | None) -> Iterator[Case]:
        """The residual sum is normed for the MLP after attention, for the next layer after the MLP.

        With experts, it is normed after attention for the MLP, the router and the experts;
        afterwards both branches are normed and summed.
        """
        x, residual, branch = (self.normal(self.rows, self.sizes.hidden) for _ in range(3))
        weight, one = self.normal(self.sizes.hidden), self.normal(1)

        def attention(turn: int) -> None:
            assert theirs
            theirs.fused_add_rmsnorm(theirs.rmsnorm(x, weight), residual, weight)

        def before_experts(turn: int) -> None:
            assert theirs
            attention(turn)
            for _router_and_experts in range(2):
                theirs.rmsnorm(residual, weight)

        def mlp(turn: int) -> None:
            assert theirs
            theirs.rmsnorm(theirs.rmsnorm_residual(x, weight, residual, one), weight)

        def experts(turn: int) -> None:
            assert theirs
            joined = theirs.dual_rmsnorm(x, weight, branch, weight, weight, residual, one)
            theirs.rmsnorm(joined, weight)

        def call(which: Ops, following: int, scale: Tensor | None, *, joined: bool) -> Call:
            return lambda turn: which.norm_add_norm(
                x[None],
                residual,
                norm_weight=weight,
                next_weights=(weight,) * following,
                scale=scale,
                eps=1e-6,
                expert_branch=(branch, weight, weight) if joined else None,
            )

        for name, following, scale, joined, other in (
            ("attention", 1, None, False, attention),
            ("attention, before experts", 3, None, False, before_experts),
            ("the MLP", 1, one, False, mlp),
            ("the MLP and experts", 1, one, True, experts),
        ):
            yield Case(
                f"norms after {name}",
                (3 + following + joined) * x.nbytes,
                call(ops, following, scale, joined=joined),
                call(TORCH, following, scale, joined=joined),
                theirs and other,
            )

    def norm_and_rotate_qkv(self, ops: Ops, theirs: SGLang | None) -> Case:
        s = self.sizes
        qkv = self.normal(self.rows, (s.q_heads + 2 * s.kv_heads) * s.head_dim)
        weight, cos_sin = self.normal(s.head_dim), self.cos_sin(s.head_dim)

        def call(which: Ops) -> Call:
            return lambda turn: which.norm_and_rotate_qkv(
                *(qkv, self.positions),
                q_weight=weight,
                k_weight=weight,
                cos_sin=cos_sin,
                q_heads=s.q_heads,
                kv_heads=s.kv_heads,
                eps=1e-6,
            )

        def sglang(turn: int) -> None:
            assert theirs
            sizes = [s.q_heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
            q, k, v = qkv.split(sizes, dim=-1)
            theirs.qkv_rmsnorm(
                *(q, k, v, weight, weight),
                num_q_heads=s.q_heads,
                num_kv_heads=s.kv_heads,
                head_dim=s.head_dim,
            )
            # as in SGLang's layer, which makes the strided keys contiguous here
            k = k.reshape(self.rows, s.kv_heads, s.head_dim)
            theirs.rope(
                positions=self.positions,
                q=q.unflatten(-1, (s.q_heads, s.head_dim)),
                k=k,
                cos_sin_cache=cos_sin,
                is_neox=True,
            )

        return Case(
            "norms and RoPE of q, k, v",
            2 * qkv.nbytes,
            call(ops),
            call(TORCH),
            theirs and sglang,
        )

    def products(self, ops: Ops, theirs: SGLang | None) -> Iterator[Case]:
        """Yield the GEMMs for which we have a kernel at this size."""
        s = self.sizes
        attended = s.q_heads * s.head_dim

        def rotating(
            product: Callable[[Tensor, Tensor], object], x: Tensor, weights: list[Tensor]
        ) -> Call:
            return lambda turn: product(x, weights[turn % len(weights)])

        for name, width, depth in (
            ("q, k, v", attended + 2 * s.kv_heads * s.head_dim, s.hidden),
            ("o", s.hidden, attended),
            ("down", s.hidden, s.mlp),
        ):
            weights = [self.normal(width, depth) for _ in range(s.weight_copies)]
            x = self.normal(self.rows, depth)
            if ops.thin_linear(x, weights[0]) is not None:
                yield Case(
                    f"product, {name}",
                    weights[0].nbytes,
                    rotating(ops.thin_linear, x, weights),
                    rotating(TORCH.thin_linear, x, weights),
                    theirs and rotating(F.linear, x, weights),
                )

    def argmax_rows(self, ops: Ops, noise: Noise | None = None) -> Case:
        """SGLang upcasts to fp32, softcaps and uses torch's argmax: our reference without noise."""
        logits = self.normal(self.rows, self.sizes.vocabulary)
        cap = self.sizes.logit_cap
        return Case(
            "argmax of capped logits" + (" and noise" if noise else ""),
            logits.nbytes,
            lambda turn: ops.argmax_rows(logits, cap, noise),
            lambda turn: TORCH.argmax_rows(logits, cap, noise),
            None,
        )

    def argmax_and_sample(self, ops: Ops, noise: Noise, name: str) -> Case:
        logits = self.normal(self.rows, self.sizes.vocabulary)
        cap = self.sizes.logit_cap
        return Case(
            name,
            logits.nbytes,
            lambda turn: ops.argmax_and_sample(logits, cap, noise),
            lambda turn: TORCH.argmax_and_sample(logits, cap, noise),
            None,
        )

    def peak_probabilities(self, ops: Ops) -> Case:
        logits, cap = self.normal(self.rows, self.sizes.vocabulary), self.sizes.logit_cap
        return Case(
            "confidence",
            logits.nbytes,
            lambda turn: ops.peak_probabilities(logits, cap),
            lambda turn: TORCH.peak_probabilities(logits, cap),
            None,
        )

    def share_rows(self, ops: Ops) -> Case:
        sure = torch.rand(self.requests, self.sizes.block_size - 1, device=self.device)
        given = (sure, torch.zeros_like(sure[0]), torch.ones_like(sure[0]), self.rows // 2)
        ours, twin = (lambda turn, which=each: which.share_rows(*given) for each in (ops, TORCH))
        return Case("sharing of rows", sure.nbytes, ours, twin, None)

    def sample_rows(self, ops: Ops, theirs: SGLang | None) -> Case:
        """SGLang upcasts to fp32, softcaps, scales and normalises before it filters and samples."""
        logits = self.normal(self.rows, self.sizes.vocabulary)
        cap = self.sizes.logit_cap
        noise = self.noise()
        filters = {
            "temperatures": torch.full((self.requests,), 0.9, device=self.device),
            "top_ks": torch.full((self.requests,), 64, dtype=torch.int32, device=self.device),
            "top_ps": torch.full((self.requests,), 0.95, device=self.device),
        }
        by_row = [each.repeat_interleave(self.sizes.block_size) for each in filters.values()]

        def sglang(turn: int) -> object:
            assert theirs
            wide = logits.float()
            theirs.softcap(wide, cap)
            wide.div_(by_row[0][:, None])
            wide[:] = torch.softmax(wide, dim=-1)
            return theirs.top_k_top_p(wide, *by_row[1:], filter_apply_order="joint")

        return Case(
            "top-k and top-p sampling",
            logits.nbytes,
            lambda turn: ops.sample_rows(logits, noise, **filters, logit_cap=cap),
            lambda turn: TORCH.sample_rows(logits, noise, **filters, logit_cap=cap),
            theirs and sglang,
            calls=2,  # the reference sorts
        )

    def reject_by_block(self, ops: Ops) -> Case:
        """SGLang has no counterpart."""
        shape = (self.requests, self.sizes.block_size, self.sizes.vocabulary)
        logits, draft_logits = self.normal(*shape), self.normal(*shape)[:, 1:]
        tokens = self.whole(shape[2], 2, self.requests, shape[1] - 1)
        uniforms = torch.rand(self.requests, shape[1] - 1, device=self.device)
        is_sampled = torch.ones(self.requests, dtype=torch.bool, device=self.device)
        asked = (logits, draft_logits, tokens[0], tokens[1], self.noise(), uniforms)

        def call(which: Ops) -> Call:
            cap = self.sizes.logit_cap
            return lambda turn: which.reject_by_block(*asked, is_sampled=is_sampled, logit_cap=cap)[
                0
            ]

        return Case(
            "block verification",
            2 * (logits.nbytes + draft_logits.nbytes),
            call(ops),
            call(TORCH),
            None,
            calls=2,  # the reference materialises all probabilities
        )

    def accept(self, ops: Ops, theirs: SGLang | None) -> Case:
        token_ids = self.whole(2, self.requests, self.sizes.block_size)
        choices, slots = torch.zeros_like(token_ids), torch.zeros_like(token_ids)

        def call(which: Ops) -> Call:
            return lambda turn: which.accept_block(token_ids, choices, self.lens, slots)

        def sglang(turn: int) -> None:
            assert theirs
            small = [torch.empty_like(self.lens, dtype=torch.int32) for _ in range(2)]
            theirs.dflash._compute_dflash_accept_bonus_triton_unchecked(
                *(token_ids, choices, *small, torch.empty_like(self.lens)),
                *(torch.empty_like(token_ids), self.lens, torch.empty_like(self.lens)),
            )

        return Case(
            "acceptance and commit",
            5 * token_ids.nbytes,
            call(ops),
            call(TORCH),
            theirs and sglang,
        )

    def context_hidden(self, ops: Ops, theirs: SGLang | None) -> Case:
        s = self.sizes
        features = self.normal(self.rows, s.features * s.hidden)
        weights = [self.normal(s.hidden, s.features * s.hidden) for _ in range(s.weight_copies)]
        norm = self.normal(s.hidden)

        def call(which: Ops) -> Call:
            return lambda turn: which.context_hidden(
                features, fc_weight=weights[turn % len(weights)], norm_weight=norm, eps=1e-6
            )

        return Case(
            "features: projection and norm",
            weights[0].nbytes + features.nbytes,
            call(ops),
            call(TORCH),
            theirs
            and (
                lambda turn: theirs.rmsnorm(F.linear(features, weights[turn % len(weights)]), norm)
            ),
        )

    def write_context(self, ops: Ops, theirs: SGLang | None) -> Case:
        s = self.sizes
        shape = (s.draft_kv_heads, s.draft_head_dim)
        layers = range(s.draft_layers)
        projected = self.normal(s.draft_layers, self.rows, 2 * shape[0] * shape[1])
        theirs_projected = projected.transpose(0, 1).contiguous()
        keys, values = ([self.normal(2 * self.rows, *shape) for _ in layers] for _ in range(2))
        slots = torch.randperm(2 * self.rows, device=self.device)[: self.rows]
        norms, cos_sin = self.normal(s.draft_layers, shape[1]), self.cos_sin(shape[1])
        eps = torch.full((s.draft_layers,), 1e-6, device=self.device)

        def call(which: Ops) -> Call:
            own_norms = list(norms)
            return lambda turn: which.write_context(
                *(projected, self.positions, slots, keys, values),
                k_norm_weights=own_norms,
                cos_sin=cos_sin,
                eps=1e-6,
            )

        def sglang(turn: int) -> None:
            assert theirs
            made = theirs.norm_and_rope(
                *(theirs_projected, norms, eps, cos_sin, self.positions),
                *(*shape, shape[1]),
            )
            for layer in zip(*made, keys, values, strict=True):
                theirs.store_cache(*(x.flatten(1) for x in layer), slots)

        return Case(
            "features: norm, RoPE, KV write of all layers",
            2 * projected.nbytes,
            call(ops),
            call(TORCH),
            theirs and sglang,
        )
