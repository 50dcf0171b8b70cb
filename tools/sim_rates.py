"""Writes the rates that the simulator's shipped fleets are driven by: a part of ServeGen's, small enough for a package.

``python tools/sim_rates.py FOLDER`` takes ``servegen_rates_10min.npz`` of FOLDER (``shared/traces``). Of the
clients that a fleet takes (``population.populate``) every so-manieth by mean rate is kept, so that large and small ones
are there as in the whole. Numbers keep three digits, which makes the file a third as large.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelyard.sim.fleet.population import DAYS_LEAST
from modelyard.sim.rates import RATES_FILE, servegen

TARGET = Path(__file__).resolve().parent.parent / "src" / "modelyard" / "sim" / "examples" / "rates" / RATES_FILE
CLIENTS = 40
_MOMENT = (2026, 1, 1, 0, 0, 0)


def main(folder: Path) -> int:
    """Write the file."""
    clients = sorted(
        (one for one in servegen(folder) if one.family == "language" or one.days > DAYS_LEAST),
        key=lambda one: (one.mean_rate, one.name),
    )
    step = len(clients) / CLIENTS
    kept = [clients[int((place + 0.5) * step)] for place in range(CLIENTS)]
    arrays = {
        "rate": rounded([one.rates for one in kept]),
        "cv": rounded([one.spreads for one in kept], digits=2),
        "mean_tokens": rounded([(one.prompt_tokens, one.completion_tokens) for one in kept]),
        "names": np.array([one.name for one in kept]),
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            page = io.BytesIO()
            np.lib.format.write_array(page, array, version=(1, 0))
            entry = zipfile.ZipInfo(f"{name}.npy", _MOMENT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, page.getvalue())
    sys.stdout.write(f"{TARGET}: {len(kept)} of {len(clients)} clients, {TARGET.stat().st_size:,} bytes\n")
    return 0


def rounded(values: object, digits: int = 3) -> NDArray[np.float32]:
    """Return numbers with so many digits."""
    array = np.asarray(values, dtype=np.float64)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.where(array > 0, array, 1.0))))
    return (np.round(array * scale) / scale).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
