"""Export a trained explainer: ``python export.py --explainer runs/demo/explainer --format onnx --output demo.onnx``."""

from aha.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
