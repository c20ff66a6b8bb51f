"""Which attention kernel serves the target's verify blocks, and how the choice is reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.models import verify_backend
from sglang_dflash.kernels import cards, triton_ops
from sglang_dflash.kernels.attention import reference
from sglang_dflash.kernels.attention.tiles import LayerShape
from sglang_dflash.kernels.attention.verify import VerifyAttention
from sglang_dflash.kernels.cards import Card

# query heads, KV heads, key head dim, value head dim
Shape = tuple[int, int, int, int]
GROUPED: Shape = (8, 2, 128, 128)
# MLA in a verify block (one wide KV head), and MLA in prefill
LATENT: Shape = (16, 1, 576, 512)
EXPANDED: Shape = (16, 16, 192, 128)


def make_backend(**changes: Any) -> Any:
    """Return a Triton backend with only the attributes that the choice reads, and no GPU."""
    backend = object.__new__(compat.TritonAttnBackend)
    settings = {
        "enable_deterministic": False,
        "use_mla": False,
        "dcp_size": 1,
        # one or the other says that slots have the numbers that the scheduler gave them
        "_translate_kv_loc": None,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "use_sliding_window_kv_pool": False,
        "token_to_kv_pool": None,
        "sliding_window_size": None,
        "qo_indptr": torch.zeros(5, dtype=torch.int32),
        "device": "cpu",
        **changes,
    }
    for name, value in settings.items():
        setattr(backend, name, value)
    return backend


def make_runner(backend: Any, *shapes: Shape) -> Any:
    layers = [
        compat.RadixAttention(
            heads, width, scaling=1.0, num_kv_heads=kv_heads, layer_id=i, v_head_dim=value_width
        )
        for i, (heads, kv_heads, width, value_width) in enumerate(shapes)
    ]
    return SimpleNamespace(
        attn_backend=backend, model=nn.ModuleList(layers), dtype=torch.bfloat16, device="cpu"
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    card = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return lambda runner: verify_backend.install_verify_attention(
        runner, triton_ops(), max_requests=4, block_size=4, full_blocks=False
    )


def test_our_kernel_serves_layers_that_it_has_tiles_for(install: Any) -> None:
    backend = make_backend()
    assert install(make_runner(backend, GROUPED, EXPANDED)) == "sglang_dflash.verify_attention"
    assert isinstance(backend.forward_extend.__self__, verify_backend.VerifyBackend)


@pytest.mark.parametrize("latent", [LATENT, (16, 1, 192, 128)])
def test_mla_keeps_sglangs_kernel_whatever_its_size(install: Any, latent: Shape) -> None:
    """Our kernel reads values from a cache of their own, and would refuse each layer when it runs;
    the widths and graphs for it were chosen long before."""
    backend = make_backend(use_mla=True)
    serves = install(make_runner(backend, latent, EXPANDED))
    assert serves == "TritonAttnBackend: with MLA the values are a part of the keys"
    assert "forward_extend" not in vars(backend)


def test_heads_that_are_too_wide_keep_sglangs_kernel_and_the_reason_is_told(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If refused, such a target could not be served at all: our kernel has no switch."""
    backend = make_backend()
    with caplog.at_level(logging.WARNING):
        serves = install(make_runner(backend, LATENT, EXPANDED, LATENT))
    reason = (
        f"on this card ({cards.current()}) our kernel supports head dims up to 512 and KV heads "
        "that divide the query heads, but this model has layers of 16 query heads of dim 576 over "
        "1 KV heads"
    )
    assert serves == f"TritonAttnBackend: {reason}"
    assert [record.message for record in caplog.records] == [
        f"DFLASH: SGLang's prefill kernel runs verify attention: {reason}."
    ]
    assert "forward_extend" not in vars(backend)
    assert "_update_target_verify_buffers" not in vars(backend)


