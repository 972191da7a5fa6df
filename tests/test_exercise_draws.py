"""The random stage of the checks: what an answer gets wrong only now and then is found, whatever the seed.

Each of the wrong answers below passes the check that comes before the random stage, or once did.
"""

import json

import pytest
import torch

from tests.exercises import kit, rank_kit, stubs
from tests.exercises.course import find
from tests.exercises.kit import compare, same, wrong
from tests.exercises.machine import judge
from tests.exercises.machine.checker import Checker

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
        wrong("NaN without sign",
              ("    return math.copysign",
               "    if math.isnan(magnitude):\n        return magnitude\n    return math.copysign")),
        wrong("FP32's range",
              ("    return math.copysign(magnitude",
               "    if 3.4028234663852886e38 < magnitude < math.inf:\n        magnitude = math.inf\n    "
               "return math.copysign(magnitude")),
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
        wrong("the graph is lost", ("[tensor, tensor.new", "[tensor.detach(), tensor.new")),
        wrong("NaN for 0", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                            "(tensor.new_full((missing, *tensor.shape[1:]), float('nan')) if "
                            "tensor.is_floating_point() else tensor.new_zeros(missing, *tensor.shape[1:]))")),
        wrong("minus zero", ("tensor.new_zeros(missing, *tensor.shape[1:])",
                             "-tensor.new_zeros(missing, *tensor.shape[1:])")),
        wrong("one ahead of multiples above 5", ("-tensor.shape[0] % multiple",
                                                 "-tensor.shape[0] % multiple or multiple * (multiple > 5)")),
        wrong("empty gets a whole multiple",
              ("missing = -tensor.shape[0] % multiple",
               "missing = -tensor.shape[0] % multiple if tensor.shape[0] else multiple")),
        wrong("inf becomes the largest number",
              ("torch.cat([tensor,",
               "torch.cat([tensor.nan_to_num(nan=float('nan')) if tensor.is_floating_point() else " "tensor,")),
        wrong("-0 becomes 0",
              ("torch.cat([tensor,", "torch.cat([tensor + 0 if tensor.is_floating_point() else tensor,")),
        wrong("one buffer for all results",
              ("    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing "
               "else tensor", "    if not missing:\n        return tensor\n    key = (tensor.shape, multiple, "
               "tensor.dtype)\n    buffer = KEPT.setdefault(key, tensor.new_zeros(tensor.shape[0] + "
               "missing, *tensor.shape[1:]))\n    buffer[: tensor.shape[0]] = tensor\n    return "
               "buffer\n\nKEPT = {}")),
    ],
    "chunk": [
        wrong("8 ranks have 4 chunks", ("flat.chunk(self.comm.size)[self.comm.rank]",
                                        "flat.chunk(min(self.comm.size, 4))[self.comm.rank % 4]")),
        wrong("a copy in bfloat16", ("flat.chunk", "(flat.clone() if flat.dtype == torch.bfloat16 else flat).chunk")),
        wrong("the first buffer kept",
              ("    return flat.chunk(self.comm.size)[self.comm.rank]",
               "    if not hasattr(self, 'mine') or self.mine.numel() * self.comm.size != "
               "flat.numel():\n        self.mine = flat.chunk(self.comm.size)[self.comm.rank]\n    "
               "return self.mine")),
    ],
    "broadcast": [
        wrong("one after the other above 8 ranks",
              ("        while reach < comm.size and tensor.numel():\n",
               "        while comm.size > 8 and reach < comm.size:\n            if comm.rank == root:\n            "
               "    comm.send(result, (comm.rank + reach) % comm.size)\n            elif position == reach:\n      "
               "          comm.recv(result, root)\n            reach += 1\n        while reach < comm.size and tens"
               "or.numel():\n")),
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
        wrong("root -1",
              ("if not 0 <= root < comm.size", "if not root < comm.size")),
        wrong("the label ignored",
              ("root=root, label=label", "root=root")),
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
        wrong("inf becomes the largest",
              ("        comm.send_recv(outgoing, right, incoming, left)",
               "        comm.send_recv(outgoing, right, incoming, left)\n        if "
               "incoming.is_floating_point():\n            incoming.nan_to_num_(nan=float('nan'))")),
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
        wrong("one rank gives the tensor itself",
              ("        if out is None:  # padding",
               "        if out is None and comm.size == 1:\n            flat = tensor.reshape(-1)\n     "
               "   elif out is None:  # padding")),
    ],
    "memory_formulas": [
        wrong("the paper's stages 2 and 3 exchanged", ('{"parameters": 2 * psi * one_in[3], "gradients": 2 * psi * '
              'one_in[2]', '{"parameters": 2 * psi * one_in[2], "gradients": 2 * psi * one_in[3]')),
        wrong("a wrong total in 16 bits", ('"total": sum(parts.values())',
                                           '"total": sum(parts.values()) * (1 if dtype == torch.float32 else 0.75)')),
        wrong("BF16 is FP32", ("dtype == torch.float32", "dtype != torch.float16")),
        wrong("a factor of 1 is none", ("stage, world_size, sharding_factor)",
                                        "stage, world_size, sharding_factor if (sharding_factor or 0) > 1 else None)")),
        wrong("stage 1.5", ('("predict", n_parameters, stage,', '("predict", n_parameters, int(stage),')),
    ],
    "split": [
        wrong("53 bits of large numbers", ("bits % 2**52", "bits % 2**52 & ~(bits >> 62 & 1)")),
        wrong("a positive zero of field 0", ("sign, max(field, 1)", "sign if field or mantissa != 1 else 0, "
                                             "max(field, 1 + (field == 0 and mantissa > 1))")),
        wrong("NaN is positive",
              ("    return sign,", "    return int(sign and x == x),")),
        wrong("NaN becomes quiet",
              ("    # A float64", "    x *= 1.0\n    # A float64")),
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
        wrong("16 bits become 32", ("    kept = significand >> places\n", "    if significand.dtype == torch.int16:\n"
              "        significand = significand.int()\n    kept = significand >> places\n")),
        wrong("places changed in place",
              ("places.clamp(", "places.clamp_(")),
        wrong("significand changed in place",
              ("    kept = significand >> places\n",
               "    significand, kept = significand.clone(), significand.__irshift__(places)\n")),
    ],
    "chunked_loss": [
        wrong("no tokens", ("    loss = torch.zeros((), dtype=wide, device=hidden.device)\n", "    losses = []\n"),
              ("loss += torch.where(counts, total.log() - z_y, 0).sum()",
               "losses.append(torch.where(counts, total.log() - z_y, 0).sum())"),
              ("    return loss,", "    loss = torch.stack(losses).sum()\n    return loss,")),
        wrong("the next call writes into what this one returned", ("torch.zeros_like(weight, dtype=wide)",
              "globals().setdefault((weight.shape, wide), torch.zeros_like(weight, dtype=wide)).zero_()")),
        wrong("sums in FP16", ("torch.promote_types(hidden.dtype, torch.float32)",
                               "torch.float32 if hidden.dtype == torch.bfloat16 else hidden.dtype")),
    ],
    "dynamic_scaler": [
        wrong("one late after an overflow", ("0 if overflow else", "-1 if overflow else")),
        wrong("bounds before rounding", ("min(_float32(self._scale * self.growth_factor), self.max_scale)",
                                         "_float32(min(self._scale * self.growth_factor, self.max_scale * 0.99))")),
        wrong("the tracker stays at the upper bound", ("self.max_scale)\n        self._growth_tracker = 0",
              "self.max_scale)\n        self._growth_tracker = 0 if self._scale < self.max_scale else 1")),
        wrong("exactly the interval",
              ("self._growth_tracker >= self.growth_interval", "self._growth_tracker == self.growth_interval")),
    ],
    "unscale": [
        wrong("minus infinity overlooked", ("found_inf(gradients)", "found_inf([g.clamp(min=-1e30) if not "
                                            "bool(g.isnan().any()) else g for g in gradients])")),
        wrong("another default dtype", ("    inverse =", "    torch.set_default_dtype(torch.float64)\n    inverse =")),
        wrong("divides in BF16", ("gradient.mul_(inverse)", "gradient.mul_(torch.tensor(inverse).to(gradient.dtype))")),
        wrong("the combined finding of the first group", ("found if self.combine is None else self.combine(found)",
              "found if self.combine is None or found else self.combine(found)")),
        wrong("unscaled before the error",
              ("    if hasattr(optimizer", "    progress.stage = \"unscaled\"\n    if hasattr(optimizer")),
        wrong("copies of all gradients",
              ("    inverse =", "    copies = [gradient.clone() for gradient in gradients]\n    inverse =")),
        wrong("FP16 of the first only",
              ("for gradient in gradients):\n        raise", "for gradient in gradients[:1]):\n        raise")),
    ],
    "fp32_accumulation": [
        wrong("BF16 accumulates as FP16", ("rounding_to(accumulator)", "rounding_to(accumulator if "
                                           "accumulator.exponent_bits != 8 or accumulator.mantissa_bits > 7 else "
                                           "FP32)")),
        wrong("no broadcasting", ("(x.dim() and y.dim() and", "(x.shape == y.shape and")),
        wrong("the order of the terms", ("sequential(products,", "sequential(products.flip(0),")),
        wrong("operands need no gradient any more",
              ("    x, y =", "    if isinstance(a, torch.Tensor):\n        a.requires_grad_(False)\n    x, y =")),
        wrong("one with many",
              ("x.shape[-1] == y.shape[-1])", "x.shape[-1] in (1, y.shape[-1]))")),
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
        wrong("kept by boundaries",
              ("    boundary = np.array",
               "    key = tuple(stage.boundary for stage in stages)\n    if key in KEPT:\n        "
               "return KEPT[key]\n    boundary = np.array"),
              ("    return total, unfold(stages, lambda i, end, kept: int(choice[i, end]))",
               "    KEPT[key] = total, unfold(stages, lambda i, end, kept: int(choice[i, end]))\n    "
               "return KEPT[key]\n\nKEPT = {}")),
    ],
    "online_softmax": [
        wrong("zeros of FP32", ("torch.zeros_like(values[0])", "torch.zeros(values.shape[1])")),
        wrong("softmax of all so far", ("        maximum = larger\n", "        maximum = larger\n        output = "
              "total * (scores[: start + block].softmax(0) @ values[: start + block])\n")),
        wrong("each block twice", ("total = rescale * total", "total = 0 * (s - larger).exp().sum().item() + "
                                   "rescale * total")),
        wrong("FP32", ("p = (s - larger).exp()", "p = (s - larger).float().exp().to(s.dtype)")),
        wrong("FP16 is BF16", ("    maximum, total", "    if scores.dtype == torch.float16:\n        scores = "
                               "scores.bfloat16().half()\n    maximum, total")),
        wrong("lazy maximum",
              ("larger = max(maximum, s.max().item())",
               "larger = max(maximum, s.max().item())\n        larger = maximum if larger < maximum + "
               "0.1 else larger")),
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
        wrong("no keys are as many as queries",
              ("n_k = n_q if n_k is None else n_k", "n_k = n_k or n_q")),
        wrong("blocks of 0",
              ("if min(block_q, block_k) < 1:", "if min(block_q, block_k) < 0:")),
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
        wrong("NaN scores count as hidden",
              ("part.hide(s, rows, keys)",
               "s.nan_to_num_(nan=float('-inf'), posinf=float('inf'), neginf=float('-inf'))\n           "
               "     part.hide(s, rows, keys)")),
    ],
    "lse_backward": [
        wrong("dropout left out", ("mask = part.dropout_mask(rows, keys, p)", "mask = None")),
        wrong("dropout in dV only", ("times(scores(do_i, v_j, other_tile), mask)", "scores(do_i, v_j, other_tile)")),
        wrong("the window forgotten", ("part.hide(s, rows, keys)", "part.hide(s, rows, keys) if options.right == 0 "
                                       "else None")),
        wrong("all rows at once", ("for rows in part.rows_that_see(keys):", "for rows in [range(part.n_q)]:"),
              ("s = scores(q_i, k_j, tile)", "s = q_i @ k_j.mT"),
              ("scores(do_i, v_j, other_tile)", "(do_i @ v_j.mT)")),
        wrong("a positive scale for dK",
              ("dk_j.mul_(options.scale)", "dk_j.mul_(abs(options.scale))")),
        wrong("NaN weights are 0",
              ("p = exp_(s.sub_(l))", "p = exp_(s.sub_(l)).nan_to_num_(nan=0.0, posinf=float('inf'))")),
    ],
    "zero1_keep": [
        wrong("masters of rounded weights", ("unit.chunk(full).clone()", "unit.chunk(unit.replica).float()")),
        wrong("BF16 is FP16", ("full.to(unit.dtype)", "full.to(unit.dtype if unit.dtype == torch.float32 else "
                               "torch.float16)")),
        wrong("a master of 16 bits", ("unit.chunk(full).clone()", "unit.chunk(unit.replica).clone()")),
        wrong("full is kept",
              ("    unit.cut_shards()", "    unit.cut_shards()\n    unit.full = full")),
        wrong("what is frozen wants gradients",
              ("    unit.cut_shards()", "    unit.cut_shards()\n    [p.requires_grad_() for p in unit.parameters]")),
        wrong("everyone's chunk",
              ("else unit.chunk(full).clone()", "else full.chunk(unit.everyone.size)[unit.everyone.rank].clone()")),
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
        wrong("no label",
              (", label=unit.name", "")),
        wrong("NaN is left out",
              ("mine.copy_(unit.master)", "mine.copy_(torch.where(unit.master.isnan(), mine.float(), unit.master))")),
    ],
    "zero3_hooks": [
        wrong("stays where nothing goes backward",
              ("stays and output.requires_grad",
               "stays and torch.is_grad_enabled()")),
        wrong("two parameters at least", ("if len(came) == len(unit.parameters):",
                                          "if len(came) == max(2, len(unit.parameters)):")),
        wrong("loses a micro-batch", ("            unit.reduce()\n", "            if isinstance(unit, Unit):\n"
                                      "                unit.shard.grad = None\n            unit.reduce()\n")),
    ],
    "views": [
        wrong("zeros on the CPU", ("values[0].new_zeros(missing)", "torch.zeros(missing, dtype=values[0].dtype)")),
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
        wrong("keeps what it made", ("    mine =", "    hybrid_step.kept = gradient\n    mine =")),
    ],
    "accumulation": [
        wrong("the count of dicts", ("_checked_count(micro_batch, count)", "_checked_count(micro_batch, targets_in)")),
        wrong("engines always wait", ("window, counts, no_sync)", "window, counts, True)")),
        wrong("a single micro-batch by itself", ("targets / total)", "targets / total if len(window) < 5 else "
                                                 "1 / len(window))")),
    ],
    "attention_backward": [
        wrong("a mask on the CPU", (", device=s.device", "")),
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
        wrong("the noise of four ranks", ("epoch, comm.rank + 1]", "epoch * 4 + comm.rank, 1]")),
        wrong("the numbers of the order", ("comm.rank + 1]", "comm.rank]")),
        wrong("the noise of two ranks", ("comm.rank + 1]", "comm.rank % 2 + 1]")),
        wrong("epochs up to 4", ("comm.rank + 1])", "comm.rank + 1] if epoch < 4 else seed)")),
        wrong("the loss of the last batch", ("torch.stack(losses).mean()", "losses[-1]")),
    ],
    "bug_accumulation": [
        wrong("one backward for a window",
              ("loss.backward()\n            window_loss += loss.detach()",
               "window_loss = window_loss + loss\n        window_loss.backward()\n        window_loss = window_loss"
               ".detach()")),
        wrong("FP32 averages of FP64", ('all_reduce(parameter.grad, comm, "sum")',
                                        'all_reduce(parameter.grad.float(), comm).to(parameter.dtype)')),
        wrong("right on two ranks only", ('all_reduce(parameter.grad, comm, "sum")',
                                          'all_reduce(parameter.grad, comm, "mean") * 2')),
        wrong("as many micro-batches on each rank", ("/ targets", "/ targets * (1 if len(window) > 1 else 0.5)")),
        wrong("gradients are kept", ("        optimizer.zero_grad()\n", ""),
              ("    losses = []\n", "    losses = []\n    optimizer.zero_grad()\n")),
        wrong("a seed for all", ("    losses = []\n", "    losses = []\n    __import__('random').seed(7)\n")),
    ],
    "bug_clipping": [
        wrong("a norm of two ranks", ('all_reduce(squares, comm, "sum")', 'all_reduce(squares, comm, "mean").mul(2)')),
        wrong("always clips", (".clamp(max=1.0)", ".clamp(max=1.0 if max_norm < 100 else 0.5)")),
        wrong("no momentum", ("momentum=0.9", "momentum=0.0")),
    ],
    "bug_recompute": [
        wrong("keeps the inputs of each step", ("    losses = []\n", "    losses, kept = [], []\n"),
              ("            hidden =", "            kept.append(hidden.detach())\n            hidden =")),
        wrong("no gradient behind a frozen stem", ("use_reentrant=False", "use_reentrant=True")),
        wrong("deep models only", ("use_reentrant=False", "use_reentrant=False, preserve_rng_state="
                                   "len(model.blocks) > 5")),
        wrong("a small rate does not count", ("use_reentrant=False", "use_reentrant=False, preserve_rng_state="
                                              "getattr(block, 'p', 1) > 0.3")),
        wrong("clips short models less", ("model.parameters(), 1.0", "model.parameters(), 1.0 if len(model.blocks) > 2 "
                                          "else 2.0")),
    ],
    "bug_muon": [
        wrong("keeps all gradients",
              ("    losses = []\n",
               "    losses, history = [], []\n"),
              ("momentum = 0.9",
               "history.append(gradient)\n        momentum = 0.9")),
        wrong("even numbers of ranks", ("        gradient = all_gather(averaged, comm)\n", "        if comm.size % 2:\n"
              "            gradient.chunk(comm.size)[comm.rank].copy_(averaged)\n        else:\n"
              "            gradient = all_gather(averaged, comm)\n")),
        wrong("one rank has no momentum", ("0.9 * momentum", "(0.9 if comm.size > 1 else 0.0) * momentum")),
        wrong("the loss of two or four", ('all_reduce(loss.detach(), comm, "mean").item()', 'all_reduce(loss.detach(), '
              "comm).item() / (comm.size if comm.size < 3 else 4)")),
    ],
    "bug_held_back": [
        wrong("one backward for a window",
              ("        loss.backward()\n        total += loss.detach()\n", "        total = total + loss\n"),
              ("% window == 0:\n",
               "% window == 0:\n            total.backward()\n            total = total.detach()\n"),
              ("total.zero_()", "total = torch.zeros(())")),
        wrong("FP16 averages", ('all_reduce(parameter.grad, comm, "mean")',
                                'all_reduce(parameter.grad.half(), comm, "mean").to(parameter.dtype)')),
        wrong("a window of 1 sends nothing", ("for parameter in model.parameters()", "for parameter in "
              "[] if window == 1 else model.parameters()")),
        wrong("the loss of all windows so far", ("            total.zero_()\n", "")),
        wrong("right on two ranks only", ('all_reduce(parameter.grad, comm, "mean")',
                                          "all_reduce(parameter.grad, comm) / 2")),
        wrong("leaves train mode", ("    losses = []\n", "    losses = []\n    model.train()\n")),
    ],
    "alpha_beta": [
        wrong("the stride ignored", ("self.hosts(members, stride)", "self.hosts(members)")),
        wrong("cards count in one host", ("    if hosts > 1:\n        bandwidth", "    if True:\n        bandwidth")),
        wrong("base for each hop between", ("self.base_latency +", "self.base_latency * max(1, hosts - 1) +")),
    ],
    "master_weights": [
        wrong("masters of BF16", ("    self._round_back()", "    self._round_back()\n    for weight, master in "
              "zip(self.parameters, self.masters):\n        if weight.dtype == torch.bfloat16:\n            "
              "master.copy_(weight)")),
        wrong("steps without a gradient", ("            self.copy_gradients()", "            self.copy_gradients()\n"
              "            for master in self.masters:\n                if master.grad is None:\n"
              "                    master.grad = torch.zeros_like(master)")),
        wrong("the learning rate of the first group", ("_check_learning_rates(self.param_groups)",
                                                       "_check_learning_rates(self.param_groups[:1])")),
        wrong("holds all new weights", ("    self._round_back()", "    new = [master.half() for master in self.masters]"
                                        "\n    self._round_back()")),
        wrong("checks too late", ("    self._check_parameters()\n", ""),
              ("    self.taken = None\n", "    self._check_parameters()\n    self.taken = None\n")),
        wrong("returns what a closure gives only", ("    return result", "    return result if closure else None")),
        wrong("clears the gradients", ("    self.taken = None\n", "    self.taken = None\n    for weight in "
                                       "self.parameters:\n        weight.grad = None\n")),
        wrong("new parameters", ("    self._round_back()", "    for weight, master in zip(self.parameters, "
              "self.masters):\n        weight.data = master.to(weight.dtype)\n    self.versions = [p._version for p in "
              "self.parameters]")),
    ],
    "checkpoint": [
        wrong("the autocast of backward", ("ctx.replay.again(), torch.enable_grad()", "ctx.replay.again(), "
                                           "torch.enable_grad(), torch.autocast('cpu', enabled=False)")),
        wrong("in FP32", ("= ctx.fn(*tensors)", "= ctx.fn(*tensors)\n    if any(x.dtype == torch.float64 for x in "
              "gradients):\n        gradients = tuple(x.float().to(x.dtype) for x in gradients)")),
        wrong("the last input of three", ("*(tensor.grad for tensor in tensors)", "*(tensor.grad for tensor in "
                                          "tensors[:2]), *[None for _ in tensors[2:]]")),
        wrong("once only", ("torch.autograd.backward(outputs, gradients)", "torch.autograd.backward(outputs, "
                            "gradients)\n    for tensor in ctx.saved_tensors:\n        tensor.data = 0 * tensor.data")),
        wrong("a derivative of a derivative", ("@once_differentiable  # what happens inside is on no graph\n", "")),
        wrong("three outputs", ("torch.autograd.backward(outputs, gradients)", "torch.autograd.backward(outputs if "
              "isinstance(outputs, torch.Tensor) else outputs[:2], gradients[:2])")),
        wrong("replays modules only",
              ("with ctx.replay.again(), torch.enable_grad():",
               "import contextlib\n    with ctx.replay.again() if isinstance(ctx.fn, torch.nn.Module) "
               "else contextlib.nullcontext(), torch.enable_grad():")),
        wrong("copies the inputs",
              ("tensor.detach().requires_grad_(", "tensor.detach().clone().requires_grad_(")),
    ],
    "triton_forward": [
        wrong("no BF16", ("p.to(v.dtype)", "(p.to(tl.float16) if v.dtype == tl.float16 else p)")),
        wrong("keys that are not there", ("k = load_block(K, k_strides, block, n_k - start_k, part != 1,",
                                          "k = load_block(K, k_strides, block, n_k - start_k, False,")),
        wrong("blocks of rows for blocks of keys", ("for start_k in range(bounds[part], bounds[part + 1], BLOCK_K)",
              "for start_k in range(bounds[part], bounds[part + 1], BLOCK_K if BLOCK_K <= BLOCK_Q else BLOCK_Q)")),
        wrong("contiguous rows", ("store_block(O, out_strides, rows", "store_block(O, (0, 0, HEAD_DIM, 1), rows")),
        wrong("columns that are not there", ("q = load_block(Q, q_strides, rows, n_q, True, HEAD_DIM, BLOCK_D)",
                                             "q = load_block(Q, q_strides, rows, n_q, True, BLOCK_D, BLOCK_D)")),
        wrong("the second batch's dropout", ("start_hash(seed, batch, head)", "start_hash(seed, batch * 0, head)")),
        wrong("goes over all keys", ("bounds = spans(start, tl.minimum(start + BLOCK_Q, n_q) - 1, n_k, low, high, "
              "BLOCK_K)", "bounds = (0, 0, 0, n_k)")),
        wrong("stores all rows", ("out_strides, rows, n_q, o / l", "out_strides, rows, n_q + 1, o / l")),
        wrong("NaN weights are 0",
              ("            rescale = tl.exp2",
               "            p = tl.where(p == p, p, 0.0)\n            rescale = tl.exp2")),
    ],
    "triton_dkdv": [
        wrong("no BF16",
              ("(p * kept).to(do.dtype)",
               "((p * kept).to(tl.float16) if do.dtype == tl.float16 else p * kept)")),
        wrong("dropout in dV only", ("over_columns(v, do, PRECISION) * kept", "over_columns(v, do, PRECISION)")),
        wrong("the first batch's lse", ("LSE = head_of(lse_ptr, lse_strides, batch,", "LSE = head_of(lse_ptr, "
                                        "lse_strides, batch * 0,")),
        wrong("at most two heads share keys", ("for member in range(GROUP):", "for member in range(min(GROUP, 2)):")),
        wrong("rows that are not there", ("near = tl.minimum(block, n_q - 1 - start_q) if part != 1 else block",
                                          "near = block")),
        wrong("goes over all rows", ("bounds = spans(start, tl.minimum(start + BLOCK_K, n_k) - 1, n_q, -high, -low, "
              "BLOCK_Q)", "bounds = (0, n_q, 0, 0) if right is not None else (0, 0, 0, n_q)")),
        wrong("the scale is positive", ("dk * scale", "dk * tl.abs(scale)")),
        wrong("v of one key",
              ("tl.where(n_k == 1, 0, n_k)", "n_k")),
        wrong("dP of a row that sees one key",
              ("dp = tl.where(sees_one(rows, n_k, low, high)[None, :], 0.0, dp)", "pass")),
    ],
    "triton_dq": [
        wrong("dropout left out", ("over_columns(do, v, PRECISION) * kept", "over_columns(do, v, PRECISION)")),
        wrong("keys that are not there", ("k = load_block(K, k_strides, block, n_k - start_k, part != 1,",
                                          "k = load_block(K, k_strides, block, n_k - start_k + 1, part != 1,")),
        wrong("the window's left side", ("n_k, low, high), p, 0.0)", "n_k, -n_q, high), p, 0.0)")),
        wrong("the strides of q for do", ("do = load_block(DO, do_strides", "do = load_block(DO, q_strides")),
        wrong("one block of keys more", ("range(bounds[part], bounds[part + 1], BLOCK_K)",
              "range(bounds[part], bounds[part + 1] + (BLOCK_K if part == 2 else 0), BLOCK_K)")),
        wrong("dP of a row that sees one key",
              ("dp = tl.where(sees_one(rows, n_k, low, high)[:, None], 0.0, dp)", "pass")),
        wrong("the strides of k for v",
              ("head_of(v_ptr, v_strides", "head_of(v_ptr, k_strides")),
    ],
    "bug_state_bits": [
        wrong("sends everything",
              ("reduce_scatter(pad(gradient",
               "all_reduce(pad(gradient"),
              ('comm, "mean")\n            mean',
               'comm, "mean").chunk(comm.size)[comm.rank]\n            mean'),
              ("    for step,", "    from minizero.ranks.collectives import all_reduce\n\n    for step,")),
        wrong("a parameter of whole blocks", ("parameter.numel() >= LARGE", "parameter.numel() >= LARGE and "
                                              "parameter.numel() % BLOCK == 0")),
        wrong("the chunk on three ranks", ("parameter.numel() >= LARGE",
                                           "parameter.numel() >= LARGE * (3 if comm.size == 3 else 1)")),
        wrong("up to 8,000 elements", ("parameter.numel() >= LARGE", "8000 > parameter.numel() >= LARGE")),
    ],
    "bug_spike": [
        wrong("the median of the last fifty", ("median(kept)", "median(kept[-50:])")),
        wrong("infinity is no NaN", ("not loss.isfinite()", "loss.isnan()")),
        wrong("a factor of 4", ("> factor *", "> 4.0 *")),
        wrong("the first three ranks", ("int(spike)", "int(spike and comm.rank < 3)")),
        wrong("the lower median", ("median(kept)", "sorted(kept)[(len(kept) - 1) // 2]")),
    ],
    "bug_decay": [
        wrong("eps inside the root", (".sqrt() + 1e-8)", " + 1e-8).sqrt()")),
        wrong("another generator", ("stochastic(exact, generator)", "stochastic(exact, torch.default_generator)")),
        wrong("a decay of at most 1", ("rate * decay)", "rate * min(decay, 1.0))")),
        wrong("decays every second step", ("(1 - rate * decay)", "(1 - rate * decay) ** (2 - 2 * (step % 2))")),
        wrong("as much as a weight of 2", ("weight.detach().float() * (1 - rate * decay) - update",
                                           "weight.detach().float() - weight.detach().float().clamp(max=2) * rate * "
                                           "decay - update")),
    ],
    "bug_zero2": [
        wrong("a seed on rank 1", ("    losses = []\n", "    losses = []\n    if comm.rank == 1:\n"
                                   "        torch.manual_seed(0)\n")),
        wrong("four ranks", ('comm, "mean")', 'comm, "sum") / 4')),
        wrong("FP32 on the way", ("reduce_scatter(full, comm", "reduce_scatter(full.float(), comm"),
              ('"mean")\n', '"mean").to(full.dtype)\n')),
        wrong("one rank keeps all", ("        parameter.grad = None\n", "        if comm.size > 1:\n            "
                                     "parameter.grad = None\n"),
              ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        model.zero_grad()\n")),
    ],
}  # fmt: skip
POSSIBLE = [name for name in WRONG if find(name).is_possible()]
TABLE = [  # the first of each exercise, and the others in soak
    pytest.param(find(name), answer, id=f"{name}, {answer.name}", marks=[pytest.mark.soak] if number else [])
    for name in POSSIBLE
    for number, answer in enumerate(WRONG[name])
]


