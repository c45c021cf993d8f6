"""Print torch's version and what it knows of the GPUs as one line of JSON: ``python -m autotune.worker.doctor``."""

from __future__ import annotations

import json
import os
import warnings


def main() -> None:
    """Import torch, start CUDA, print what was found or the error, and exit."""
    # torch's own warnings about the driver are not shown.
    warnings.simplefilter("ignore")
    try:
        import torch
    except Exception as error:  # of a damaged installation, whatever it is
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    found: dict[str, object] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "architectures": [],
        "device_count": 0,
        "error": None,
    }
    if torch.version.cuda is not None:
        try:
            found["device_count"] = torch.cuda.device_count()
            # A few bytes on the first GPU: listing does not start CUDA.
            torch.zeros(1, device="cuda")
            found["architectures"] = torch.cuda.get_arch_list()
        except Exception as error:
            found["error"] = str(error).partition("\n")[0]
    print(json.dumps(found), flush=True)
    # Without waiting for CUDA to be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
