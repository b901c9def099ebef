"""Train an explainer: `python train.py --config configs/demo.yaml`, or `--help`."""

from aha.cli.train import main

if __name__ == "__main__":
    main()
