"""Explanations over the timm model's own forward: ``python -m tests.benchmarks.explain``.

``--model NAME`` times an untrained head of the default width on another classifier; ``--baselines`` CDAM and GradSkip,
too. Weights are random, which changes no cost.
"""

from __future__ import annotations

import torch

from aha.baselines import build_explainer
from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer
from tests.benchmarks.timing import alternate, parser, report


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--model", default="vit_tiny_patch16_224")
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--width", type=int, help="channels of the head; default: the project's")
    options.add_argument("--baselines", action="store_true")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm(parsed.model, pretrained=False, image_size=parsed.size)
    explainer = AmortizedExplainer(classifier, **({"width": parsed.width} if parsed.width else {})).to(parsed.device)
    images = torch.rand(parsed.batch, 3, *classifier.image_size, device=parsed.device)

    @torch.no_grad()
    def plain() -> torch.Tensor:
        return classifier.model(classifier.normalize(images))

    sides = {"plain forward": plain, "explain (logits and map)": lambda: explainer.explain(images)}
    if parsed.baselines:
        methods = {name: build_explainer(name, classifier) for name in ("cdam", "gradskip")}
        sides |= {name: lambda method=method: method.attribute(images) for name, method in methods.items()}
    print(f"{parsed.model}, {parsed.size} px, batch {parsed.batch}, {parsed.threads} thread(s)")
    report(alternate(sides, parsed.rounds), over="plain forward")


if __name__ == "__main__":
    main()
