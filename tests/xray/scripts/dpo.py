"""DPO: a policy, a frozen reference, and the log-probabilities of chosen and rejected texts."""

import copy

import torch
from gpt import GPT, training
from torch.nn import functional as F

policy = GPT().to("cuda")
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-6)


def logps(model, ids, mask):
    logits, _ = model(ids)
    each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (each * mask[:, 1:]).sum(-1)


def loss():
    batch = {"chosen": torch.randint(512, (4, 64)), "rejected": torch.zeros(4, 64).long(), "mask": torch.ones(4, 64)}
    batch = {name: value.to("cuda", non_blocking=True) for name, value in batch.items()}
    ids, mask = torch.cat([batch["chosen"], batch["rejected"]]), batch["mask"].repeat(2, 1)
    with torch.no_grad():
        ref_chosen, ref_rejected = logps(reference, ids, mask).chunk(2)
    chosen, rejected = logps(policy, ids, mask).chunk(2)
    print((chosen - ref_chosen).detach().cpu().numpy().mean())
    return -F.logsigmoid(0.1 * ((chosen - rejected) - (ref_chosen - ref_rejected))).mean()


def make():
    return training(policy, optimizer, loss)
