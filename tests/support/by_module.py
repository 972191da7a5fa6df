"""A ledger's holders, added up by module."""


def by_module(holders):
    """Bytes by module, then by category, with `total` and `tensors`; the largest module first.

    What was born in no module's forward stands under its phase, such as "(backward)".
    """
    found = {}
    for row in holders:
        module = found.setdefault(row["module"] or f"({row['phase'] or 'older'})", {"total": 0, "tensors": 0})
        for key, more in ((row["category"], row["bytes"]), ("total", row["bytes"]), ("tensors", row["tensors"])):
            module[key] = module.get(key, 0) + more
    return dict(sorted(found.items(), key=lambda item: -item[1]["total"]))
