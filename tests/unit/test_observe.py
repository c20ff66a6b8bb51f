"""A value that is added many times to a Prometheus histogram."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from sglang_dflash.metrics import observe


def test_adding_at_once_is_adding_one_by_one() -> None:
    found = []
    for at_once in (False, True):
        registry = CollectorRegistry()
        histogram = Histogram("tokens", "", ["a"], buckets=[1.0, 2.0, 4.0], registry=registry)
        labelled = histogram.labels(a="b")
        for value, times in ((1, 3), (4, 2), (9, 1)):
            if at_once:
                observe(labelled, value, times)
            else:
                for _ in range(times):
                    labelled.observe(value)
        [metric] = registry.collect()
        found.append(
            {
                (sample.name, sample.labels.get("le")): sample.value
                for sample in metric.samples
                if not sample.name.endswith("_created")
            }
        )
    one_by_one, at_once = found
    assert at_once == one_by_one and one_by_one["tokens_sum", None] == 20
