"""Which targets a drafter can serve: determined through SGLang, from a config alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.models.embedding import input_embedding
from sglang_dflash.glue.startup.feature_capture import (
    configure_capture,
    keep_hooks_out_of_graphs,
)
from sglang_dflash.glue.startup.feature_hooks import FeatureHooks, find_layers
from sglang_dflash.glue.startup.recurrent_targets import recurrent_config
from sglang_dflash.glue.startup.server_args import describe_target
from tests.tiny_configs import HYBRIDS, hf_config
from tests.tiny_models import write_hybrid_config


def test_a_target_with_other_recurrent_layers_is_refused(tmp_path: Path) -> None:
    """Nothing is known to roll its state back to the last accepted token."""
    folder = write_hybrid_config(tmp_path / "lfm2", "lfm2")
    config = compat.get_config(str(folder), trust_remote_code=False)
    with pytest.raises(ValueError, match=r"\(Lfm2ForCausalLM\) has linear-attention or Mamba"):
        describe_target(config, name=str(folder))


@pytest.mark.parametrize("model_type", sorted(HYBRIDS.keys() - {"lfm2"}))
def test_gated_delta_nets_are_served_where_snapshots_are_chosen(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.17 would write states of a step into snapshots of another."""
    folder = write_hybrid_config(tmp_path / model_type, model_type)
    config = compat.get_config(str(folder), trust_remote_code=False)
    assert recurrent_config(config) is not None
    monkeypatch.setattr(seams, "chooses_snapshots", True, raising=False)
    describe_target(config, name=str(folder))
    monkeypatch.setattr(seams, "chooses_snapshots", False)
    with pytest.raises(ValueError, match="does not choose the snapshots.*Install the newest"):
        describe_target(config, name=str(folder))


def test_a_target_without_recurrent_layers_passes(models: Path) -> None:
    config = compat.get_config(str(models / "llama"), trust_remote_code=False)
    assert recurrent_config(config) is None
    assert not describe_target(config, name="llama").delivers_last_layer


def test_a_class_without_a_method_to_capture_features_passes(tmp_path: Path) -> None:
    """Hooks capture them, those of the last layer, too."""
    (tmp_path / "config.json").write_text(hf_config("granite").to_json_string())
    config = compat.get_config(str(tmp_path), trust_remote_code=False)
    config.architectures = ["GraniteForCausalLM"]
    assert describe_target(config, name="granite").delivers_last_layer


def graphs(backend: str, *, asked: bool = False) -> Any:
    """Return server arguments with this kind of prefill graphs, as asked for or by default."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    config = CudaGraphConfig()
    config.prefill.backend = backend
    locked = {("prefill", "backend")} if asked else {("decode", "bs")}
    return SimpleNamespace(cuda_graph_config=config, _cuda_graph_config_locked=locked)


@pytest.mark.parametrize(
    ("architecture", "left"),
    [("GraniteForCausalLM", "disabled"), ("LlamaForCausalLM", "breakable")],
)
def test_hooks_turn_prefill_graphs_off(architecture: str, left: str) -> None:
    """SGLang captures the layers only: hooks would fill up while it captures, and be left out when
    it replays. It is the default on a GPU."""
    args = graphs("breakable")
    decode = args.cuda_graph_config.decode.backend
    keep_hooks_out_of_graphs(args, architecture)
    assert args.cuda_graph_config.prefill.backend == left
    assert args.cuda_graph_config.decode.backend == decode


def test_prefill_graphs_that_hooks_cannot_be_in_are_refused() -> None:
    with pytest.raises(ValueError, match="GraniteForCausalLM.*prefill graph .breakable, as asked"):
        keep_hooks_out_of_graphs(graphs("breakable", asked=True), "GraniteForCausalLM")
    keep_hooks_out_of_graphs(graphs("disabled", asked=True), "GraniteForCausalLM")
    keep_hooks_out_of_graphs(graphs("breakable", asked=True), "LlamaForCausalLM")


class Pair(nn.Module):
    """A layer that leaves the last addition to the next one."""

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        whole = hidden if residual is None else hidden + residual
        return whole * 2, whole


class PairAndMore(Pair):
    """As in DeepSeek: the experts' choice goes to the next layer, too."""

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
        return (*super().forward(hidden, residual), torch.zeros(7))


