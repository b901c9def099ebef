"""Named perturbation protocols, as evaluation uses them.

They live beside the metrics (one floor lower), so that metrics and validation during training score by the same
settings; here is the name under which evaluation and its users find them.
"""

from aha.metrics.protocol_run import ProtocolResult, run_protocol
from aha.metrics.protocols import HIGHER_IS_BETTER, PROTOCOLS, Protocol, count_forwards, get_protocol

__all__ = [
    "HIGHER_IS_BETTER",
    "PROTOCOLS",
    "Protocol",
    "ProtocolResult",
    "count_forwards",
    "get_protocol",
    "run_protocol",
]
