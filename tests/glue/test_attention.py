"""Which attention kernel serves the target's verify blocks, and how the choice is reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.glue import compat
from sglang_dflash.glue.models import verify_backend
from sglang_dflash.kernels import cards, triton_ops
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


def test_mla_keeps_sglangs_kernel_and_the_reason_is_told(
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


def test_attention_sinks_keep_sglangs_kernel(install: Any) -> None:
    """As in gpt-oss: SGLang's layers hand them to the backend with each call, which would be too
    late to give up graphs keyed by rows."""
    runner = make_runner(make_backend(), GROUPED)
    runner.model.sinks = torch.nn.Parameter(torch.zeros(4))
    assert install(runner) == "TritonAttnBackend: its layers have attention sinks"


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
