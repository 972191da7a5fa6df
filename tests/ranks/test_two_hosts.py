"""Between two hosts: fewer bytes, exactly as many as the formula says, and less time where the link is slow."""

import pytest

from tests.support.two_hosts import NoNamespaces, measure


@pytest.mark.slow
def test_hybrid_beats_full_sharding_on_a_slow_link():
    try:
        found = measure(["50mbit"], steps=2)
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")
    full, hybrid = found
    for row in found:
        assert row["counted"] == row["formula"], row
        assert row["counted"] < row["kernel"] < 1.15 * row["counted"], "headers, acknowledgements and agreements"
    assert full["counted"] == pytest.approx(hybrid["counted"] * 9 / 4)
    assert full["seconds"] > 1.5 * hybrid["seconds"], found