def test_a_card_without_room_for_a_tile_keeps_sglangs_kernel(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel would ask for more shared memory than the card has, at the first step."""
    monkeypatch.setattr(cards, "current", lambda: Card((7, 5)))
    serves = install(make_runner(make_backend(), GROUPED))
    assert serves.startswith("TritonAttnBackend: on this card (compute capability 7.5, 64 KiB per")
    assert "supports head dims up to 64" in serves
    assert install(make_runner(make_backend(), (8, 2, 64, 64))) == verify_backend.OURS


def test_a_mode_of_its_own_keeps_sglangs_kernel(install: Any) -> None:
    backend = make_backend(enable_deterministic=True)
    serves = install(make_runner(backend, GROUPED))
    assert serves == "TritonAttnBackend: deterministic inference needs its own kernel"
    assert "forward_extend" not in vars(backend)


def test_another_backend_is_left_alone(install: Any) -> None:
    assert install(make_runner(SimpleNamespace(), GROUPED)) == "SimpleNamespace"


def test_what_runs_the_ops_of_attention_is_told(install: Any) -> None:
    def told(backend: Any) -> dict[str, str]:
        return verify_backend.describe_verify_attention(
            install(make_runner(backend, GROUPED)), triton_ops()
        )

    assert told(make_backend()) == {}
    kept = "sglang (TritonAttnBackend: deterministic inference needs its own kernel)"
    found = told(make_backend(enable_deterministic=True))
    assert found == {"verify_attention": kept, "index_prefixes": kept}
    assert set(found) <= set(triton_ops().describe())


def test_sliding_layers_with_a_pool_of_their_own_have_slots_of_their_own(install: Any) -> None:
    """Without the mapping our kernel would read other requests' keys."""
    pool = object.__new__(compat.SWAKVPool)
    backend = make_backend(use_sliding_window_kv_pool=True, token_to_kv_pool=pool)
    with pytest.raises(AttributeError, match="full_to_swa_index_mapping"):
        install(make_runner(backend, GROUPED))
    pool.full_to_swa_index_mapping = None
    with pytest.raises(RuntimeError, match="has no full_to_swa_index_mapping"):
        install(make_runner(backend, GROUPED))
    pool.full_to_swa_index_mapping = slots = torch.arange(10)
    install(make_runner(backend, GROUPED))
    assert backend.forward_extend.__self__._window_slots() is slots


def test_sliding_layers_in_a_shared_pool_need_no_slots_of_their_own(install: Any) -> None:
    backend = make_backend(sliding_window_size=64, token_to_kv_pool=SimpleNamespace())
    install(make_runner(backend, GROUPED))
    assert backend.forward_extend.__self__._window_slots() is None


SLOTS = torch.tensor([7, 8, 9])  # of the block


class Twin:
    """The torch twin in place of the kernel, which needs a GPU."""

    fits = VerifyAttention.fits
    max_requests, block_size, dtype = 1, 3, torch.float32
    run = staticmethod(reference.verify_attention)

    def __init__(self) -> None:
        self.wide = {LayerShape(4, 2, 8, 8): None}


@pytest.fixture
def verify() -> Any:
    """Run one layer of a verify block: of one request with five tokens before the block's three.
    Return the output, and that of attention over the whole sequence."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 32), torch.randn(8, 2, 8), torch.randn(8, 2, 8)

    def run(*, save_kv_cache: bool = True, **given: Any) -> tuple[Tensor, Tensor]:
        caches = [torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)]
        slots = torch.cat([torch.tensor([3, 1, 4, 6, 2]), SLOTS])
        # a layer that writes its KV itself has done so before it calls the backend
        written = slots[:5] if save_kv_cache else slots
        for cache, rows in zip(caches, (keys, values), strict=True):
            cache[written] = rows[: len(written)]
        ends = torch.tensor([0, 3])
        metadata = SimpleNamespace(
            swa_out_cache_loc=None,
            qo_indptr=ends,
            kv_indptr=torch.tensor([0, 5]),
            kv_indices=slots[:5],
        )
        pool = SimpleNamespace(
            get_key_buffer=lambda layer: caches[0], get_value_buffer=lambda layer: caches[1]
        )
        backend = make_backend(forward_metadata=metadata, token_to_kv_pool=pool)
        changes.replace(backend, "forward_extend", pytest.fail, why="SGLang's kernel must not run")
        layer = compat.RadixAttention(4, 8, scaling=0.3, num_kv_heads=2, layer_id=0)
        mode = SimpleNamespace(is_target_verify=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, batch_size=1, out_cache_loc=SLOTS)
        out = verify_backend.VerifyBackend(backend, triton_ops(), Twin()).forward_extend(
            query, keys[5:], values[5:], layer, batch, save_kv_cache, **given
        )
        expected = reference.paged_attention(
            query.view(1, 3, 4, 8),
            keys,
            values,
            torch.arange(8)[None],
            torch.tensor([8]),
            torch.tensor([[5, 6, 7]]),
            scale=0.3,
            causal=True,
            **given,
        )
        torch.testing.assert_close(caches[0][slots], keys, atol=0, rtol=0)
        torch.testing.assert_close(caches[1][slots], values, atol=0, rtol=0)
        return out, expected.reshape(3, 32)

    return run


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, 2.0, -1.0])])
def test_a_layers_sinks_reach_our_kernel(verify: Any, sinks: Tensor | None) -> None:
    """As in gpt-oss, whose layers pass them with each call."""
    out, expected = verify(sinks=sinks)
    # fp32, sums of at most 9 terms
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_a_layer_that_has_written_its_kv_is_served_too(verify: Any) -> None:
    """As in SGLang's Qwen3 MoE and gpt-oss in bf16, which write it along with RoPE. SGLang's
    kernel would serve them more slowly, and cannot follow rows that requests share."""
    out, expected = verify(save_kv_cache=False)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
