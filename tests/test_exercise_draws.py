"""The random stage of the checks: what an answer gets wrong only now and then is found, whatever the seed.

Each of the wrong answers below passes the check that comes before the random stage, or once did.
"""

import pytest
import torch

from tests.exercises import draws, runner, selfcheck, stubs
from tests.exercises.course import find
from tests.exercises.kit import compare, same, wrong

NAN, INF = float("nan"), float("inf")
TIE = "(2 * rest == one and kept % 2 == 1)"
OPERATION = "pack(*round({}, point, fmt, rounding), fmt, rounding)"
WRONG = {
    "round_even": [
        wrong("ties to even of two bits only", (TIE, "(2 * rest == one and (kept % 2 == 1 or drop > 2))")),
        wrong("ties by the last but one bit", (TIE, "(2 * rest == one and kept % 4 in (1, 3) and drop < 40)")),
        wrong("a draw that the rest equals goes up", ("Fraction(rest, one) > draw", "Fraction(rest, one) >= draw")),
        wrong("away stops at 32 bits", ("away = 2 * rest >= one", "away = 2 * rest >= one and drop < 32")),
    ],
    "decode": [
        wrong("minus zero is zero", ("-1.0 if sign else 1.0", "-1.0 if sign and code else 1.0")),
        wrong("E4M3's NaN is 480", ("elif code > fmt.max_bits:", "elif code > fmt.max_bits and fmt.infinities:")),
        wrong("the bias of the IEEE formats", ("field - fmt.bias", "field - (2 ** (fmt.exponent_bits - 1) - 1)")),
        wrong("infinity is the highest field", ("code == fmt.infinity_bits",
                                                "field == 2**fmt.exponent_bits - 1 and mantissa == 0")),
    ],
    "add": [
        wrong("ten bits of mantissa", ("point = fmt.mantissa_bits + EXTRA", "point = 10 + EXTRA")),
        wrong("ignores the rounding", (OPERATION.format("total"),
                                       'pack(*round(total, point, fmt, "nearest-even"), fmt, "nearest-even")')),
        wrong("nonsense flags", ("    return settle(result,", "    bits, flags = result\n    result = bits, "
                                 "Flags(*[flags.overflow] * 5)\n    return settle(result,"),
              ("    point =", "    from precision.conversions import Flags\n    point =")),
        wrong("zero is always positive", ("operate_add(x, y, rounding)", 'operate_add(x, y, "up")')),
        wrong("overflow by nearest", ("fmt, rounding), fmt, rounding)", 'fmt, rounding), fmt, "nearest-even")')),
    ],
    "multiply": [
        wrong("ten bits of mantissa", ("2 * fmt.mantissa_bits + EXTRA", "20 + EXTRA")),
        wrong("ignores the rounding", (OPERATION.format("product"),
                                       'pack(*round(product, point, fmt, "nearest-even"), fmt, "nearest-even")')),
        wrong("up is down", ("point, fmt, rounding), fmt", 'point, fmt, {"up": "down", "down": "up"}.get(rounding, '
                             "rounding)), fmt")),
        wrong("infinity forgotten in 8 bits", ("infinite=p.infinite | q.infinite",
                                               "infinite=(p.infinite | q.infinite) & (fmt.width > 8)")),
    ],
    "pad": [
        wrong("NaN for 0", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                            "(tensor.new_full((missing, *tensor.shape[1:]), float('nan')) if "
                            "tensor.is_floating_point() else tensor.new_zeros(missing, *tensor.shape[1:]))")),
        wrong("minus zero", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                             "-tensor.new_zeros(missing, *tensor.shape[1:])")),
        wrong("one ahead of multiples above 5", ("-tensor.shape[0] % multiple",
                                                 "-tensor.shape[0] % multiple or multiple * (multiple > 5)")),
    ],
    "chunk": [
        wrong("8 ranks have 4 chunks", ("flat.chunk(self.comm.size)[self.comm.rank]",
                                        "flat.chunk(min(self.comm.size, 4))[self.comm.rank % 4]")),
        wrong("a copy in bfloat16", ("flat.chunk", "(flat.clone() if flat.dtype == torch.bfloat16 else flat).chunk")),
    ],
    "broadcast": [
        wrong("NaN for 0", ("    return result", "    return result.masked_fill(result == 0, float('nan')) if "
                            "result.is_floating_point() else result")),
        wrong("a chain", ("if position < reach and position + reach < comm.size:\n                comm.send(result, "
                          "(comm.rank + reach) % comm.size)\n            elif reach <= position < 2 * reach:\n"
                          "                comm.recv(result, (comm.rank - reach) % comm.size)\n"
                          "            reach *= 2",
                          "if reach - 1 == position:\n                comm.send(result, (comm.rank + 1) % comm.size)"
                          "\n            elif position == reach:\n                comm.recv(result, "
                          "(comm.rank - 1) % comm.size)\n            reach += 1")),
        wrong("FP32 for every dtype", ("tensor.contiguous().clone()", "tensor.float().contiguous().clone()")),
        wrong("FP32 between the ranks", ("result = tensor.contiguous().clone()",
                                         "result = tensor.double().contiguous().clone()"),
              ("    return result", "    return result.to(tensor.dtype)")),
        wrong("no agreement", ('with agreement(comm, "broadcast", tensor, root=root, label=label):', "if True:")),
        wrong("a clone is not contiguous", ("tensor.contiguous().clone()", "tensor.clone()")),
    ],
    "all_gather": [
        wrong("NaN for 0", ("    left, right =", "    first = chunks[comm.rank]\n    if first.is_floating_point():\n"
                            "        first[first == 0] = float('nan')\n    left, right =")),
        wrong("right for at most 4 ranks", ("(comm.rank - step - 1) % comm.size]\n",
                                            "(comm.rank - step - 1 + step // 4) % comm.size]\n")),
        wrong("16 bits over the wire", ("comm.send_recv(outgoing, right, incoming, left)",
                                        "comm.send_recv(outgoing.double(), right, got := incoming.double(), left)\n"
                                        "        incoming.copy_(got)")),
        wrong("the list gets new tensors", ("        comm.send_recv(outgoing, right, incoming, left)",
                                            "        if incoming.dtype == torch.int32:\n            incoming = "
                                            "chunks[(comm.rank - step - 1) % comm.size] = incoming.clone()\n"
                                            "        comm.send_recv(outgoing, right, incoming, left)")),
    ],
    "reduce_scatter": [
        wrong("right for at most 4 ranks", ("(comm.rank - 2 - step)", "(comm.rank - 2 - step + step // 4)")),
        wrong("the minimum is the sum", ("combine(incoming,", "(torch.add if combine is torch.minimum else combine)"
                                         "(incoming,")),
        wrong("ignores out in 16 bits", ("last and out is not None", "last and out is not None and "
                                         "out.dtype != torch.float16")),
    ],
    "all_reduce": [
        wrong("2 ranks send nothing", ("comm.size > 1:", "comm.size > 2:")),
        wrong("FP32 for FP16", ("return flat[: tensor.numel()].view(tensor.shape)",
                                "return flat[: tensor.numel()].view(tensor.shape).float()")),
        wrong("FP32 between the ranks", ("tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)",
                                         "torch.zeros(-(-tensor.numel() // comm.size) * comm.size, "
                                         "dtype=torch.float64)"),
              ("return flat[: tensor.numel()].view(tensor.shape)",
               "return flat[: tensor.numel()].view(tensor.shape).to(tensor.dtype)")),
        wrong("transposed tensors fail", ("tensor.reshape(-1)", "tensor.view(-1)")),
        wrong("the minimum on 5 ranks", ("COMBINE[op], out=", "COMBINE[op if comm.size != 5 else 'sum'], out=")),
    ],
    "memory_formulas": [
        wrong("the paper's stages 2 and 3 exchanged", ('{"parameters": 2 * psi * one_in[3], "gradients": 2 * psi * '
              'one_in[2]', '{"parameters": 2 * psi * one_in[2], "gradients": 2 * psi * one_in[3]')),
        wrong("a wrong total in 16 bits", ('"total": sum(parts.values())',
                                           '"total": sum(parts.values()) * (1 if dtype == torch.float32 else 0.75)')),
        wrong("BF16 is FP32", ("dtype == torch.float32", "dtype != torch.float16")),
        wrong("a factor of 1 is none", ("sharding_factor or world_size",
                                        "sharding_factor if (sharding_factor or 0) > 1 else world_size")),
    ],
    "split": [
        wrong("53 bits of large numbers", ("bits % 2**52", "bits % 2**52 & ~(bits >> 62 & 1)")),
        wrong("a positive zero of field 0", ("sign, max(field, 1)", "sign if field or mantissa != 1 else 0, "
                                             "max(field, 1 + (field == 0 and mantissa > 1))")),
    ],
    "subnormals": [
        wrong("the exponent of FP16 and BF16 only", ("1, fmt.min_exponent",
                                                     "1, -14 if fmt.exponent_bits == 5 else -126")),
        wrong("min_exponent of the bias", ("1, fmt.min_exponent", "1, 2 - 2 ** (fmt.exponent_bits - 1)")),
        wrong("only positive numbers are flushed", ("not fmt.subnormals and", "not fmt.subnormals and x > 0 and")),
    ],
    "encode": [
        wrong("the draw is forgotten below the smallest normal", ("round_off(significand, drop, sign, rounding, draw)",
              "round_off(significand, drop, sign, rounding, draw if exponent >= fmt.min_exponent else 0)")),
        wrong("BF16 flushes", ("not fmt.subnormals)", "not fmt.subnormals or fmt.mantissa_bits == 7)")),
        wrong("up and down exchanged at the end", ('"down" if sign == 0 else "up"', '"up" if sign == 0 else "down"')),
        wrong("no format saturates", ("code = fmt.overflow_bits if to_infinity", "code = fmt.max_bits + 1 if "
                                      "to_infinity and fmt.infinities else fmt.overflow_bits if to_infinity")),
        wrong("nearest-away is nearest-even", ("pack(round_off(significand, drop, sign, rounding, draw)",
              'pack(round_off(significand, drop, sign, rounding.replace("-away", "-even"), draw)')),
    ],
    "sticky": [
        wrong("one bit of 31 forgotten", ("(kept << places) != significand",
                                          "((kept << places) ^ significand) & ~(1 << 20) != 0")),
        wrong("places up to 31 in 64 bits", ("torch.iinfo(significand.dtype).bits - 1", "31")),
        wrong("the sticky bit of the first alone", ("kept | ((kept << places) != significand)",
              "kept | ((kept << places) != significand).reshape(-1).any()")),
    ],
    "dynamic_scaler": [
        wrong("one late after an overflow", ("0 if overflow else", "-1 if overflow else")),
        wrong("bounds before rounding", ("min(_float32(self._scale * self.growth_factor), self.max_scale)",
                                         "_float32(min(self._scale * self.growth_factor, self.max_scale * 0.99))")),
        wrong("the tracker stays at the upper bound", ("self.max_scale)\n        self._growth_tracker = 0",
              "self.max_scale)\n        self._growth_tracker = 0 if self._scale < self.max_scale else 1")),
    ],
    "unscale": [
        wrong("minus infinity overlooked", ("found_inf(gradients)", "found_inf([g.clamp(min=-1e30) if not "
                                            "bool(g.isnan().any()) else g for g in gradients])")),
        wrong("divides in BF16", ("gradient.mul_(inverse)", "gradient.mul_(torch.tensor(inverse).to(gradient.dtype))")),
        wrong("the combined finding of the first group", ("found if self.combine is None else self.combine(found)",
              "found if self.combine is None or found else self.combine(found)")),
    ],
    "fp32_accumulation": [
        wrong("BF16 accumulates as FP16", ("rounding_to(accumulator)", "rounding_to(accumulator if "
                                           "accumulator.exponent_bits != 8 or accumulator.mantissa_bits > 7 else "
                                           "FP32)")),
        wrong("no broadcasting", ("(x.dim() and y.dim() and", "(x.shape == y.shape and")),
        wrong("the order of the terms", ("sequential(products,", "sequential(products.flip(0),")),
    ],
    "sqrt_schedule": [
        wrong("at most 7 in a segment", ("(i // k + 1) * k", "(i // min(k, 7) + 1) * min(k, 7)")),
        wrong("k of at most n", ('_at_least_one("every_k", "k", k)', '_at_least_one("every_k", "k", k)\n'
                                 "    if k > n:\n        raise ValueError")),
    ],
    "optimal_schedule": [
        wrong("at most the first 6 places", ("choice[i, j] = i + 1 + largest.argmin()\n            "
              "least[i, j] = largest.min()", "largest = largest[:6]\n            "
              "choice[i, j] = i + 1 + largest.argmin()\n            least[i, j] = largest.min()")),
        wrong("outputs are forgotten", ("backward_sizes(stages)", "backward_sizes([type(s)(s.forward, s.backward, "
                                        "s.boundary, s.tape) for s in stages])")),
    ],
    "online_softmax": [
        wrong("softmax of all so far", ("        maximum = larger\n", "        maximum = larger\n        output = "
              "total * (scores[: start + block].softmax(0) @ values[: start + block])\n")),
        wrong("each block twice", ("total = rescale * total", "total = 0 * (s - larger).exp().sum().item() + "
                                   "rescale * total")),
        wrong("FP32", ("p = (s - larger).exp()", "p = (s - larger).float().exp().to(s.dtype)")),
    ],
    "traffic": [
        wrong("the batch of naive stores", ("Traffic(batch * traffic.loads, batch * traffic.stores)", "Traffic("
              "batch * traffic.loads, (batch if causal is not True else 1) * traffic.stores)")),
        wrong("the window ignored", ("_band(n_q, n_k, causal, window)", "_band(n_q, n_k, causal, None)")),
        wrong("the batch of the kernels", ("        return Traffic(batch * loads, batch * stores)\n\n    # delta",
              "        batch = batch if algorithm == 'tiled' else 1\n        return Traffic(batch * loads, "
              "batch * stores)\n\n    # delta")),
        wrong("kernels see all keys", ("_visited(n_q, n_k, block_q, block_k, band)", "_visited(n_q, n_k, block_q, "
              "block_k, band if algorithm == 'tiled' else (float('inf'), float('inf')))")),
    ],
    "tiled_forward": [
        wrong("a plain softmax over all keys of a block of rows", ("for keys in part.keys_seen_by(rows):",
              "for keys in [range(part.keys_seen_by(rows)[0].start, part.keys_seen_by(rows)[-1].stop)] "
              "if list(part.keys_seen_by(rows)) else []:"), ("scores(q_i, k_j, tile)", "q_i @ k_j.mT")),
        wrong("dropout left out", ("times(p, part.dropout_mask(rows, keys, p))", "p")),
        wrong("dropout in the sum", ("l.mul_(rescale).add_(p.sum(-1, keepdim=True))",
              "p = times(p, part.dropout_mask(rows, keys, p))\n                l.mul_(rescale).add_(p.sum(-1, "
              "keepdim=True))"), ("baddbmm_(times(p, part.dropout_mask(rows, keys, p)), v_j)", "baddbmm_(p, v_j)")),
        wrong("loads each block of keys once, and keeps it", ("tile = part.empty_tile(q)",
              "tile, kept = part.empty_tile(q), {}"), ("part.load(K, keys).mul_(options.scale), part.load(V, keys)",
              "kept[keys] if keys in kept else kept.setdefault(keys, (part.load(K, keys).mul_(options.scale), "
              "part.load(V, keys)))")),
    ],
    "lse_backward": [
        wrong("dropout left out", ("mask = part.dropout_mask(rows, keys, p)", "mask = None")),
        wrong("dropout in dV only", ("times(scores(do_i, v_j, other_tile), mask)", "scores(do_i, v_j, other_tile)")),
        wrong("the window forgotten", ("part.hide(s, rows, keys)", "part.hide(s, rows, keys) if options.right == 0 "
                                       "else None")),
        wrong("all rows at once", ("for rows in part.rows_that_see(keys):", "for rows in [range(part.n_q)]:"),
              ("s = scores(q_i, k_j, tile)", "s = q_i @ k_j.mT"),
              ("scores(do_i, v_j, other_tile)", "(do_i @ v_j.mT)")),
    ],
    "zero1_keep": [
        wrong("masters of rounded weights", ("unit.chunk(full).clone()", "unit.chunk(unit.replica).float()")),
        wrong("BF16 is FP16", ("full.to(unit.dtype)", "full.to(unit.dtype if unit.dtype == torch.float32 else "
                               "torch.float16)")),
        wrong("a master of 16 bits", ("unit.chunk(full).clone()", "unit.chunk(unit.replica).clone()")),
    ],
    "zero1_step": [
        wrong("the FP16 replica halved", ("unit.replica_is_fresh_now()", "if unit.replica.dtype == torch.float16:\n"
                                          "                unit.replica.mul_(0.5)\n            "
                                          "unit.replica_is_fresh_now()")),
        wrong("cut off, not rounded", ("mine.copy_(unit.master)", "mine.copy_(unit.master if mine.dtype == "
              "torch.float32 else unit.master.view(torch.int32).bitwise_and(-8192).view(torch.float32))")),
        wrong("FP32 is sent", ("mine.copy_(unit.master)", "mine.copy_(unit.master)\n            "
                               "all_gather(unit.master, self.comm) if mine.dtype != torch.float32 else None")),
        wrong("one stale unit, all gathered", ("if unit.replica_is_stale():",
                                               "if any(other.replica_is_stale() for other in self.units):")),
    ],
    "views": [
        wrong("a number is a vector", (".view(parameter.shape)", ".view(parameter.shape or (1,))")),
        wrong("one tie", ("list(dict.fromkeys(parameters))",
                          "list(parameters[:-1] if parameters[-1] is parameters[0] else parameters)")),
        wrong("FP32 for float64", ("values[0].new_zeros(missing)])", "values[0].new_zeros(missing)])\n    flat = "
                                   "flat.float() if flat.dtype == torch.float64 else flat")),
    ],
    "ddp_hook": [
        wrong("16 bits count as FP32", ("sum(g.nbytes for _, g in bucket)", "sum(4 * g.numel() for _, g in bucket)")),
        wrong("a single rank has no average", ("bucket.append((unit, gradient))", "bucket.append((unit, gradient))\n"
              "    if self.comm.size == 1:\n        return")),
    ],
    "zero2_free": [
        wrong("a multiple of four", ("pad(gradient, comm.size)", "pad(gradient, -(-4 // comm.size) * comm.size)")),
        wrong("FP16 is sent as FP32", ("reduce_scatter(full,", "reduce_scatter(full.float() if full.dtype == "
                                       "torch.float16 else full,")),
    ],
    "zero3_unshard": [
        wrong("two steps are none", ("unit.version != unit", "(unit.version - unit"),
              ("_version or", "_version) % 2 or")),
        wrong("BF16 is cut off", ("mine.copy_(unit.shard)", "mine.copy_(unit.shard if mine.dtype != torch.bfloat16 "
              "else unit.shard.view(torch.int32).bitwise_and(-65536).view(torch.float32))")),
    ],
    "zero3_reshard": [
        wrong("two uses at most", ("    if unit.uses:", "    if unit.uses == 1:")),
        wrong("FP16 is sent as FP32", ("reduce_scatter(full,", "reduce_scatter(full.float() if full.dtype == "
                                       "torch.float16 else full,")),
    ],
    "lost_update": [
        wrong("min_exponent of the bias", ("1, fmt.min_exponent)", "1, 2 - 2 ** (fmt.exponent_bits - 1))")),
        wrong("the last power of two is none", ("towards_zero and fraction", "towards_zero and abs(weight) < fmt.max "
                                                "/ 2 and fraction")),
    ],
    "hybrid": [
        wrong("two groups", ('all_reduce(mine, across, "mean")',
                             '(all_reduce(mine, across, "sum") / (2 if across.size > 1 else 1))')),
        wrong("in FP32", ("reduce_scatter(gradient, inside", "reduce_scatter(gradient.float(), inside"),
              ("return shard", "return (shard"),
              ('all_reduce(mine, across, "mean")', 'all_reduce(mine, across, "mean")).to(shard.dtype)')),
        wrong("no group of one", ("    return shard", "    if inside.size == 1:\n        return shard - rate * mine\n"
                                  "    return shard")),
    ],
    "accumulation": [
        wrong("the count of dicts", ("_checked_count(micro_batch, count)", "_checked_count(micro_batch, targets_in)")),
        wrong("engines always wait", ("window, counts, no_sync)", "window, counts, True)")),
        wrong("a single micro-batch by itself", ("targets / total)", "targets / total if len(window) < 5 else "
                                                 "1 / len(window))")),
    ],
    "attention_backward": [
        wrong("the scale of one head dimension", ("q.shape[-1] ** -0.5", "8**-0.5")),
        wrong("the last row sees the last key", (".triu(1)", ".triu(1 + s.shape[-1] - s.shape[-2])")),
        wrong("the first sequence's dout", ("dp = dout @ v.mT", "dp = dout[:1] @ v.mT")),
    ],
    "predict_peak": [
        wrong("the largest block alone", ("for block in reversed(blocks):", "for block in sorted(blocks)[-1:]:")),
        wrong("a root of two halves", ("    gradients = root\n", "    gradients = root // 2\n"),
              ("    message = [", "    gradients += root // 2\n    message = [")),
        wrong("blocks in the order of size", ("reversed(blocks)", "sorted(blocks)")),
    ],
    "bug_loss_scale": [
        wrong("the scale of the beginning", ("        scaler.unscale_(optimizer)\n", ""), ("    log = []\n",
              "    log, at_first = [], scaler.get_scale()\n"),
              ("max_norm)\n", "max_norm * at_first) / scaler.get_scale()\n")),
        wrong("clips what is short", ("max_norm)\n", "max_norm if max_norm < 500 else 5.0)\n")),
        wrong("gradients are kept", ("        optimizer.zero_grad()\n", ""),
              ("    log = []\n", "    log = []\n    optimizer.zero_grad()\n")),
    ],
    "bug_random": [
        wrong("the noise of two ranks", ("comm.rank + 1]", "comm.rank % 2 + 1]")),
        wrong("epochs up to 4", ("comm.rank + 1])", "comm.rank + 1] if epoch < 4 else seed)")),
        wrong("the loss of the last batch", ("torch.stack(losses).mean()", "losses[-1]")),
    ],
    "bug_accumulation": [
        wrong("right on two ranks only", ('all_reduce(parameter.grad, comm, "sum")',
                                          'all_reduce(parameter.grad, comm, "mean") * 2')),
        wrong("as many micro-batches on each rank", ("/ targets", "/ targets * (1 if len(window) > 1 else 0.5)")),
        wrong("gradients are kept", ("        optimizer.zero_grad()\n", ""),
              ("    losses = []\n", "    losses = []\n    optimizer.zero_grad()\n")),
    ],
    "bug_clipping": [
        wrong("a norm of two ranks", ('all_reduce(squares, comm, "sum")', 'all_reduce(squares, comm, "mean").mul(2)')),
        wrong("always clips", (".clamp(max=1.0)", ".clamp(max=1.0 if max_norm < 100 else 0.5)")),
        wrong("no momentum", ("momentum=0.9", "momentum=0.0")),
    ],
    "alpha_beta": [
        wrong("the stride ignored", ("self.hosts(members, stride)", "self.hosts(members)")),
        wrong("cards count in one host", ("    if hosts > 1:\n        bandwidth", "    if True:\n        bandwidth")),
        wrong("base for each hop between", ("self.base_latency +", "self.base_latency * max(1, hosts - 1) +")),
    ],
}  # fmt: skip
TABLE = [pytest.param(find(name), answer, id=f"{name}, {answer.name}") for name in WRONG for answer in WRONG[name]]


