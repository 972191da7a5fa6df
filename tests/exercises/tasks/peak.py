"""The peak of a training step, predicted: what the stages of ZeRO hold while backward runs."""


def predict_peak(stage: int, ranks: int, root: int, blocks: list[int], states: int = 2, bytes_each: int = 4) -> int:
    """The most bytes of parameters, gradients and optimizer states that a rank holds in forward and backward.

    root, blocks: how many parameters each unit has, in the order of forward; `ranks`, at least 2, divides each.
    states: how many numbers the optimizer keeps for a parameter, 2 for Adam. They exist before the step begins.
    """
    total = root + sum(blocks)
    parameters = total // ranks if stage == 3 else total
    optimizer = states * (total if stage == 0 else total // ranks)
    replicas = root if stage == 3 else 0
    gradients = root
    peak = 0
    for block in reversed(blocks):
        gradients += block
        shard = block // ranks if stage >= 2 else 0
        replica = block if stage == 3 else 0
        peak = max(peak, parameters + replicas + replica + gradients + shard)
        if stage >= 2:
            gradients += shard - block
    # The root is reduced last. In stage 0 this is when all gradients are copied into a message.
    message = [total, 0, root // ranks, root // ranks][stage]
    peak = max(peak, parameters + replicas + gradients + message)
    return bytes_each * (peak + optimizer)