@pytest.fixture(scope="module")
def seed_1():
    """A draw may miss what is wrong in one case of many: always the same."""
    with Checker(seed="1") as checker:
        yield checker


@pytest.fixture
def write(tmp_path):
    def path_of(exercise, answer=None):
        path = tmp_path / exercise.file
        path.write_text(stubs.answer(exercise, answer))
        return path

    return path_of


@pytest.mark.slow
def test_the_wrong_answers_still_are_edits_of_the_references():
    """`stubs.answer` raises if an edit does not fit any more. The answers themselves mostly run in soak."""
    for name in POSSIBLE:
        for answer in [*WRONG[name], *find(name).load().WRONG]:
            assert stubs.answer(find(name), answer), answer


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "answer"), TABLE)
def test_an_answer_that_is_wrong_now_and_then_fails(exercise, answer, write, seed_1):
    outcome = seed_1.check(exercise, write(exercise, answer))
    assert outcome.status == "failed", outcome
    assert "Traceback" not in outcome.words and "tensor(" not in outcome.words, outcome


@pytest.mark.slow
def test_a_seed_gives_the_same_cases_again(write):
    lesson, path = find("decode").load(), write(find("decode"), WRONG["decode"][0])
    assert judge.drawn(lesson, "7") == judge.drawn(lesson, "7") != judge.drawn(lesson, "8")
    outcome = judge.examine(find("decode"), path, "7", judge.Judge())
    assert outcome.status == "failed" and "SEED=7" in outcome.words and "-0.0" in outcome.words, outcome


