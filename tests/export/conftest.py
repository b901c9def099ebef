from __future__ import annotations

import pytest
import torch
from trained_like import trained_like

from aha import AmortizedExplainer


@pytest.fixture(scope="session")
def explainer(vit) -> AmortizedExplainer:
    torch.manual_seed(1)
    return trained_like(vit)
