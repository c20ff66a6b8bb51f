"""CUDA graphs of the target, keyed by the number of rows they verify.

SGLang has such graphs for drafters whose verify width differs between requests. Its own layouts
serve other attention backends than ours, so the runner gets a layout of ours: what it needs to
choose a graph, and what our attention needs to split the rows. Any number of requests of any width
runs in the smallest graph with enough rows, so one set of graphs serves every width.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

from torch import Tensor

from sglang_dflash.glue import changes, compat, seams


class VerifyRows(NamedTuple):
    """The rows of a verify pass: `requests` of `width` each, padded to those of a graph; or all
    rows of a graph, shared out among the requests."""

    graph_num_tokens: int  # as SGLang's runner calls the rows of the graph
    requests: int
    width: int
    bounds: Tensor | None = None  # [requests + 1] int64, where each request's rows begin

    @property
    def used(self) -> int:
        return self.requests * self.width if self.bounds is None else self.graph_num_tokens


class VerifyGraphRunner(compat.DecodeCudaGraphRunner):
    """SGLang's decode graph runner in the mode whose graphs are keyed by rows."""

    # SGLang computes these three in its initialiser from switches that do not apply here

    @property
    def ragged_verify_mode(self) -> bool:
        return True

    @ragged_verify_mode.setter
    def ragged_verify_mode(self, _value: bool) -> None:
        pass

    @property
    def max_bs(self) -> int:
        """Requests: more than full blocks in the largest graph, since blocks may be narrow."""
        return self.model_runner.req_to_token_pool.size

    @max_bs.setter
    def max_bs(self, _value: int) -> None:
        pass

    @property
    def max_num_token(self) -> int:
        return max(self.capture_bs) * self.captured_req_width

    @max_num_token.setter
    def max_num_token(self, _value: int) -> None:
        pass

    def _autotune_buffers(self) -> tuple[Any, int]:
        return self.buffers, min(self.max_bs, max(self.capture_bs))

    def _ragged_capture_slots(self, num_tokens: int) -> int:
        """Return the most requests of a graph: those of one row each."""
        return min(num_tokens, self.max_bs)

    def _capture_ragged_verify_layout(self, num_tokens: int) -> VerifyRows:
        width = self.captured_req_width
        return VerifyRows(num_tokens, requests=num_tokens // width, width=width)

    def _stage_ragged_verify_layout(self, ragged_layout: Any, graph_size_key: int) -> None:
        """Do nothing: our attention backend stages the rows with the prefixes."""

    def _can_run_ragged_verify_graph(self, forward_batch: Any, ragged_layout: Any) -> bool:
        return True

    def graph_for(self, rows: int, keys: int) -> int | None:
        """Return the rows of the graph for so many rows of a batch with at most this many keys in
        its prefixes; None if there is none."""
        at = bisect.bisect_left(self.capture_num_tokens, rows)
        if at == len(self.capture_num_tokens) or not self.holds(keys):
            return None
        return self.capture_num_tokens[at]

    def holds(self, keys: int) -> bool:
        """Return whether the graphs hold so many keys: they pad to more requests, each with a key
        or more."""
        return keys + self.max_bs <= self.attn_backend.cuda_graph_kv_indices.shape[0]

    def lay_out(self, rows: int, *, requests: int, width: int) -> None:
        """Put a batch without a context into the inputs of the graph of this many rows."""
        slots = self._ragged_capture_slots(rows)
        spec_input = compat.DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=width,
            ragged_verify_layout=VerifyRows(rows, requests, width),
        )
        inputs = (self.buffers.seq_lens[:slots], self.buffers.req_pool_indices[:slots])
        seams.fill_buffers(self.attn_backend, slots, *inputs, spec_input)


def install_verify_graphs(target_runner: Any) -> None:
    """Key the target's graphs by rows; call before they are captured, and only with our verify
    attention."""
    changes.replace(
        target_runner,
        "_decode_cuda_graph_runner_cls",
        lambda: VerifyGraphRunner,
        why="verify graphs are keyed by rows, and serve any number of drafts per request",
    )
