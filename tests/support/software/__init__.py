"""What real software is tested with: its packages lie in a folder of their own (``requirements.txt``)."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ.get("AUTOPAR_SOFTWARE_PACKAGES", Path(__file__).parents[4] / "software-packages"))
