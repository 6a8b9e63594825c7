"""Makes `bench` importable: it is no installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    # In front: this directory's own name is `bench`, too.
    sys.path.insert(0, str(ROOT))
