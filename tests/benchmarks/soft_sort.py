"""The n × n soft sort over the default one, forward and backward: ``python -m tests.benchmarks.soft_sort``."""

from __future__ import annotations

import torch

from aha.softsort import METHODS, prefix_masks
from tests.benchmarks.timing import alternate, parser, report


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--regions", type=int, default=784)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--fractions", type=int, default=16)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    scores = torch.randn(parsed.batch, parsed.regions, device=parsed.device)
    fractions = torch.linspace(0, 1, parsed.fractions, device=parsed.device)

    def run(method: str, iterations: int | None = None) -> None:
        leaf = scores.clone().requires_grad_()
        masks = prefix_masks(leaf, fractions, method=method, temperature=0.3, noise=0.3, iterations=iterations)
        masks.square().sum().backward()

    sides = {"quantile_sinkhorn (default)": lambda: run("quantile_sinkhorn")}
    sides |= {"n × n, 20 iterations": lambda: run("gumbel_sinkhorn", 20)}
    sides |= {m: lambda m=m: run(m) for m in METHODS if m not in ("quantile_sinkhorn", "gumbel_sinkhorn")}
    print(f"{parsed.regions} regions, batch {parsed.batch}, {parsed.fractions} fractions, forward and backward")
    report(alternate(sides, parsed.rounds), over="quantile_sinkhorn (default)")


if __name__ == "__main__":
    main()
