"""The simulator against the steps of this machine: constants from 2 ranks, 4 and 8 predicted."""

import pytest

from minizero.simulate.machine import SIZES, calibrate, compare


@pytest.mark.soak  # it measures for minutes
@pytest.mark.timeout(1800)
def test_steps_at_4_and_8_ranks_are_predicted_within_30_percent():
    rows, machine = compare((4, 8))
    link = machine.cluster.inside
    assert link.latency > 0 and link.bandwidth > 1e8 and machine.rate > 1e9
    predicted = [row for row in rows if row.ranks > 2]
    assert {(row.stage, row.ranks) for row in predicted} == {(s, n) for s in range(4) for n in (4, 8)}
    for row in predicted:
        assert abs(row.error) < 0.3, row


def test_calibration_finds_the_machine_that_made_the_numbers():
    """Rings and steps that a known machine would have."""
    alpha, beta, rate = 1e-4, 2e9, 5e10
    rings = {size: alpha + size / 2 / beta for size in SIZES}
    first = calibrate(rings, {stage: [10.0, 0.02] for stage in range(4)})
    adam = {stage: [0.0, 0.02] for stage in range(4)}
    known = type(first)(first.model, first.cluster, rate)
    steps = {stage: [known.step_seconds(2, stage), adam[stage][1]] for stage in range(4)}
    found = calibrate(rings, steps)
    link = found.cluster.inside
    assert (link.latency, link.bandwidth, found.rate) == pytest.approx((alpha, beta, rate))
