"""The decode step of a Mamba2 layer as one call: conv, checkpointing SSU and gated norm."""