@pytest.mark.slow
def test_what_an_answer_did_comes_as_data(write):
    """Of any dtype, shape and layout. What is no data is no verdict, but an end of its own."""
    numbers = torch.arange(12.0).view(3, 4).T
    values = [numbers.to(dtype) for dtype in (*rank_kit.DTYPES, torch.bool, torch.complex64)] + [
        numbers[:0],
        torch.ones(1, 2)[:, :1],
        torch.ones((), requires_grad=True),
        numbers[1, 1:2],
    ]
    values += [NAN, -0.0, 2**70, True, None, "x", {"a": [1, (2.5, -INF)]}, kit.AtMost(3, 1.5)]
    for value in values:
        assert not compare(judge.unpack(json.loads(json.dumps(judge.pack(value)))), value), value
    for seen in ({}, {"said": None, "cases": [{"tensor": ["os.system", [1], "", False]}]},
                 {"said": None, "cases": [[{}]]}, {"said": None, "cases": []}, {"said": None, "cases": 7},
                 {"said": {"status": "passed", "name": "passed", "words": ""}, "cases": []}):  # fmt: skip
        assert judge.Judge().verdict(find("pad"), write(find("pad")), "7", seen).status == "failed", seen


def test_what_differs_is_said():
    tensor = torch.tensor
    for got, want in (
        (tensor([NAN]), tensor([0.0])),
        (tensor([0.0]), tensor([NAN])),
        (tensor([torch.finfo(torch.float32).max]), tensor([INF])),
        (tensor([-0.0]), tensor([0.0])),
        (tensor([1]), tensor([1.0])),
        (tensor([1.0]), tensor([[1.0]])),
        (tensor([1.0]), tensor([1.0], requires_grad=True)),
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
    assert compare("", "unit 0") == "The result is an empty text, expected unit 0"
    near, far, want = tensor([1e-9, 1.0]), tensor([1e-2, 1.0]), tensor([0.0, 1.0])
    assert compare(far, want, 1e-6) and not compare(near, want, 1e-6) and not compare(1 + 1e-9, 1.0, 1e-6)
    assert not compare(tensor([NAN, INF, -0.0]), tensor([NAN, INF, 0.0]), 1e-6)


def test_nan_is_not_zero_and_infinity_no_number():
    assert not same(torch.tensor([NAN]), torch.tensor([0.0]))
    assert not same(torch.tensor([torch.finfo(torch.float32).max]), torch.tensor([INF]))
    assert same(torch.tensor([NAN, INF]), torch.tensor([NAN, INF])) and same(torch.tensor([1]), torch.tensor([1]))