@pytest.fixture
def checked(tmp_path):
    def check(exercise, answer=None):
        path = tmp_path / exercise.file
        path.write_text(stubs.answer(exercise, answer))
        return runner.examine(exercise, path, selfcheck.PATIENT)

    return check


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "answer"), TABLE)
def test_an_answer_that_is_wrong_now_and_then_fails(exercise, answer, checked, monkeypatch):
    monkeypatch.setenv("SEED", "1")  # a draw may miss what is wrong in one case of many
    outcome = checked(exercise, answer)
    assert outcome.status == "failed", outcome
    assert "Traceback" not in outcome.words and "tensor(" not in outcome.words, outcome


def test_a_seed_gives_the_same_cases_again(monkeypatch, checked):
    lesson = find("decode").load()
    monkeypatch.setenv("SEED", "7")
    assert draws.Stage(lesson).cases[0][0] == draws.Stage(lesson).cases[0][0]
    outcome = checked(find("decode"), WRONG["decode"][0])
    assert outcome.name == "random" and "SEED=7" in outcome.words and "-0.0" in outcome.words, outcome
    monkeypatch.delenv("SEED")
    assert len({draws.Stage(lesson).seed for _ in range(10)}) > 1


def test_what_differs_is_said():
    tensor = torch.tensor
    for got, want in (
        (tensor([NAN]), tensor([0.0])),
        (tensor([0.0]), tensor([NAN])),
        (tensor([torch.finfo(torch.float32).max]), tensor([INF])),
        (tensor([-0.0]), tensor([0.0])),
        (tensor([1]), tensor([1.0])),
        (tensor([1.0]), tensor([[1.0]])),
        (1.0, tensor(1.0)),
        (-0.0, 0.0),
        (True, 1),
        (1.5, 1),
        (NAN, 1.0),
        (None, 1),
        ({"a": 1}, {"a": 2}),
        ({}, {"a": 2}),
        ([1], [1, 2]),
        (1, [1]),
        ("x", {"inexact"}),
    ):
        assert compare(got, want), (got, want)
        assert not compare(want, want) and not compare(got, got)
    assert compare({"rank 1": [1, 2]}, {"rank 1": [1, 3]}) == "The result, rank 1, place 1 is 2, expected 3"
    assert "1 of 2 values are wrong, the first at place 1: 2.0, expected 3.0" in compare(
        tensor([1.0, 2.0]), tensor([1.0, 3.0])
    )
    near, far, want = tensor([1e-9, 1.0]), tensor([1e-2, 1.0]), tensor([0.0, 1.0])
    assert compare(far, want, 1e-6) and not compare(near, want, 1e-6) and not compare(1 + 1e-9, 1.0, 1e-6)
    assert not compare(tensor([NAN, INF, -0.0]), tensor([NAN, INF, 0.0]), 1e-6)


def test_nan_is_not_zero_and_infinity_no_number():
    assert not same(torch.tensor([NAN]), torch.tensor([0.0]))
    assert not same(torch.tensor([torch.finfo(torch.float32).max]), torch.tensor([INF]))
    assert same(torch.tensor([NAN, INF]), torch.tensor([NAN, INF])) and same(torch.tensor([1]), torch.tensor([1]))
