"""Evaluate explainers: `python evaluate.py --explainers runs/demo/explainer,cdam --output runs/demo/evaluation`."""

import sys

from aha.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
