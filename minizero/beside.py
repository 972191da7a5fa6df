"""`flash` and `precision` must be ours. `minizero` imports this before it needs them.

Python looks first into the folder where it was started, or where the script lies. A flash.py there would be imported in
place of our package, and fail with "'flash' is not a package", which tells nobody why.
"""

import importlib.util
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
for name in ("flash", "precision"):
    found = importlib.util.find_spec(name)
    file = None if found is None else found.origin or next(iter(found.submodule_search_locations or []), None)
    if file is None or not Path(file).resolve().is_relative_to((HOME / name).resolve()):
        raise ImportError(
            f"minizero needs its package {name}, in {HOME / name}, but Python finds {file}: give that file or folder "
            "another name, or start in another folder"
        )
