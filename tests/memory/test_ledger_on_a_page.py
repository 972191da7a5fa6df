"""The ledger on a page counts what the full one counts, and its sums can be made by hand."""

import pytest
import torch

from minizero import GPT
from minizero.memory import Ledger
from minizero.memory.ledger_on_a_page import LedgerOnAPage
from tests.support.ledger_gpt import CONFIG, TOKENS


def test_a_step_of_a_gpt_counts_as_in_the_full_ledger_but_for_adams_counters():
    older = GPT(CONFIG)  # what is older adds nothing, to either
    with Ledger() as full, LedgerOnAPage() as page:
        older(TOKENS, TOKENS).backward()
        older.zero_grad()
        assert full.current["total"] == page.current == 0 < page.peak == full.peak["total"]
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # the first step makes the states
            model(TOKENS, TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
        counters = sum(state["step"].nbytes for state in optimizer.state.values())
        assert counters == 4 * len(optimizer.state) == 4 * len(list(model.parameters()))
        held = 3 * sum(p.nbytes for p in model.parameters())  # with two moments each
        assert held <= page.current == full.current["total"] - counters
    assert page.peak == full.peak["total"] - counters


@pytest.mark.parametrize("kind", [LedgerOnAPage, Ledger])
def test_views_and_writing_add_nothing_and_what_is_freed_leaves(kind):
    older, grows = torch.zeros(1000), torch.empty(0)
    with kind() as ledger:
        a = torch.zeros(1000)
        views = a[10:], a.view(10, 100).t(), *a.split(500), a.detach(), older[:10]
        a.add_(1).mul_(2)
        torch.ones(1000, out=a)
        older.add_(1)
        torch.ones(4, out=older[:4])
        assert totals(ledger) == (4000, 4000)
        b = a + 1
        assert totals(ledger) == (8000, 8000)
        del b
        torch.add(a[:10], 1, out=grows)  # what is older is not followed, whatever its size
        assert totals(ledger) == (4000, 8000)
        del a  # its views still hold its bytes
        assert totals(ledger) == (4000, 8000)
        del views
        assert totals(ledger) == (0, 8000)


@pytest.mark.parametrize("kind", [LedgerOnAPage, Ledger])
def test_an_operator_may_return_several_tensors(kind):
    with kind() as ledger:
        values, places = torch.ones(10, 3).max(1)  # 10 numbers of 4 bytes, and 10 of 8; the matrix is gone
        assert totals(ledger) == (120, 240)
        several = torch._foreach_add([values, values], 1)
        assert totals(ledger) == (200, 240)
        del values, places, several
        assert totals(ledger)[0] == 0


def totals(ledger):
    now, most = ledger.current, ledger.peak
    return (now, most) if isinstance(ledger, LedgerOnAPage) else (now["total"], most["total"])
