"""Between two hosts: fewer bytes, exactly as many as the formula says, and the time that a slow link takes for them."""

import pytest

from tests.support.two_hosts import NoNamespaces, measure

LINK, BUCKET = 50e6 / 8, 256 * 1024  # bytes a second; bytes that pass at once after a rest


@pytest.mark.soak  # the bytes alone, without a link: test_hybrid.py
def test_hybrid_sends_less_than_full_sharding_over_a_slow_link():
    try:
        found = measure("50mbit", steps=2)
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")
    full, hybrid = found
    for row in found:
        assert row["counted"] == row["formula"], row
        assert row["counted"] < row["kernel"] < 1.15 * row["counted"], "headers, acknowledgements and agreements"
        assert row["seconds"] >= (row["counted"] - BUCKET) / LINK, row  # a busy machine takes longer, never shorter
    assert full["counted"] == pytest.approx(hybrid["counted"] * 9 / 4)