class Whole(nn.Module):
    """A layer that returns the whole residual stream, in memory that the next one writes to."""

    def forward(self, hidden: Tensor, _residual: Tensor | None) -> Tensor:
        return hidden.mul_(3)


class Toy(nn.Module):
    """A decoder as SGLang's are, with a real logits processor's place for features."""

    def __init__(self, layer: type[nn.Module], count: int = 3) -> None:
        super().__init__()
        text = SimpleNamespace(num_hidden_layers=3)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.visual = nn.ModuleList(nn.Identity() for _ in range(3))
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.logits_processor = compat.LogitsProcessor.__new__(compat.LogitsProcessor)
        nn.Module.__init__(self.logits_processor)
        self.logits_processor.forward = lambda *_args, **features: features

    def forward(self, hidden: Tensor, layers: int = 3) -> Any:
        residual = None
        for layer in self.layers[:layers]:
            output = layer(hidden, residual)
            hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
        return self.logits_processor(None, hidden, None, None)


@pytest.mark.parametrize("layer", [Pair, PairAndMore, Whole])
def test_hooks_capture_the_residual_stream(layer: type[nn.Module]) -> None:
    model = Toy(layer)
    FeatureHooks(model, [0, 2])
    # twice: a pass must not see the features of the one before
    for _ in range(2):
        found = model(torch.ones(2, 4))["aux_hidden_states"]
        assert [float(each[0, 0]) for each in found] == [3.0, 27.0]


def test_layers_that_do_not_run_are_told() -> None:
    model = Toy(Whole)
    FeatureHooks(model, [0, 2])
    with pytest.raises(RuntimeError, match="captured the output of 1 layers of Toy, not of 2"):
        model(torch.ones(2, 4), layers=2)


def test_a_model_whose_layers_cannot_be_found_is_refused() -> None:
    with pytest.raises(ValueError, match="not exactly one list of 3 modules, the number of layers"):
        find_layers(Toy(Whole, count=2))


def test_the_eagle_method_serves_where_it_means_the_same_layers() -> None:
    class Eagle(Toy):
        shift = 1

        def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
            self.layers_to_capture = [i + self.shift for i in layer_ids]

    told: dict[str, Any] = {"dflash_use_aux_hidden_state": True, "dflash_target_layer_ids": [0, 1]}
    passed_on: list[dict[str, Any]] = []
    model = Eagle(Whole)
    configure_capture(lambda **rest: passed_on.append(rest), model=model, **told)
    assert model.layers_to_capture == [1, 2]
    assert not passed_on[0]["dflash_use_aux_hidden_state"]
    model.shift = 0
    with pytest.raises(ValueError, match="Eagle captures the inputs of layers"):
        configure_capture(lambda **rest: None, model=model, **told)


def test_the_embedding_is_found_where_no_method_returns_it() -> None:
    """In MiniMax-M2's class the method of that name embeds tokens."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(4, 2)

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def get_input_embeddings(self, input_ids: Tensor) -> Tensor:
            return self.model.embed_tokens(input_ids)

    target = Target()
    assert input_embedding(target) is target.model.embed_tokens
    with pytest.raises(ValueError, match="Identity has no embedding under a known name"):
        input_embedding(nn.Identity())


def test_a_drafter_shares_the_embedding_without_adapters() -> None:
    """A wrapper for LoRA reads the adapters of the target's last batch, whose rows are others."""

    class Adapted(compat.BaseLayerWithLoRA):
        def forward(self, ids: Tensor) -> Tensor:
            return self.base_layer(ids) + 100

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = Adapted(nn.Embedding(8, 4), lora_backend=None)

    target = Target()
    assert input_embedding(target) is target.embed_tokens.base_layer
    # most classes have a method
    Target.get_input_embeddings = lambda self: self.embed_tokens  # type: ignore[attr-defined]
    assert input_embedding(target) is target.embed_tokens.base_layer


def test_a_sum_that_the_next_layer_completes_is_not_taken_for_a_feature() -> None:
    """In 0.5.17 the output says so; later releases leave it in the batch, which completes it."""
    hidden = torch.ones(1, 2)
    hidden._sglang_needs_allreduce_fusion = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="leave their all-reduce to the next layer"):
        seams.of("0.5.17").residual_stream((hidden, hidden), None)
