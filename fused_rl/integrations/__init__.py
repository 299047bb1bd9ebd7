"""fused_rl inside other trainers: a module for each host, and `status()`, which says what is replaced where."""

from fused_rl.integrations.reporting import StatusRow, status

__all__ = ["StatusRow", "status"]
